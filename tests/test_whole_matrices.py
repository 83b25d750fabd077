"""LAMB, LARS, SGD and Muon: what their papers say, on any layout, without bad steps, resumed to the bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from checkpoints.checkpointer import Checkpointer
from checkpoints.run_state import resume
from command_line import load_config
from config import Checkpoint, Optimizer
from errors import ConfigError
from optimizers.build import build_optimizer, set_lr
from optimizers.shared_sums import SharedSums
from parallelisms.collectives import Recorder
from tests.optimizer_references import MOMENTUM, trained
from tests.parity import Layout, SmallRun, difference, full, gather_stages, pp, replicate, tp
from tests.resharding import differences, whole
from training.bad_steps import step_unless

NAMES = ("LAMB", "LARS", "SGD", "Muon")
STEPS = 3
LAYOUTS = {
    "one": Layout(1),
    "zero1": Layout(2, replicate(data_parallel="zero1")),
    "hsdp": Layout(4, replicate()),
    "fsdp x tp": Layout(4, tp()),
    "pp x fsdp": Layout(4, pp()),
}
# Newton and Schulz make the smallest singular values some 500 times larger, and with them their rounding.
TOLERANCE = {"LAMB": 1e-6, "LARS": 1e-6, "SGD": 1e-6, "Muon": 2e-5}


def settings(name: str) -> dict[str, Any]:
    return {"name": name, "momentum": MOMENTUM, "max_norm": 0.0}


def train(layout: Layout, name: str) -> dict[str, Any]:
    """Weights before and after some steps, the gradients of each, and the collectives of the last update."""
    small = SmallRun(layout, **settings(name))
    group, parameters = small.model.pipeline_group, small.model.parameters
    before = gather_stages({n: full(p) for n, p in parameters.items()}, group)
    gradients, record, plain = [], Recorder(small.mesh), small.run.optimizer.step

    def step() -> None:
        nonlocal record
        record = Recorder(small.mesh)
        with record:
            plain()

    small.run.optimizer.step = step  # type: ignore[method-assign, assignment]
    for number in range(STEPS):
        small.step(number)
        gradients.append(gather_stages(small.gradients, group))
    after = gather_stages({n: full(p) for n, p in parameters.items()}, group)
    return {"before": before, "gradients": gradients, "after": after, "collectives": dict(record.calls)}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_does_what_the_paper_says(ranks, one_rank, layout: str, name: str) -> None:
    """With this layout's own gradients; norms of all matrices are one collective."""
    asked = LAYOUTS[layout]
    found = ranks(asked.ranks).run(train, asked, name)[0] if asked.ranks > 1 else train(asked, name)
    expected = trained(name, found["before"], found["gradients"], decay=0.05)
    error, where = difference(found["after"], expected)
    assert error < TOLERANCE[name], (error, where)
    assert max(np.abs(found["after"][n] - w).max() for n, w in found["before"].items()) > 1e-4
    if name != "Muon":
        # Beside what moves a gradient that tensor parallelism has cut otherwise than its parameter.
        sums = [calls for call, calls in found["collectives"].items() if call.kind == "all-reduce"]
        assert sums == [1] * (name != "SGD" and asked.ranks > 1), found["collectives"]


# -- one process


def build(name: str, model: nn.Module, dtype: torch.dtype = torch.float32) -> torch.optim.Optimizer:
    parameters = dict(model.named_parameters())
    sums = SharedSums(list(parameters), parameters, 1, torch.device("cpu"))
    optimizer = build_optimizer(parameters, Optimizer(name=name, momentum=MOMENTUM), sums, dtype)  # type: ignore[arg-type]
    set_lr(optimizer, 1e-2)
    return optimizer


def small_model() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"blocks": nn.ModuleDict({"0": nn.Linear(48, 32)}), "head": nn.Linear(32, 5)})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad_step", (1, 2))
def test_a_bad_step_leaves_no_trace(one_rank, name: str, bad_step: int) -> None:
    """Not the first one either: moments start at 0, not where memory happens to be."""
    models = small_model(), small_model()
    skipping, straight = (build(name, model) for model in models)
    for number in range(1, 4):
        gradients = [torch.randn(p.shape) for p in models[0].parameters()]
        for model, optimizer, bad in (
            (models[0], skipping, number == bad_step),
            (models[1], straight, False),
        ):
            if model is models[1] and number == bad_step:
                continue
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = torch.full_like(gradient, torch.nan) if bad else gradient.clone()
            step_unless(torch.tensor(bad), optimizer)
    for left, right in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(left, right)
        states = skipping.state[left], straight.state[right]
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_muon_takes_the_step_of_torch(one_rank) -> None:
    """In bfloat16, on a matrix that is not sharded: to the bit."""
    model = small_model()
    ours, weight = build("Muon", model, torch.bfloat16), model.blocks["0"].weight  # type: ignore[index]
    copy = nn.Parameter(weight.detach().clone())
    scale = "match_rms_adamw"
    theirs = torch.optim.Muon([copy], lr=1e-2, weight_decay=0.05, momentum=MOMENTUM, adjust_lr_fn=scale)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape)
        copy.grad = weight.grad.clone()
        ours.step()
        theirs.step()
        assert torch.equal(weight, copy)


