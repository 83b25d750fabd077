"""Bad steps: detection, no effect on the state, and the rollback when they continue."""

import json
from typing import Any

import pytest
import torch

import train
from checkpoints.files import complete_steps
from config import Training
from tests.parity import Layout, SmallRun
from tests.planned import run_train
from tests.started_jobs import run_options, small_dataset, small_wave, write_config
from tests.test_checkpoint import Run, build  # noqa: F401  (a fixture)
from training.bad_steps import WINDOW, BadSteps, TrainingDiverged
from training.due import Rollouts
from training.run_folder import Restart

CPU = torch.device("cpu")
NAN = float("nan")
TENSOR_PARALLEL = Layout(2, {"tensor_parallel_degree": 2})
CONTEXT_PARALLEL = Layout(2, {"context_parallel_degree": 2})


def judge(bad_steps: BadSteps, step: int, loss: float, norm: float = 1.0, fp16: bool = False) -> bool:
    return bool(
        bad_steps.judge(step, torch.tensor(loss), torch.tensor(norm), torch.tensor(True) if fp16 else None)
    )


def test_what_is_not_finite_is_bad(one_rank):
    bad_steps = BadSteps(Training(), CPU)
    assert not judge(bad_steps, 1, 1.0)
    assert judge(bad_steps, 2, 1.0, NAN) and judge(bad_steps, 3, 1.0, float("inf"))
    assert not judge(bad_steps, 4, 1.0, float("inf"), fp16=True)  # that is the loss scaler's
    assert judge(bad_steps, 5, NAN, 1.0, fp16=True)


def test_a_spike_is_measured_in_robust_deviations(one_rank):
    """Losses 1 +- 0.01, alternating: the median is 1, the median absolute deviation 0.01."""
    bad_steps = BadSteps(Training(spike_threshold=5.0), CPU)
    for step in range(60):
        assert not judge(bad_steps, step, 1.0 + 0.01 * (step % 3 - 1))
    assert not judge(bad_steps, 60, 1.0 + 4.9 * 1.4826 * 0.01)
    assert judge(bad_steps, 61, 1.0 + 5.2 * 1.4826 * 0.01)
    assert judge(bad_steps, 62, 1.08)  # spikes do not raise the ceiling
    assert not judge(bad_steps, 63, 0.5)  # a low loss is welcome


def test_few_losses_make_no_spike(one_rank):
    bad_steps = BadSteps(Training(spike_threshold=5.0), CPU)
    assert not any(judge(bad_steps, step, 10.0**step) for step in range(15))


def losses_and_window(layout: Layout) -> tuple[list[float], list[float]]:
    """Losses of three steps, and what later ones are judged by."""
    small = SmallRun(layout, spike_threshold=5.0)
    losses = [small.step(step)[0] for step in range(3)]
    return losses, small.state.bad_steps.losses[1:4].tolist()


@pytest.mark.parametrize("layout", [TENSOR_PARALLEL, CONTEXT_PARALLEL, Layout(2)], ids=str)
def test_a_checkpoints_losses_are_means_on_any_layout(ranks, layout):
    """They were sums over ranks with a part of a sample: on another layout every step was a spike."""
    for losses, window in ranks(2).run(losses_and_window, layout):
        assert window == pytest.approx(losses, rel=1e-6)


def test_longer_rollouts_are_no_spikes(one_rank):
    """The second half of the steps has rollouts of three, with losses far above those before."""
    small = SmallRun(Layout(rollout=3), spike_threshold=5.0)
    small.state.bad_steps.rollouts = Rollouts((1, 3), steps=80)
    window = small.state.bad_steps.losses
    window.copy_(1e-6 * (1 + torch.arange(len(window)) % 3))
    small.step(39)
    assert small.state.bad_steps.bad[40]
    small.step(40)
    assert not small.state.bad_steps.bad[41] and window.isfinite().sum() == 1


def test_bad_steps_are_counted_over_a_window(one_rank, caplog, monkeypatch):
    monkeypatch.setattr("training.bad_steps.MOST_SKIPPED", 3)
    bad_steps = BadSteps(Training(), CPU)
    for step in range(1, 5):
        judge(bad_steps, step, NAN, NAN)
        assert bad_steps.too_many(step) == (step == 4)
    assert "1 steps skipped: 4 of the last 4 steps up to step 4 were bad" in caplog.text
    assert "losses that are not finite on ranks [0]" in caplog.text
    for step in range(5, 5 + WINDOW):
        judge(bad_steps, step, 1.0)
    assert not bad_steps.too_many(4 + WINDOW)


