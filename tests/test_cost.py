"""Cost against closed forms, the mission's own sums, and a simulation of the preemptions."""

import dataclasses
import math
import random
import statistics
from pathlib import Path

import pytest

from config import Checkpoint
from planning.clusters import load_cluster
from planning.cost import (
    HOUR,
    Fleet,
    Saves,
    checkpoint_storage,
    expected_time,
    fleets,
    run_cost,
)

A100 = load_cluster("a100x64", calibration=Path("none"))
MIXED = Fleet(A100, on_demand_nodes=1)
UNFAILING = dataclasses.replace(A100, failures=0.0)


# -- the mission's sums


def test_mission_on_demand() -> None:
    """And the energy: 64 x 670 W x 1.2 for 110 hours."""
    cost = run_cost([(110 * HOUR, Saves(interval=HOUR))], Fleet(UNFAILING, 8))
    assert (cost.hours, cost.dollars) == pytest.approx((110, 24_640))
    assert cost.kwh == pytest.approx(64 * 0.670 * 1.2 * 110) and cost.dollars_lost == 0.0


def test_mission_mixed_fleet() -> None:
    """$3,080 and $7,577, and two preemptions of 45 minutes of 64 devices at the spot price."""
    assert MIXED.on_demand_devices == 8
    lost = 2 * 0.75 * 64 * A100.spot
    assert lost == pytest.approx(118, abs=0.5)
    assert 110 * MIXED.dollars_an_hour == pytest.approx(3_080 + 7_577, abs=0.5)
    assert 110 * MIXED.dollars_an_hour + lost == pytest.approx(10_775, abs=0.5)


# -- expected time


def test_without_preemptions_it_is_exact() -> None:
    """Saves after 300, 600 and 900 seconds, and at the end; a whole number of intervals has no last piece."""
    saves = Saves(interval=300.0, stall=2.0, write=50.0, restart=99.0)
    assert expected_time(1000.0, saves, rate=0.0) == (1008.0, 0.0)
    assert expected_time(0.3, Saves(interval=0.1, stall=1.0), rate=0.0)[0] == pytest.approx(3.3)
    assert expected_time(0.0, Saves(interval=60.0), rate=1e-4)[0] == 0.0


def simulate(work: float, saves: Saves, rate: float, generator: random.Random) -> tuple[float, int]:
    """Seconds and preemptions of one run, event by event: an independent account of the same process."""
    now, done, safe, preemptions = 0.0, 0.0, 0.0, 0
    pending: tuple[float, float] | None = None  # (work it holds, when it will be written)
    next_preemption = generator.expovariate(rate)
    while True:
        target = min(done + saves.interval - done % saves.interval, work)
        step = target - done + saves.stall
        if now + step <= next_preemption:
            now, done = now + step, target
            if pending and pending[1] <= now:
                safe = pending[0]
            pending = (done, now + saves.write)
            if done >= work:
                return now, preemptions
            continue
        if pending and pending[1] <= next_preemption:
            safe = pending[0]
        now, pending, done = next_preemption, None, safe
        while True:  # restarts, which may be preempted too
            preemptions += 1
            next_preemption = now + generator.expovariate(rate)
            if now + saves.restart <= next_preemption:
                now += saves.restart
                break
            now = next_preemption


@pytest.mark.parametrize(
    ("saves", "rate", "slack"),
    [
        pytest.param(Saves(64.0, stall=2.0, restart=40.0), 1e-3, 0.0, id="rare"),
        pytest.param(Saves(256.0, stall=16.0, restart=128.0), 4e-3, 0.0, id="more often than saves"),
        pytest.param(Saves(512.0), 2e-3, 0.0, id="free"),
        # the term of unfinished saves is of first order: 1 % at rate x interval = 0.1
        pytest.param(Saves(128.0, stall=1.0, write=64.0, restart=32.0), 8e-4, 0.01, id="asynchronous"),
    ],
)
def test_expected_time_is_the_mean_of_simulated_runs(saves: Saves, rate: float, slack: float) -> None:
    generator, work = random.Random(0), 2048.0
    runs = [simulate(work, saves, rate, generator) for _ in range(4000)]
    time = expected_time(work, saves, rate)
    for found, expected in zip(zip(*runs, strict=True), time, strict=True):
        error = statistics.stdev(found) / math.sqrt(len(found))
        assert abs(statistics.mean(found) - expected) < 4 * error + slack * expected


def test_a_run_that_hardly_ends() -> None:
    """Shorter than its interval: (e^(rate s) - 1)/rate, and no unfinished save costs anything. Thousands of
    preemptions between two saves: no overflow, and no number that looks like an answer.
    """
    wall, _ = expected_time(5e3, Saves(interval=1e9, write=60.0), rate=1e-4)
    assert wall == pytest.approx(math.expm1(0.5) / 1e-4)
    assert expected_time(1e7, Saves(1e6, restart=60.0), rate=1e-2) == (math.inf, math.inf)


# -- fleets, energy, storage


def test_fleets_of_a_cluster() -> None:
    found = fleets(A100)
    assert list(found) == ["on demand", "1 on demand, 7 spot", "spot"]
    assert found["spot"].dollars_an_hour == pytest.approx(64 * 1.23)
    assert found["spot"].rate / MIXED.rate == pytest.approx(8 / 7, rel=0.02)
    assert list(fleets(A100.with_devices(8))) == ["on demand", "spot"]
    part = Fleet(A100.with_devices(4), on_demand_nodes=1)  # of a node
    assert part.on_demand_devices == 4


def test_nodes_on_demand_fail_too() -> None:
    """419 interruptions of 2,048 nodes in 54 days (Llama 3, section 3.3.4): 8 nodes, a year, 11 of them."""
    year = 365 * 24 * HOUR
    rate = fleets(A100)["on demand"].rate
    assert rate * year == pytest.approx(419 / 2048 / 54 * 365 * 8, rel=0.02)
    cost = run_cost([(110 * HOUR, Saves(HOUR, restart=900.0))], Fleet(A100, 8))
    assert cost.preemptions > 0 and cost.dollars_lost > 0


def test_storage() -> None:
    assert checkpoint_storage(100, Checkpoint(keep_latest_k=1, keep_best="val/loss"), 10_000) == 300
    assert checkpoint_storage(100, Checkpoint(keep_latest_k=5, interval=500), 10_000) == 600
    assert checkpoint_storage(100, Checkpoint(keep_latest_k=5, interval=500), 1_000) == 200
    assert checkpoint_storage(100, Checkpoint(keep_latest_k=0, interval=500), 1_001) == 300
