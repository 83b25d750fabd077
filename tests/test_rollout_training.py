"""Gradients of rollouts: those of autograd through all steps at once, written out here."""

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from config import Training
from datasets.grid import area_weights, global_grid
from parallelisms.mesh import start_ranks
from planning.dry_run import dry_run
from planning.memory import memory
from planning.workload import workload_of
from tests.parity import Layout, SmallRun, config_of, difference, full
from training.due import Rollouts
from training.losses.spectral import amse
from training.rollout import seed_rollout_step

WEIGHTS = torch.tensor((1.0, 2.0, 0.5))  # of the variables of tests/parity.py
ODD = Layout(
    rollout=3, grid=(11, 10), model=(("attention_backend", "math"),)
)  # patches of 4 x 4 do not divide it


def loss_by_hand(run: SmallRun, fields: Tensor, shares: list[float], begin: int) -> Tensor:
    """Of physical fields (B, 1 + R, V, H, W), which tests/parity.py has normalised, in one graph; steps count
    `shares`, and no gradient goes through those before `begin`.
    """
    objective, model = run.objective, run.model.meta_model
    area = torch.from_numpy(area_weights(objective.conditions.latitude.numpy())).float()
    state, seed, losses = fields[:, 0], torch.initial_seed(), []
    for number, share in enumerate(shares):
        seed_rollout_step(seed, number)
        state = state.detach() if number <= begin else state
        static = objective.conditions.static.expand(len(state), -1, -1, -1)
        output = model.predict(torch.cat([state, static], dim=1))
        dry = dry_mass(output, area)  # (B,)
        if objective.normalizer.conservation:
            output = output - dry[:, None, None, None] * torch.tensor([1.0, 0.0, 0.0])[:, None, None]
        state = output if objective.normalizer.predict == "state" else state + output
        truth = fields[:, number + 1]
        weights = truth.isfinite() * area[:, None]
        weights = weights / weights.sum((-2, -1), keepdim=True) * WEIGHTS[:, None, None] / len(WEIGHTS)
        roots, truth = (weights / len(state)).sqrt(), truth.nan_to_num()
        loss = (roots * (state - truth)).square().sum()
        if fraction := objective.spectral_fraction:
            loss = (1 - fraction) * loss + fraction * amse(roots * (state - truth), roots * truth)
        losses.append(share * loss)
    return torch.stack(losses).sum()


def dry_mass(output: Tensor, area: Tensor) -> Tensor:
    """(B,): of surface pressure and vapour, the first two, both of deviation 1."""
    means = (output * (area / area.mean())[:, None]).mean((-2, -1))
    return means[:, 0] - 9.80665 * means[:, 1]


@pytest.mark.parametrize(
    ("model", "settings", "shares"),
    [
        ({}, {}, [1 / 3, 1 / 3, 1 / 3]),
        ({"predict": "state"}, {}, [1 / 3, 1 / 3, 1 / 3]),
        ({}, {"rollout_weights": (1.0, 0.0, 3.0)}, [0.25, 0.0, 0.75]),
        ({}, {"rollout_gradient_steps": 2}, [0.0, 0.5, 0.5]),
        ({"predict": "state"}, {"rollout_gradient_steps": 1}, [0.0, 0.0, 1.0]),
        ({}, {"spectral_fraction": 0.7}, [1 / 3, 1 / 3, 1 / 3]),
        ({"stochastic_depth": 0.5}, {}, [1 / 3, 1 / 3, 1 / 3]),
        ({"conserve": ("dry_mass",)}, {}, [1 / 3, 1 / 3, 1 / 3]),
    ],
)
def test_gradients_are_those_of_one_graph(one_rank, model, settings, shares) -> None:
    layout = replace(ODD, model=ODD.model + tuple(model.items()))
    run, plain = (SmallRun(layout, **settings) for _ in range(2))
    torch.manual_seed(5)
    loss, _ = run.step(0)
    torch.manual_seed(5)
    begin = 3 - settings.get("rollout_gradient_steps", 3)
    expected = loss_by_hand(plain, plain.batches(0)[0][0], shares, begin)
    expected.backward()
    gradients = {name: full(p.grad) for name, p in plain.model.parameters.items() if p.grad is not None}
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert difference(run.gradients, gradients)[0] < 1e-5


def test_stages_of_a_run() -> None:
    equal = Rollouts.of(Training(steps=90, rollout_steps=(1, 2, 4)))
    assert [equal.at(step) for step in (1, 30, 31, 60, 61, 90, 900)] == [1, 1, 2, 2, 4, 4, 4]
    assert equal.longest == 4 and equal.passes(1) == 3 and equal.passes(4) == 12
    assert [equal.passes_after(step) for step in (0, 30, 89, 90)] == [30 * (3 + 6 + 12), 540, 12, 0]
    pushed = Rollouts.of(Training(rollout_steps=(4,), rollout_gradient_steps=1))
    assert pushed.passes(4) == 6 and pushed.shares(4) == [0, 0, 0, 1]


@pytest.mark.filterwarnings("ignore")  # of the profiler
@pytest.mark.parametrize(("steps", "history"), [(4, 1), (1, 3), (2, 3)])
def test_memory_of_a_rollout(monkeypatch, steps, history) -> None:
    """The dry run within 5 % of what the allocator counts, the planner within 10 %; a window a step."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    size = (("dim", 128), ("num_layers", 3), ("attention_backend", "sdpa"))
    layout = Layout(rollout=steps, grid=(32, 64), model=size, history=history)
    config = config_of(layout, 0)
    tracked = dry_run(config, 1, global_grid(layout.grid), 3).peak["Total"]
    work = workload_of(config, 1, layout.grid, 3)
    start_ranks(60, "gloo")
    counted = peak_bytes(SmallRun(layout))
    dist.destroy_process_group()
    assert tracked == pytest.approx(counted, rel=0.05)
    assert memory(work).peak == pytest.approx(counted, rel=0.1)
    one_more = memory(work.rolled_out(5, 5)).peak - memory(work.rolled_out(4, 4)).peak
    assert one_more == (history + 1) * 4 * 8 * 3 * 32 * 64  # the window, and the truth it is held against


def peak_bytes(run: SmallRun) -> int:
    """In the second step: what was there before, and the most that was allocated beside."""
    run.step(0)
    states = [v for state in run.state.optimizer.state.values() for v in state.values()]
    held = sum(tensor.nbytes for tensor in [*run.model.parameters.values(), *states])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run.step(1)
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events: list[Any] = profiler.profiler.kineto_results.events()
    return held + max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))