def test_the_trust_ratio_is_capped_and_1_where_there_is_no_norm(one_rank) -> None:
    """A matrix 1,000 times as large as its step moves by 10 times its step; one of zeros by its step."""
    parameters = {"large": nn.Parameter(torch.full((4, 4), 1e3)), "zero": nn.Parameter(torch.zeros(4, 4))}
    sums = SharedSums(list(parameters), parameters, 1, torch.device("cpu"))
    optimizer = build_optimizer(parameters, Optimizer(name="LAMB", weight_decay=0.0), sums, torch.float32)
    set_lr(optimizer, 1.0)
    for parameter in parameters.values():
        parameter.grad = torch.ones(4, 4)
    optimizer.step()
    assert torch.allclose(parameters["large"], torch.tensor(990.0))
    assert torch.allclose(parameters["zero"], torch.tensor(-1.0))


# -- checkpoints


def save(layout: Layout, name: str, folder: Path) -> dict[str, Any]:
    """Everything after some steps, which is saved, and after as many more; the losses of these."""
    small = SmallRun(layout, **settings(name))
    for step in range(STEPS):
        small.step(step)
    checkpointer = Checkpointer(folder, Checkpoint(async_mode="disabled"), "", layout.parallelism)
    checkpointer.save(STEPS, small.run.tensors())
    checkpointer.close()
    return {"saved": whole(small.run), **go_on(small)}


def load(layout: Layout, name: str, folder: Path) -> dict[str, Any]:
    small = SmallRun(layout, seed=1, **settings(name))
    checkpointer = Checkpointer(folder, Checkpoint(async_mode="disabled"), "", layout.parallelism)
    try:
        assert resume(checkpointer, small.run)
    except ConfigError as error:
        return {"error": str(error)}
    finally:
        checkpointer.close()
    return {"saved": whole(small.run), **go_on(small)}


def go_on(small: SmallRun) -> dict[str, Any]:
    losses = [small.step(STEPS + more)[0] for more in range(STEPS)]
    return {"losses": losses, "end": whole(small.run)}


@pytest.mark.parametrize("name", ("LAMB", "LARS", "Muon"))
def test_a_resumed_run_repeats_the_bits_and_another_layout_goes_on(ranks, tmp_path: Path, name: str) -> None:
    saved = ranks(4).run(save, LAYOUTS["fsdp x tp"], name, tmp_path)[0]
    same = ranks(4).run(load, LAYOUTS["fsdp x tp"], name, tmp_path)[0]
    assert not differences(saved["saved"], same["saved"]) and not differences(saved["end"], same["end"])
    other = ranks(4).run(load, LAYOUTS["pp x fsdp"], name, tmp_path)[0]
    assert not differences(saved["saved"], other["saved"])
    assert other["losses"] == pytest.approx(saved["losses"], rel=1e-5)


def test_states_of_another_optimiser_are_refused_by_name(ranks, tmp_path: Path) -> None:
    """But for AdamW's, which are LAMB's too."""
    ranks(2).run(save, Layout(2), "AdamW", tmp_path)
    for name in ("Muon", "LARS"):
        error = ranks(2).run(load, Layout(2), name, tmp_path)[0]["error"]
        assert error.startswith(f'optimizer.name = "{name}": ') and "initial_load_path" in error
    assert "saved" in ranks(2).run(load, Layout(2), "LAMB", tmp_path)[0]


# -- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--optimizer.name LAMB --optimizer.state_dtype int8", "state_dtype = 'int8': is for AdamW; with"),
        (
            "--optimizer.name LARS --optimizer.in_backward true --training.max_norm 0",
            "in_backward = True: LARS needs norms of whole matrices",
        ),
        (
            "--optimizer.name Muon --parallelism.cpu_offload true",
            "optimizer.name = 'Muon': .*set parallelism.cpu_offload to false",
        ),
    ],
)
def test_combinations_that_cannot_be(arguments: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(arguments.split())
