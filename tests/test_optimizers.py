"""LAMB, LARS, SGD and Muon: what their papers say, on any layout, without bad steps; the learning rate of
each step and the average of the weights in closed form.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from config import LrScheduler, Optimizer
from errors import ConfigError
from planning.dry_run import Recorder
from tests.optimizer_references import MOMENTUM, trained
from tests.parity import Layout, SmallRun, difference, full, gather_stages
from tests.resharding import load, save
from training.bad_steps import step_unless
from training.optimizers.build import build_optimizer, learning_rate, peak_lr, set_lr
from training.optimizers.layerwise import SharedSums
from training.state import EMA

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


# -- learning rates

SHAPES = {
    "constant": lambda progress: 1.0,
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    "linear": lambda progress: 1 - progress,
    "sqrt": lambda progress: 1 - math.sqrt(progress),
}


@pytest.mark.parametrize("decay", SHAPES)
@pytest.mark.parametrize(("ratio", "warmup", "start"), [(1.0, 10, 10), (0.2, 10, 80), (0.9, 30, 30)])
def test_rates_rise_stay_and_decay(decay: Any, ratio, warmup, start):
    """Over 100 steps, of which the last `ratio` decay to 0.2 of the peak; warm-up comes first."""
    schedule, settings = LrScheduler(warmup, decay, ratio, 0.2), Optimizer(lr=1.0, lr_reference_batch_size=0)
    for step in range(1, 101):
        expected = 0.2 + 0.8 * SHAPES[decay](max(0.0, (step - start) / (100 - start)))
        expected = min(step / warmup, expected) if step < warmup else expected
        assert learning_rate(settings, schedule, 100, 1, step) == pytest.approx(expected, rel=1e-12)
    short = [learning_rate(settings, LrScheduler(100, decay), 3, 1, step) for step in (1, 2, 3)]
    assert short == pytest.approx([0.01, 0.02, 0.03])  # of a run shorter than its warm-up


def test_scaling_of_the_mission_and_of_the_tutorial():
    assert peak_lr(3e-4, "linear", 8, 64) == pytest.approx(2.4e-3)
    assert peak_lr(3e-4, "linear", 8, 3072) == pytest.approx(0.1152)
    for batch, lr in ((64, 1e-3), (256, 2e-3), (1024, 4e-3)):  # lr 5e-4 at 16, square root
        assert peak_lr(5e-4, "sqrt", 16, batch) == pytest.approx(lr)
    assert peak_lr(1e-3, "linear", 0, 4096) == 1e-3


# -- averages of the weights


def test_average_follows_its_recurrence():
    weight = nn.Parameter(torch.tensor([1.0]))
    average, expected = EMA({"w": weight}, 0.9, lambda: None), 1.0
    for step in range(1, 200):
        weight.data.fill_(float(step))
        average.update(step)
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
    assert average.averages["w"].item() == pytest.approx(expected, rel=1e-5)


def test_averages_stand_in_for_the_weights_and_leave_again():
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    average = EMA({"w": weight}, 0.5, lambda: None)
    weight.data.mul_(3)
    with pytest.raises(RuntimeError), average.applied():
        assert weight.tolist() == [1.0, 2.0]
        raise RuntimeError
    assert weight.tolist() == [3.0, 6.0] and average.averages["w"].tolist() == [1.0, 2.0]


def losses_with_forecasts(forecasts: bool) -> list[float]:
    """Losses of three steps; after each, perhaps, a forecast by the averages, as in a validation."""
    run, losses = SmallRun(Layout(2), ema_decay=0.9), []
    for step in range(3):
        losses.append(run.step(step)[0])
        if forecasts and run.state.average:
            with run.state.average.applied():
                times = torch.zeros(2, dtype=torch.int64)
                conditions = run.objective.conditions.draw(times, times)
                window = run.data[:2, 0].nan_to_num()
                run.model.predict(run.objective.conditions.append(window, times, *conditions))
    return losses


def test_a_forecast_by_the_averages_leaves_training_as_it_was(ranks):
    """FSDP keeps what a forward without a backward has gathered: averages, for the next step."""
    plain, validated = (ranks(2).run(losses_with_forecasts, forecasts)[0] for forecasts in (False, True))
    assert plain == validated