def test_going_back_takes_other_samples_and_is_tried_once(build, monkeypatch):  # noqa: F811
    monkeypatch.setattr("training.bad_steps.MOST_SKIPPED", 0)
    run, checkpointer = Run(), build()
    bad_steps = run.state.bad_steps = BadSteps(Training(), CPU)
    with pytest.raises(TrainingDiverged, match="no checkpoint"):
        Restart(checkpointer, run.state).roll_back()
    weights = []
    for step in (1, 2, 3):
        run.step()
        run.save(checkpointer)
        weights.append(run.state.parameters["head.weight"].detach().clone())
        judge(bad_steps, step, 1.0)
    judge(bad_steps, 4, NAN, NAN)  # so nothing shows that the weights after step 3 are any good
    assert bad_steps.too_many(4)
    Restart(checkpointer, run.state).roll_back()
    assert run.state.progress.step == 2 and run.state.progress.rollbacks == 1
    assert torch.equal(run.state.parameters["head.weight"], weights[1])
    assert complete_steps(checkpointer.folder) == [1, 2]
    judge(bad_steps, 4, NAN, NAN)
    assert bad_steps.too_many(4)
    with pytest.raises(TrainingDiverged, match="going back to step 2 and taking other samples did not help"):
        Restart(checkpointer, run.state).roll_back()


def test_losses_of_other_settings_are_not_compared():
    """After mse, every step of a run that goes on with mae was a spike, and a good checkpoint removed."""
    settings = Training(), Training(loss="mae"), Training(steps=7)
    names = [set(BadSteps(each, CPU).window) for each in settings]
    assert names[0] == names[2] != names[1]
    stages = [BadSteps(Training(steps=n, rollout_steps=(1, 2)), CPU).window.keys() for n in (7, 8)]
    assert stages[0] != stages[1]


def test_a_bad_last_step_goes_back_before_itself_alone(one_rank):
    """A run does not end on one. Not before a step that was skipped long ago, of which no checkpoint may be
    left.
    """
    bad_steps = BadSteps(Training(), CPU)
    for step in range(1, 32):
        judge(bad_steps, step, NAN if step in (22, 30, 31) else 1.0, NAN if step in (22, 30, 31) else 1.0)
    assert not bad_steps.too_many(31) and bad_steps.too_many(31, last=True) and bad_steps.first == 30


def test_a_run_that_goes_back_leaves_each_step_once(tmp_path, monkeypatch):
    """Step 8 is bad: metrics, validations and the best checkpoint go on from step 5, too."""
    monkeypatch.setattr("training.bad_steps.MOST_SKIPPED", 0)
    taken, plain = [], train.train_step

    def train_step(run: Any, step: int, batches: Any) -> Any:
        taken.append(step)
        result = plain(run, step, batches)
        if step == 8 and not run.state.progress.rollbacks:
            run.state.bad_steps.bad[step] = True
        return result

    monkeypatch.setattr(train, "train_step", train_step)
    periods = {
        "train_period": ["2020-01-01", "2020-01-09"],
        "validation_period": ["2020-01-11", "2020-01-12"],
    }
    config_file = write_config(
        tmp_path,
        small_dataset({"10m_u_component_of_wind": small_wave(60)}),
        data=periods,
        training={"steps": 10, "ema_decay": 0.9, "global_batch_size": 4},
        checkpoint={"interval": 5, "keep_best": "val/loss"},
        validation={"enable": True, "interval": 5, "lead_hours": [6], "plots": False},
    )
    lines = run_train(*run_options(config_file, tmp_path / "run"))
    assert taken == [*range(1, 9), *range(6, 11)]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 11))
    scores = {line["step"]: line["val/loss"] for line in lines if "val/loss" in line}
    assert list(scores) == [5, 10]
    best = json.loads((tmp_path / "run/best/best.json").read_text())
    assert best["value"] == min(scores.values()) == scores[best["step"]]
