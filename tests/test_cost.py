"""Cost against closed forms, the mission's own sums, and a simulation of the preemptions."""

import dataclasses
import math
import random
import statistics

import pytest

from config import Checkpoint
from planning.clusters import load_cluster
from planning.cost import HOUR, checkpoint_storage, expected_time, fleets

A100 = load_cluster("a100x64")


def test_the_sums_of_the_mission() -> None:
    """110 hours of 64 devices on demand, which nothing interrupts."""
    fleet = fleets(dataclasses.replace(A100, failures=0.0))["on demand"]
    hours = expected_time(110 * HOUR, HOUR, fleet.rate) / HOUR
    assert (hours, hours * fleet.dollars_an_hour) == pytest.approx((110, 24_640))


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
    assert list(found) == ["on demand", "spot"]
    assert found["spot"].dollars_an_hour == pytest.approx(64 * 1.23)
    taken_away = found["spot"].rate - found["on demand"].rate
    assert taken_away * HOUR == pytest.approx(8 * A100.spot_interruptions)
    year = 365 * 24 * HOUR
    assert found["on demand"].rate * year == pytest.approx(419 / 2048 / 54 * 365 * 8, rel=0.02)


def test_storage() -> None:
    assert checkpoint_storage(100, Checkpoint(keep_latest_k=1, keep_best="val/loss"), 10_000) == 300
    assert checkpoint_storage(100, Checkpoint(keep_latest_k=5, interval=500), 10_000) == 600
    assert checkpoint_storage(100, Checkpoint(keep_latest_k=5, interval=500), 1_000) == 200
    assert checkpoint_storage(100, Checkpoint(keep_latest_k=0, interval=500), 1_001) == 300
