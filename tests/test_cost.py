"""Cost against closed forms, the mission's own sums, and a simulation of the preemptions."""

import dataclasses
import math
import random
import statistics

import pytest

from config import Checkpoint
from planning.clusters import load_cluster
from planning.cost import HOUR, Fleet, checkpoint_storage, expected_time, fleets, run_cost

A100 = load_cluster("a100x64")
MIXED = Fleet(A100, on_demand_nodes=1)


def test_the_sums_of_the_mission() -> None:
    """110 hours on demand; then $3,080 and $7,577, and two preemptions of 45 minutes of 64 spot devices."""
    cost = run_cost([(110 * HOUR, HOUR)], Fleet(dataclasses.replace(A100, failures=0.0), 8))
    assert cost == pytest.approx({"hours": 110, "dollars": 24_640})
    assert MIXED.on_demand_devices == 8
    assert 110 * MIXED.dollars_an_hour == pytest.approx(3_080 + 7_577, abs=0.5)
    assert 110 * MIXED.dollars_an_hour + 2 * 0.75 * 64 * A100.spot == pytest.approx(10_775, abs=0.5)


def simulate(work: float, interval: float, rate: float, restart: float, generator: random.Random) -> float:
    """Seconds of one run, event by event: an independent account of the same process."""
    now, done, next_preemption = 0.0, 0.0, generator.expovariate(rate)
    while done < work:
        target = min(done + interval, work)
        if now + target - done <= next_preemption:
            now, done = now + target - done, target
            continue
        now = next_preemption
        while True:  # restarts, which may be preempted too
            next_preemption = now + generator.expovariate(rate)
            if now + restart <= next_preemption:
                now += restart
                break
            now = next_preemption
    return now


@pytest.mark.parametrize(
    ("interval", "rate", "restart"), [(64.0, 1e-3, 40.0), (256.0, 4e-3, 128.0), (500.0, 2e-3, 0.0)]
)
def test_expected_time_is_the_mean_of_simulated_runs(interval: float, rate: float, restart: float) -> None:
    generator, work = random.Random(0), 2048.0
    runs = [simulate(work, interval, rate, restart, generator) for _ in range(4000)]
    error = statistics.stdev(runs) / math.sqrt(len(runs))
    assert abs(statistics.mean(runs) - expected_time(work, interval, rate, restart)) < 4 * error


def test_runs_that_nothing_interrupts_or_that_hardly_end() -> None:
    """Shorter than its interval, or without saves: (e^(rate s) - 1)/rate. Thousands of preemptions between
    two saves: no overflow, and no number that looks like an answer.
    """
    assert expected_time(1000.0, 300.0, rate=0.0) == 1000.0 and expected_time(0.0, 60.0, rate=1e-4) == 0.0
    for interval in (1e9, math.inf):
        alone = expected_time(5e3, interval, rate=1e-4, restart=0.0)
        assert alone == pytest.approx(math.expm1(0.5) / 1e-4)
    assert expected_time(1e7, 1e6, rate=1e-2) == math.inf


def test_fleets_of_a_cluster() -> None:
    """419 interruptions of 2,048 nodes in 54 days (Llama 3, section 3.3.4): 8 nodes, a year, 11 of them."""
    found = fleets(A100)
    assert list(found) == ["on demand", "1 on demand, 7 spot", "spot"]
    assert found["spot"].dollars_an_hour == pytest.approx(64 * 1.23)
    assert found["spot"].rate / MIXED.rate == pytest.approx(8 / 7, rel=0.02)
    year = 365 * 24 * HOUR
    assert found["on demand"].rate * year == pytest.approx(419 / 2048 / 54 * 365 * 8, rel=0.02)
    assert list(fleets(A100.with_devices(8))) == ["on demand", "spot"]
    assert Fleet(A100.with_devices(4), on_demand_nodes=1).on_demand_devices == 4  # of a node


def test_storage() -> None:
    assert checkpoint_storage(100, Checkpoint(keep_latest_k=1, keep_best="val/loss"), 10_000) == 300
    assert checkpoint_storage(100, Checkpoint(keep_latest_k=5, interval=500), 10_000) == 600
    assert checkpoint_storage(100, Checkpoint(keep_latest_k=5, interval=500), 1_000) == 200
    assert checkpoint_storage(100, Checkpoint(keep_latest_k=0, interval=500), 1_001) == 300
