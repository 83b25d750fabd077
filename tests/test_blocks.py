"""Blocks checkpointed, compiled and in float8: bytes kept, work repeated, compilations, the same numbers."""

import logging
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from config import ActivationCheckpoint, Float8, Lora, Model
from models.initialization import fill_with_nan, init_weights
from models.lora import apply_lora
from models.vit import VisionTransformer
from parallelisms.activation_checkpoint import apply_activation_checkpoint
from parallelisms.compile import apply_compile
from parallelisms.degrees import Degrees
from parallelisms.float8 import apply_float8, check_float8, precompute_float8_scales
from planning.memory import block_activations, unit_bytes
from planning.workload import Workload, architecture_of
from tests.started_jobs import run_program

pytestmark = pytest.mark.usefixtures("no_compilations")

RECOMPUTING = ("full", "every_n_blocks", "selective")
MODES = ("none", *RECOMPUTING)
KEYS = torch.arange(2)  # of the samples, for stochastic depth


def build(
    mode: str = "none",
    layers: int = 2,
    grid: tuple[int, int] = (8, 16),
    dim: int = 64,
    heads: int = 2,
    float8: Float8 | None = None,
    **options: Any,
) -> VisionTransformer:
    """A ViT of one token a cell."""
    model = VisionTransformer(2, 2, grid, Model("vit", (1, 1), dim, layers, heads, **options))
    if float8:
        apply_float8(model, float8, "cpu")
    init_weights(model, seed=0)
    apply_activation_checkpoint(model, ActivationCheckpoint(mode))  # type: ignore[arg-type]
    return model


def patches(tokens: int = 128, dtype: torch.dtype | None = None) -> Tensor:
    return torch.randn(2, tokens, 2, generator=torch.Generator().manual_seed(1)).to(dtype)


