"""Rollouts: the stages of a run, and memory. tests/test_history.py has their gradients."""

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from config import Training
from datasets.grid import global_grid
from parallelisms.mesh import start_ranks
from planning.dry_run import dry_run
from planning.memory import memory
from planning.workload import Workload, workload_of
from tests.parity import Layout, SmallRun, config_of
from training.due import Rollouts


def test_stages_of_a_run() -> None:
    equal = Rollouts.of(Training(steps=90, rollout_steps=(1, 2, 4)))
    assert [equal.at(step) for step in (1, 30, 31, 60, 61, 90, 900)] == [1, 1, 2, 2, 4, 4, 4]
    assert equal.longest == 4 and equal.passes(1) == 3 and equal.passes(4) == 12


@pytest.mark.filterwarnings("ignore")  # of the profiler
@pytest.mark.parametrize(("steps", "history"), [(4, 1), (2, 3)])
def test_memory_of_a_rollout(monkeypatch, steps, history) -> None:
    """The dry run within 5 % of what the allocator counts, the planner within 10 %; a window a step."""
    tracked, work, counted = memory_of(monkeypatch, Layout(rollout=steps, history=history))
    assert tracked == pytest.approx(counted, rel=0.05)
    assert memory(work).peak == pytest.approx(counted, rel=0.1)
    one_more = memory(work.replace(rollout_steps=5)).peak - memory(work.replace(rollout_steps=4)).peak
    assert one_more == (history + 1) * 4 * 8 * 3 * 32 * 64  # the window, and the truth it is held against


def memory_of(monkeypatch: pytest.MonkeyPatch, layout: Layout) -> tuple[int, Workload, int]:
    """The peak of the dry run, what the planner takes, and what the allocator counts, of a larger model."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    size = (("dim", 128), ("num_layers", 3), ("attention_backend", "sdpa"))
    layout = replace(layout, grid=(32, 64), model=size)
    config = config_of(layout, 0)
    tracked = dry_run(config, 1, global_grid(layout.grid), 3).peak["Total"]
    start_ranks(60, "gloo")
    counted = peak_bytes(SmallRun(layout))
    dist.destroy_process_group()
    return tracked, workload_of(config, 1, layout.grid, 3), counted


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
