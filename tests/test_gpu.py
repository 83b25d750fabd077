"""Checks of benchmarks/gpu.sh, run on a CPU with the CPU's kernels, from start to end."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu import TINY, Case, Sizes, training_of
from benchmarks.random_run import RandomRun
from models.attention import activate, attention, check_backend
from parallelisms.mesh import start_ranks
from parallelisms.ring_attention import block_kernels, math_backward, math_forward
from planning.memory import memory
from tests.started_jobs import ROOT, run_program

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BACKENDS = {"cpu": ("sdpa", "math"), "cuda": ("sdpa", "cudnn", "flash", "flash4", "flash_attn")}
on_gpu = pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a CUDA device")


@pytest.fixture
def training():
    """Makes tiny models as train.py does, on this device."""
    start_ranks(60)

    def make(compiled: bool = False, **case: Any) -> RandomRun:
        torch.manual_seed(0)  # of weights and fields
        sizes = replace(TINY, compiled=compiled)
        return training_of(Case(TINY.patches[0], TINY.heads[0], batch=2, **case), sizes, DEVICE)

    yield make
    dist.destroy_process_group()
    torch._dynamo.reset()


def inputs(head_dim: int = 64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (2, 3, 256, head_dim)
    return [torch.randn(shape, generator=generator).to(DEVICE, torch.bfloat16) for _ in range(4)]


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).detach().norm() / exact.detach().norm())


@pytest.fixture(params=BACKENDS[DEVICE.type])
def backend(request: pytest.FixtureRequest) -> str:
    try:
        check_backend(request.param, DEVICE.type, torch.bfloat16)
        return activate(request.param)
    except (ValueError, RuntimeError) as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("head_dim", (64, 128))
def test_attention_and_its_gradients_are_those_of_float64(backend: str, head_dim: int) -> None:
    *qkv, gradient = inputs(head_dim)
    exact = [x.double().requires_grad_() for x in qkv]
    ours = [x.clone().requires_grad_() for x in qkv]
    expected, found = (attention(x[0], x[1], x[2], name) for x, name in ((exact, "math"), (ours, backend)))
    expected.backward(gradient.double())
    found.backward(gradient)
    assert relative(found, expected) < 0.01
    for mine, theirs in zip(ours, exact, strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert relative(mine.grad, theirs.grad) < 0.02


def test_ring_kernels_are_those_of_plain_matmuls(backend: str) -> None:
    """Forward, log-sum-exp and backward of a chunk, as parallelisms/ring_attention.py merges them."""
    q, k, v, gradient = inputs()
    forward, backward = block_kernels(backend, DEVICE.type, torch.bfloat16)
    exact = (q.double(), k.double(), v.double())
    expected, expected_lse = math_forward(*exact)
    out, lse = forward(q, k, v)
    assert relative(out, expected) < 0.01 and relative(lse, expected_lse) < 1e-3
    gradients = math_backward(gradient.double(), *exact, expected, expected_lse)
    for found, wanted in zip(backward(gradient, q, k, v, out, lse), gradients, strict=True):
        assert relative(found, wanted) < 0.02


# On a CPU, where compiling takes half a minute, tests/test_parity.py has all but the first.
@pytest.mark.parametrize(
    "case",
    [{}, *(pytest.param(c, marks=on_gpu) for c in ({"compiled": True}, {"mode": "none"}, {"float8": True}))],
    ids=str,
)
def test_steps_lower_the_loss(training, case: dict) -> None:
    run = training(**case)
    losses = [run.loss() for _ in range(8)]
    assert losses[-1] < losses[0]


def test_a_bad_step_leaves_the_weights(training) -> None:
    run = training()
    run.step()
    before = {name: p.detach().clone() for name, p in run.model.parameters.items()}
    run.assembly.normalizer.std.fill_(float("nan"))
    run.step()
    assert all(torch.equal(p, before[name]) for name, p in run.model.parameters.items())


@on_gpu
def test_no_step_waits_for_the_device(training) -> None:
    """Bad ones neither: the fused optimiser looks at the flag on the device."""
    run = training()
    for _ in range(3):
        run.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            run.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.slow
def test_the_rehearsal_ends_in_the_table(tmp_path: Path) -> None:
    """Parts of one process; what they have measured lies where it was asked for."""
    command = [sys.executable, "benchmarks/gpu.py", "--rehearse", "--only", "loader,attention"]
    done = run_program(*command, OUT=str(tmp_path))
    assert done.returncode == 0, done.stderr
    (loaded,) = [line for line in done.stdout.splitlines() if line.startswith("loader (GB/s)")]
    assert "not measured" not in loaded
    rows = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert {row["part"] for row in rows} == {"loader", "attention"}
    assert all(row["torch"] == torch.__version__ for row in rows)


def test_planned_peaks_are_those_of_a_gpu() -> None:
    """Peaks of vit1b compiled, with and without checkpointing and float8, by PyTorch's allocator."""
    rows = [json.loads(line) for line in (ROOT / "benchmarks/results/gpu.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["part"] == "steps" and row.get("peak_bytes")]
    assert {row["mode"] for row in rows} == {"none", "selective"} and any(row["float8"] for row in rows)
    for row in rows:
        own = {name: row[name] for name in ("heads", "float8", "mode", "batch", "backend")}
        planned = memory(Case(tuple(row["patch"]), **own).workload(Sizes())).peak
        assert planned == pytest.approx(row["peak_bytes"], rel=0.01), row["what"]