def step(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and gradients, whole where they are sharded."""
    out = model(patches(), KEYS)
    out.square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return out.detach(), {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in gradients.items()}


# -- activation checkpointing: bytes

B, T, D, HEADS = 2, 512, 128, 4
build_large = partial(build, grid=(16, 32), dim=D, heads=HEADS)
PRECISIONS = {
    "float32": (torch.float32, False),
    "bfloat16": (torch.bfloat16, False),
    "autocast": (None, True),
}


class Storages(TorchDispatchMode):
    """Every storage made while active, and which of them still live: autograd's and the policy's alike."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.weights: set[int] = set()  # autocast's copies: a matter of parameters, not of tokens

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.made.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
                if func is torch.ops.aten._to_copy.default and isinstance(args[0], nn.Parameter):
                    self.weights.add(storage._cdata)
        return out

    def live_bytes(self, model: nn.Module) -> int:
        own = {p.untyped_storage()._cdata for p in model.parameters()} | self.weights
        return sum(n for key, (ref, n) in self.made.items() if key not in own and not ref.expired())


def bytes_alive(model: nn.Module, x: Tensor, autocast: bool, *keys: Tensor) -> int:
    """After model(x, *keys), without parameters and autocast's copies of them."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), Storages() as storages:
        out = model(x, *keys)
    alive = storages.live_bytes(model)
    del out
    return alive


def units_alive(mode: str, precision: str = "float32", **options) -> float:
    """A block's bytes in units of T d: the difference of six blocks and four, of which two are a segment."""
    dtype, autocast = PRECISIONS[precision]
    kept = [
        bytes_alive(build_large(mode, n, **options).to(dtype), patches(T, dtype), autocast, KEYS)
        for n in (6, 4)
    ]
    return (kept[0] - kept[1]) / 2 / (B * T * D * (4 if precision == "float32" else 2))


def planned_units(mode: str, **options) -> float:
    """Planned activations of a block, in the same units."""
    model = architecture_of(Model("vit", (1, 1), D, 4, HEADS, **options), (16, 32), 2, 2)
    attention = options.get("attention_backend", "sdpa")
    work = Workload(model, Degrees(), B, B, ac_mode=mode, attention=attention)
    return block_activations(work, mode) / unit_bytes(work)


OTHERS: list[dict[str, Any]] = [{"mlp_dim": 2 * D}, {"qk_norm": True}, {"position": "rotary"}]
OTHERS += [{"stochastic_depth": 0.5}]
UNITS = [(mode, precision, {}) for precision in PRECISIONS for mode in MODES]
for storing in ("none", "selective"):
    UNITS += [
        (storing, each, {"attention_backend": "math"}) for each in ("float32", "autocast")
    ]  # its scores
    UNITS += [(storing, "float32", options) for options in OTHERS]


@pytest.mark.parametrize(("mode", "precision", "options"), UNITS)
def test_a_block_keeps_what_is_stated(mode: str, precision: str, options: dict[str, Any]) -> None:
    found, tolerance = units_alive(mode, precision, **options), 0.02 if options in OTHERS else 0.01
    assert found == pytest.approx(planned_units(mode, **options), rel=tolerance)


def test_outputs_of_adapters_are_computed_again() -> None:
    """They are as large as those of the matrices: with both, "selective" kept more than "none"."""

    def kept(layers: int) -> int:
        model = build_large("none", layers)
        apply_lora(model, Lora(rank=4))
        apply_activation_checkpoint(model, ActivationCheckpoint("selective"))
        return bytes_alive(model, patches(T), False)

    units = (kept(4) - kept(2)) / 2 / (B * T * D * 4)
    assert units == pytest.approx(planned_units("selective"), abs=0.3)


def test_float8_keeps_one_unit_more() -> None:
    kept = planned_units("selective") + 1
    assert units_alive("selective", float8=Float8()) == pytest.approx(kept, rel=0.01)


@pytest.mark.parametrize("mode", MODES)
def test_compiled_blocks_keep_the_same(mode: str) -> None:
    """Of what autograd saves, each storage once, without parameters."""

    def kept(layers: int) -> int:
        model, saved = build_large("none", layers), {}
        apply_activation_checkpoint(model, ActivationCheckpoint(mode), compiled=True)  # type: ignore[arg-type]
        torch._dynamo.reset()
        apply_compile(model, backend="aot_eager_decomp_partition")
        own = {p.untyped_storage()._cdata for p in model.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            saved[tensor.untyped_storage()._cdata] = tensor
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            model(patches(T))
        return sum(t.untyped_storage().nbytes() for key, t in saved.items() if key not in own)

    units = (kept(6) - kept(4)) / 2 / (B * T * D * 4)
    assert units == pytest.approx(planned_units(mode), rel=0.02)


# -- activation checkpointing: work


class Operations(TorchDispatchMode):
    """Operations of matmuls in units of T d^2, and calls of attention's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.matmuls, self.attentions = 0.0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]
        if name in ("aten::mm", "aten::addmm", "aten::bmm"):
            inner = args[-1].shape[-2]
            self.matmuls += 2 * out.numel() * inner / (B * T * D**2)
        self.attentions += name == "aten::_scaled_dot_product_flash_attention_for_cpu"
        return out


def backward_work(mode: str, layers: int, **options) -> tuple[float, int]:
    loss = build_large(mode, layers, **options)(patches(T), KEYS).square().mean()
    with Operations() as operations:
        loss.backward()
    return operations.matmuls, operations.attentions


@pytest.mark.parametrize(
    ("mode", "matmuls", "attentions"),
    # A block's forward: 24 T d^2 in its four matrices; the last, 8, is not needed again.
    [("none", 0, 0), ("selective", 0, 0), ("full", 16, 1), ("every_n_blocks", (24 + 16) / 2, 1)],
)
@pytest.mark.parametrize("stochastic_depth", (0.0, 0.5))
def test_work_repeated_per_block(mode: str, matmuls: float, attentions: int, stochastic_depth: float) -> None:
    six, four = (backward_work(mode, n, stochastic_depth=stochastic_depth) for n in (6, 4))
    assert (six[0] - four[0]) / 2 - 48 == pytest.approx(matmuls)  # backward itself: twice 24
    assert (six[1] - four[1]) / 2 == attentions


def test_selective_repeats_no_matmul_of_math_attention_or_float8() -> None:
    for options in ({"attention_backend": "math"}, {"float8": Float8()}):
        assert backward_work("selective", 2, **options) == backward_work("none", 2, **options)


# -- the same numbers


@pytest.mark.parametrize("mode", RECOMPUTING)
@pytest.mark.parametrize(
    "options", ({"stochastic_depth": 0.5}, {"attention_backend": "math", "qk_norm": True})
)
def test_gradients_are_those_without_it(mode: str, options: dict) -> None:
    """Bit-exact, with samples that blocks drop."""
    plain, recomputed = (step(build(m, layers=3, **options))[1] for m in ("none", mode))
    assert list(plain) == list(recomputed)
    for name in plain:
        assert torch.equal(plain[name], recomputed[name]), name


# -- compile

WINDOWS = ((2, 0), (0, 2), (2, 2), (0, 0))
CASES = [(mode, {"attention_backend": "flash", "stochastic_depth": 0.5}, 1) for mode in MODES]


@pytest.mark.parametrize(
    ("mode", "options", "number"), [*CASES, ("selective", {"attention_windows": WINDOWS}, len(WINDOWS))]
)
def test_one_compilation_for_all_blocks_of_a_shape(mode: str, options: dict, number: int) -> None:
    """Ten blocks: more than the eight compilations after which torch gives up."""
    model, graphs = build(mode, 10, **options), CompileCounterWithBackend("aot_eager")
    apply_compile(model, backend=graphs)
    for _ in range(2):
        step(model)
    assert graphs.frame_count == number
    with torch.no_grad():
        model.eval()(patches())
    assert graphs.frame_count == 2 * number  # evaluation is another graph
    step(model.train())
    assert graphs.frame_count == 2 * number


def test_one_compilation_under_fsdp(one_rank: torch.device) -> None:
    model, graphs = build("selective", 4), CompileCounterWithBackend("aot_eager")
    apply_compile(model, backend=graphs)
    mesh = init_device_mesh(one_rank.type, (1,))
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    step(model)
    assert graphs.frame_count == 1


def test_ddp_does_not_cut_a_block(one_rank: torch.device) -> None:
    """12 MB of gradients, which do not fit into the first bucket of 1 MB."""
    model = VisionTransformer(2, 2, (1, 2), Model("vit", (1, 1), 512, 2, 2))
    graphs = CompileCounterWithBackend("aot_eager")
    apply_compile(model, backend=graphs)
    replica = DistributedDataParallel(model, init_sync=False)
    replica(torch.randn(1, 2, 2)).sum().backward()
    assert graphs.frame_count == 1


def test_what_cannot_be_one_graph_is_an_error() -> None:
    class Printing(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return tokens

    model = build(layers=1)
    model.blocks["0"].mlp = Printing()
    apply_compile(model, backend="aot_eager")
    with pytest.raises(Unsupported):
        step(model)


# -- float8, emulated

LAYERS = ("attention.qkv", "attention.projection", "mlp.up", "mlp.down")


def error(value: Tensor, reference: Tensor) -> float:
    return float((value - reference).norm() / reference.norm())


def converted(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"]


def assert_same_step(model: nn.Module, reference: nn.Module) -> None:
    (out, gradients), (expected, references) = step(model), step(reference)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-7)
    assert list(gradients) == list(references)
    for name in references:
        torch.testing.assert_close(gradients[name], references[name], rtol=1e-5, atol=1e-8)


def test_matrices_of_the_blocks_are_converted_and_no_others() -> None:
    model = build(float8=Float8())
    names = apply_float8(model, Float8(), "cpu")
    assert names == [f"blocks.{i}.{layer}" for i in range(2) for layer in LAYERS] == converted(model)
    assert type(model.patch_embedding) is type(model.head) is nn.Linear
    assert list(model.state_dict()) == list(build(float8=Float8()).state_dict())


def test_layers_too_small_or_of_odd_size_stay() -> None:
    with pytest.raises(ValueError, match="no layer of the blocks has multiples of 16"):
        build(dim=40, float8=Float8())
    with pytest.raises(ValueError, match="multiples of 128"):
        apply_float8(build(), Float8(), "cpu", 8)  # ranks: 64 / 8 is not a multiple of 16


def test_step_is_near_that_of_float32() -> None:
    """e4m3 keeps 3 bits of the fraction: measured 4 % off in the output, 10 % in the worst gradient."""
    (out, gradients), (expected, references) = step(build(float8=Float8())), step(build())
    assert 1e-3 < error(out, expected) < 0.08
    for name, reference in references.items():
        if not name.endswith("qkv.bias"):  # that of the keys has no gradient but rounding
            assert error(gradients[name], reference) < 0.2, name


@pytest.mark.parametrize("mode", MODES)
def test_compile_and_checkpointing_change_nothing(mode: str) -> None:
    model = build(mode, float8=Float8())
    assert_same_step(model, build(float8=Float8()))
    model.zero_grad()
    apply_compile(model, backend="aot_eager")
    assert_same_step(model, build(float8=Float8()))


@pytest.mark.parametrize("compiled", (False, True))
def test_float8_all_gather(compiled: bool, one_rank: torch.device) -> None:
    """Sharded from the meta device, two optimiser steps: as without the all-gather in float8."""
    with torch.device("meta"):
        model = VisionTransformer(2, 2, (8, 16), Model("vit", (1, 1), 64, 2, 2))
    apply_float8(model, Float8(enable_fsdp_float8_all_gather=True), "cpu")
    if compiled:
        apply_compile(model, backend="aot_eager")
    mesh = init_device_mesh(one_rank.type, (1,))
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    fill_with_nan(model)
    init_weights(model, seed=0, assign=lambda target, value: target.to_local().copy_(value))  # type: ignore[attr-defined]
    reference = build(float8=Float8())
    for _ in range(2):
        assert_same_step(model, reference)
        update(model)
        update(reference)


def update(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    optimizer.zero_grad()
    precompute_float8_scales(model)


def test_a_machine_that_cannot_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    check_float8("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ValueError, match="needs compute capability 8.9 and this GPU has 8.0"):
        check_float8("cuda")


def test_it_is_emulated_without_cuda_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    layer = build(float8=Float8()).get_submodule("blocks.0.mlp.up")
    assert layer.config.emulate and "float8: emulated on cpu" in caplog.text  # type: ignore[union-attr]


def test_without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="the package torchao is not installed; pip install"):
        check_float8("cpu")


def test_torchao_is_imported_only_where_it_is_used() -> None:
    """It takes seconds and writes warnings."""
    program = "import sys, parallelisms.float8; sys.exit('torchao' in sys.modules)"
    assert run_program(sys.executable, "-c", program).returncode == 0
