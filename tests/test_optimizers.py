"""Moments in 16 and 8 bits: what they hold, that runs end as well as with float32, on any layout, resumed."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from checkpoints.checkpointer import Checkpointer
from config import Checkpoint, Model
from errors import ConfigError
from models.initialization import init_weights
from models.vit import VisionTransformer
from tests.parity import Layout, SmallRun, full, replicate, tp
from tests.resharding import whole
from training.bad_steps import step_unless
from training.config_checks import load_checked
from training.optimizers import compact_adamw
from training.optimizers.build import build_adamw, set_lr
from training.optimizers.compact_adamw import BLOCK, code_tables, decode, encode
from training.optimizers.lr_schedules import lr_factor
from training.state import resume

COMPACT = ("bfloat16", "int8")
STEPS = 3
LAYOUTS = {"one": Layout(1), "fsdp": Layout(2), "zero1": Layout(2, replicate(data_parallel="zero1"))}
LAYOUTS |= {"tp": Layout(2, tp())}


def build(model: nn.Module, state_dtype: str) -> torch.optim.AdamW:
    parameters = dict(model.named_parameters())
    optimizer = build_adamw(parameters, (0.9, 0.95), 1e-8, 0.1, state_dtype)
    set_lr(optimizer, 1e-2)
    return optimizer


# -- what is held


@pytest.mark.parametrize(("state_dtype", "bytes_each"), [("float32", 8), ("bfloat16", 4), ("int8", 2.125)])
def test_bytes_of_a_parameter(state_dtype: str, bytes_each: float) -> None:
    model = nn.Linear(256, 128, bias=False)
    model.weight.grad = torch.randn(128, 256)
    optimizer = build(model, state_dtype)
    optimizer.step()
    moments = [value for value in optimizer.state[model.weight].values() if value.ndim]
    assert sum(value.nbytes for value in moments) == bytes_each * model.weight.numel()


@pytest.mark.parametrize("moment", ("exp_avg", "exp_avg_sq"))
@pytest.mark.parametrize("size", (1.0, 1e-6, 1e-9))
def test_codes_are_near(moment: str, size: float) -> None:
    """Zero stays zero; a second moment that is not, does not become zero."""
    values, table = code_tables()[moment]
    x = size * torch.randn(40, 4 * BLOCK, generator=torch.Generator().manual_seed(0))
    x = x.square() if moment == "exp_avg_sq" else x
    x[:, 0] = 0.0
    x[:, 1] *= 1e-5
    codes, scales = encode(x, table)
    back = decode(codes, scales, values)
    assert codes.dtype == torch.uint8 and codes.shape == x.shape and scales.shape == (40, 4)
    assert float((back - x).norm() / x.norm()) < 0.02  # the largest to 0.7 %
    assert torch.equal(back[:, 0], x[:, 0])
    assert moment == "exp_avg" or bool((back[:, 1] > 0).all())


@pytest.mark.parametrize("state_dtype", COMPACT)
def test_a_bad_step_leaves_no_trace(state_dtype: str) -> None:
    model = nn.Linear(128, 3)
    optimizer = build(model, state_dtype)

    def step(value: float) -> list[Tensor]:
        for parameter in model.parameters():
            parameter.grad = value * torch.randn(parameter.shape)
        step_unless(~torch.isfinite(torch.tensor(value)), optimizer)
        moments = [m.clone() for state in optimizer.state.values() for m in state.values()]
        return [p.detach().clone() for p in model.parameters()] + moments

    before = step(1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, step(float("nan")), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(before, step(1.0), strict=True))


# -- convergence


def final_loss(seed: int, state_dtype: str, steps: int = 150) -> float:
    """Of a tiny ViT that learns to shift smooth waves, its lr a cosine: mean over the last 20 steps."""
    generator = torch.Generator().manual_seed(seed)
    model = VisionTransformer(2, 2, (8, 16), Model("vit", (2, 2), 64, 2, 2))
    init_weights(model, seed=seed)
    optimizer, losses = build(model, state_dtype), []
    for step in range(1, steps + 1):
        set_lr(optimizer, 3e-3 * lr_factor(step, steps, 20, "cosine", 0.0))
        phase = 6.28 * torch.rand(8, 2, 1, 1, generator=generator)
        longitude = torch.linspace(0, 6.28 * 15 / 16, 16).expand(8, 2, 8, 16)
        fields = torch.sin(longitude + phase) + 0.5 * torch.cos(2 * longitude - phase)
        loss = (model.to_fields(model(model.from_fields(fields))) - fields.roll(2, dims=-1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return float(np.mean(losses[-20:]))


@pytest.mark.slow
def test_runs_end_within_the_spread_of_seeds() -> None:
    plain = [final_loss(seed, "float32") for seed in range(3)]
    for state_dtype in COMPACT:
        compact = final_loss(0, state_dtype)
        assert abs(compact - plain[0]) < max(plain) - min(plain), state_dtype


# -- layouts and checkpoints


def train(name: str, state_dtype: str, folder: Path | None = None) -> dict[str, Any]:
    """Some steps, a save, as many again: losses, weights after half of them, everything at the end."""
    layout = LAYOUTS[name]
    with patch.object(compact_adamw, "BLOCK", 16):  # the small run's rows have 32 numbers
        small = SmallRun(layout, ema_decay=0.9, state_dtype=state_dtype)
        state = small.state
        losses = [small.step(step)[0] for step in range(STEPS)]
        weights = {name: full(p) for name, p in small.model.parameters.items()}
        if folder:
            checkpointer = Checkpointer(folder, Checkpoint(async_mode="disabled"), "", layout.parallelism)
            checkpointer.save(STEPS, state.state_dict())
            checkpointer.close()
        saved = whole(state)
        losses += [small.step(STEPS + more)[0] for more in range(STEPS)]
        return {"losses": losses, "weights": weights, "saved": saved, "end": whole(state)}


def go_on(name: str, state_dtype: str, folder: Path) -> dict[str, Any]:
    layout = LAYOUTS[name]
    with patch.object(compact_adamw, "BLOCK", 16):
        small = SmallRun(layout, seed=1, ema_decay=0.9, state_dtype=state_dtype)
        state = small.state
        checkpointer = Checkpointer(folder, Checkpoint(async_mode="disabled"), "", layout.parallelism)
        try:
            assert resume(checkpointer, state)
        except ValueError as error:
            return {"error": str(error)}
        finally:
            checkpointer.close()
        loaded = whole(state)
        losses = [small.step(STEPS + more)[0] for more in range(STEPS)]
        return {"losses": losses, "loaded": loaded, "end": whole(state)}


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return left.keys() == right.keys() and all(
        np.array_equal(left[n], right[n], equal_nan=True) for n in left
    )


@pytest.mark.parametrize("state_dtype", COMPACT)
@pytest.mark.parametrize("name", ("fsdp", "zero1", "tp"))
def test_layouts_train_alike(ranks, one_rank, state_dtype: str, name: str) -> None:
    """A moment at the border between two codes goes either way, which moves a weight by a share of its lr."""
    expected, found = train("one", state_dtype), ranks(2).run(train, name, state_dtype)[0]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    for key, weight in expected["weights"].items():
        error = np.abs(found["weights"][key] - weight).max()
        assert error < 5e-4, key  # a twentieth of lr; measured 7e-5 over all kinds of layouts


@pytest.mark.parametrize("state_dtype", COMPACT)
def test_a_resumed_run_repeats_the_bits(ranks, tmp_path: Path, state_dtype: str) -> None:
    """Averaged weights are in the checkpoint too."""
    expected = ranks(2).run(train, "fsdp", state_dtype, tmp_path)[0]
    found = ranks(2).run(go_on, "fsdp", state_dtype, tmp_path)[0]
    assert same(found["loaded"], expected["saved"]) and same(found["end"], expected["end"])
    assert any(name.endswith("_scale") for name in found["loaded"]) == (state_dtype == "int8")


@pytest.mark.parametrize(("source", "target"), [("fsdp", "tp"), ("tp", "zero1"), ("zero1", "fsdp")])
def test_another_layout_goes_on(ranks, tmp_path: Path, source: str, target: str) -> None:
    """Blocks lie within rows of whole matrices: the codes that are loaded are those that were saved."""
    expected = ranks(2).run(train, source, "int8", tmp_path)[0]
    found = ranks(2).run(go_on, target, "int8", tmp_path)[0]
    assert same(found["loaded"], expected["saved"])
    assert found["losses"] == pytest.approx(expected["losses"][STEPS:], rel=1e-4)


def test_another_state_dtype_is_refused_by_name(ranks, tmp_path: Path) -> None:
    ranks(2).run(train, "fsdp", "int8", tmp_path)
    for asked in ("float32", "bfloat16"):
        error = ranks(2).run(go_on, "fsdp", asked, tmp_path)[0]["error"]
        assert error.startswith(f'optimizer.state_dtype = "{asked}": ') and error.endswith('to "int8"')


# -- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["state_dtype=bfloat16", "beta2=0.999"],
            "optimizer.state_dtype = 'bfloat16': .*beta2 to 0.99 or less",
        ),
        (["state_dtype=int4"], "optimizer.state_dtype = 'int4'"),
    ],
)
def test_combinations_that_cannot_be(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_checked([f"--optimizer.{argument}" for argument in arguments])


def test_rows_cut_inside_a_block() -> None:
    argv = ["--optimizer.state_dtype=int8", "--parallelism.tensor_parallel_degree=2"]
    with pytest.raises(ConfigError, match="cuts model.dim = 192 inside a block of 64 numbers; use"):
        load_checked(argv)
    with pytest.raises(ValueError, match="the run has 1 rank"):  # the next thing that is wrong
        load_checked([*argv, "--model.dim=256"])
