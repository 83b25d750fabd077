"""The learning rate of each step in closed form, and the mission's scaling."""

import math

import pytest

from training.optimizers.lr_schedules import lr_factor, peak_lr


@pytest.mark.parametrize(("decay", "middle"), [("cosine", 0.5), ("linear", 0.5), ("constant", 1.0)])
def test_decay_ends_at_the_last_step(decay, middle):
    last = 1.0 if decay == "constant" else 0.2
    assert lr_factor(55, 100, 10, decay, 0.0) == pytest.approx(middle)
    assert lr_factor(100, 100, 10, decay, 0.2) == pytest.approx(last)


def test_cosine_is_the_cosine():
    for step in (10, 33, 71, 100):
        expected = 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 10) / 90)) / 2
        assert lr_factor(step, 100, 10, "cosine", 0.1) == pytest.approx(expected, rel=1e-12)


def test_a_run_shorter_than_its_warmup_trains():
    factors = [lr_factor(step, 3, 100, "cosine", 0.0) for step in (1, 2, 3)]
    assert factors == pytest.approx([0.01, 0.02, 0.03])


def test_scaling_of_the_mission_and_of_the_tutorial():
    assert peak_lr(3e-4, "linear", 8, 64, math.inf) == pytest.approx(2.4e-3)
    assert peak_lr(3e-4, "linear", 8, 3072, math.inf) == pytest.approx(0.1152)
    assert peak_lr(3e-4, "linear", 8, 3072, 0.01) == 0.01
    for batch, lr in ((64, 1e-3), (256, 2e-3), (1024, 4e-3)):  # lr 5e-4 at 16, square root
        assert peak_lr(5e-4, "sqrt", 16, batch, math.inf) == pytest.approx(lr)
    assert peak_lr(1e-3, "linear", 0, 4096, math.inf) == 1e-3


@pytest.mark.parametrize(
    ("decay", "middle"), [("cosine", 0.5), ("linear", 0.5), ("sqrt", 1 - math.sqrt(0.5))]
)
def test_warmup_stable_decay(decay, middle):
    """100 steps, of which 10 warm up and the last 20 decay."""
    factors = [lr_factor(step, 100, 10, decay, 0.0, 0.2) for step in (5, 10, 50, 80, 90, 100)]
    assert factors == pytest.approx([0.5, 1.0, 1.0, 1.0, middle, 0.0])
    assert lr_factor(55, 100, 30, decay, 0.0, 1.0) == lr_factor(55, 100, 30, decay, 0.0)
    assert lr_factor(40, 100, 30, decay, 0.0, 0.9) == lr_factor(
        40, 100, 30, decay, 0.0
    )  # warm-up comes first
