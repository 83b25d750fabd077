"""LAMB, LARS, SGD and Muon: what their papers say, on any layout, without bad steps, resumed to the bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from config import Optimizer
from errors import ConfigError
from planning.dry_run import Recorder
from tests.optimizer_references import MOMENTUM, trained
from tests.parity import Layout, SmallRun, difference, full, gather_stages
from tests.resharding import load, save
from training.bad_steps import step_unless
from training.optimizers.build import build_optimizer, set_lr
from training.optimizers.layerwise import SharedSums

NAMES = ("LAMB", "LARS", "SGD", "Muon")
STEPS = 3
# Newton and Schulz make the smallest singular values some 500 times larger, and with them their rounding.
TOLERANCE = {"LAMB": 1e-6, "LARS": 1e-6, "SGD": 1e-6, "Muon": 2e-5}


def settings(name: str) -> dict[str, Any]:
    return {"name": name, "momentum": MOMENTUM, "max_norm": 0.0}


def train(layout: Layout, name: str) -> dict[str, Any]:
    """Weights before and after some steps, the gradients of each, and the collectives of the last update."""
    small = SmallRun(layout, **settings(name))
    group, parameters = small.model.pipeline_group, small.model.parameters
    before = gather_stages({n: full(p) for n, p in parameters.items()}, group)
    gradients, record, plain = [], Recorder(small.mesh), small.state.optimizer.step

    def step() -> None:
        nonlocal record
        record = Recorder(small.mesh)
        with record:
            plain()

    small.state.optimizer.step = step  # type: ignore[method-assign, assignment]
    for number in range(STEPS):
        small.step(number)
        gradients.append(gather_stages(small.gradients, group))
    after = gather_stages({n: full(p) for n, p in parameters.items()}, group)
    return {"before": before, "gradients": gradients, "after": after, "collectives": dict(record.calls)}


def check(found: dict[str, Any], name: str) -> None:
    """With this layout's own gradients."""
    expected = trained(name, found["before"], found["gradients"], decay=0.05)
    error, where = difference(found["after"], expected)
    assert error < TOLERANCE[name], (error, where)
    assert max(np.abs(found["after"][n] - w).max() for n, w in found["before"].items()) > 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_it_does_what_the_paper_says(one_rank, name: str) -> None:
    """tests/test_parity.py has layouts, benchmarks/layout_parity.py --optimizers all all of them."""
    found = train(Layout(1), name)
    check(found, name)
    assert not found["collectives"]


# -- one process


def build(
    name: Any, parameters: Any, lr: float = 1e-2, dtype: torch.dtype = torch.float32, **settings: float
) -> torch.optim.Optimizer:
    """The optimizer of named parameters."""
    parameters = dict(parameters)
    sums = SharedSums(list(parameters), parameters, 1, torch.device("cpu"))
    optimizer = build_optimizer(parameters, Optimizer(name=name, **settings), sums, dtype)  # type: ignore[arg-type]
    set_lr(optimizer, lr)
    return optimizer


def small_model() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"blocks": nn.ModuleDict({"0": nn.Linear(48, 32)}), "head": nn.Linear(32, 5)})


@pytest.mark.parametrize("name", ("AdamW", *NAMES))
@pytest.mark.parametrize("bad_step", (1, 2))
def test_a_bad_step_leaves_no_trace(one_rank, name: str, bad_step: int) -> None:
    """Not the first one either: moments start at 0, not where memory happens to be."""
    models = small_model(), small_model()
    skipping, straight = (build(name, model.named_parameters()) for model in models)
    for number in range(1, 4):
        gradients = [torch.randn(p.shape) for p in models[0].parameters()]
        bad = number == bad_step
        for model, optimizer in zip(models, (skipping, straight), strict=True):
            if model is models[1] and bad:
                continue
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = torch.full_like(gradient, torch.nan) if bad else gradient.clone()
            step_unless(torch.tensor(bad), optimizer)
    for left, right in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(left, right)
        states = skipping.state[left], straight.state[right]
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.parametrize("name", ("SGD", "LARS"))
def test_without_momentum_a_step_is_the_gradient(one_rank, name: str) -> None:
    """It was a traceback of torch's kernel, which takes no buffers then. Nothing is kept between steps."""
    parameters = dict(small_model().named_parameters())
    optimizer = build(name, parameters, momentum=0.0, weight_decay=0.0)
    for _ in range(2):
        before = {key: p.detach().clone() for key, p in parameters.items()}
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape)
        optimizer.step()
        for key, parameter in parameters.items():
            assert parameter.grad is not None
            is_scaled = name == "LARS" and parameter.ndim > 1
            rate = 1e-2 * (1e-3 * before[key].norm() / parameter.grad.norm() if is_scaled else 1.0)
            torch.testing.assert_close(parameter.detach(), before[key] - rate * parameter.grad)
    assert not any(optimizer.state.values())


def test_muon_takes_the_step_of_torch(one_rank) -> None:
    """In bfloat16, on a matrix that is not sharded: to the bit."""
    model = small_model()
    weight: Any = model.blocks["0"].weight  # type: ignore[index]
    ours = build("Muon", model.named_parameters(), dtype=torch.bfloat16, momentum=MOMENTUM)
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
    optimizer = build("LAMB", parameters, lr=1.0, weight_decay=0.0)
    for parameter in parameters.values():
        parameter.grad = torch.ones(4, 4)
    optimizer.step()
    assert torch.allclose(parameters["large"], torch.tensor(990.0))
    assert torch.allclose(parameters["zero"], torch.tensor(-1.0))


def test_states_of_another_optimiser_are_refused_by_name(one_rank, tmp_path: Path) -> None:
    """But for AdamW's, which are LAMB's too."""
    save(Layout(1), tmp_path, "disabled", "AdamW")
    for name in ("Muon", "LARS"):
        with pytest.raises(ConfigError, match=f'optimizer.name = "{name}": .*initial_load_path'):
            load(Layout(1), tmp_path, name)
    load(Layout(1), tmp_path, "LAMB")
