"""Training steps from the model's own forecasts: where each starts, on any layout, and after a restart."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from config import Config
from datasets.selection import open_selection
from parallelisms.mesh import mesh_of
from tests.distributed import own_device
from tests.parity import difference, full, gather_stages
from tests.planned import run_train
from tests.started_jobs import run_options, small_dataset, write_config
from tests.test_exact_resume import SECTIONS, goes_on_exactly
from training.assembly import Fields, assemble
from training.batches import Batches
from training.config_checks import load_checked
from training.replay import ReplaySampler, phases
from training.samples import Samples
from training.state import build_state
from training.step import Run, train_step
from verification.rollout import rollout

STEPS, PLACES = 3, 8
STEADY = "--optimizer.eps=1e-4"  # as in tests/parity.py
NAMES = ("10m_u_component_of_wind", "10m_v_component_of_wind")


@pytest.fixture(scope="module")
def config_file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    draw = np.random.default_rng(3)
    fields = {name: draw.normal(size=(60, 6, 8)) for name in NAMES}
    return write_config(folder, small_dataset(fields), **SECTIONS)


def config_of(path: Path, folder: Path, *options: str) -> Config:
    ring = [f"--training.replay_steps={STEPS}", f"--training.global_batch_size={PLACES}"]
    return load_checked(run_options(path, folder, *ring, *options))


class Trial:
    """The steps of a run with a learning rate that a test chooses; a step goes once round the ring."""

    def __init__(self, config: Config) -> None:
        selection = open_selection(config.data, config.model.patch_size, (), config.training.states_ahead)
        self.device = own_device()
        samples = Samples(selection, config.data, config.dump_folder)
        train_set = samples.dataset("train", range(1, 1 + config.training.states_ahead))
        mesh = mesh_of(config.parallelism, self.device)
        assembly = assemble(config, Fields.of(selection, samples.statistics), mesh, self.device)
        state = build_state(config, assembly)
        self.run = Run.of(config, assembly, state, samples.area, PLACES)
        self.model, self.objective, self.progress = assembly.model, self.run.objective, state.progress
        self.batches = Batches(train_set, config, state, self.model, PLACES)
        assert state.replay is not None
        self.replay = state.replay
        self.model.train()

    def step(self, step: int, lr: float) -> float:
        """Return the loss of step `step` over all ranks."""
        self.run.learning_rate = lambda _: lr
        loss = train_step(self.run, step, self.batches).loss
        self.progress.advance(PLACES)
        dist.all_reduce(loss)
        return loss.item() / self.model.mesh.degrees.dp


def test_every_forecast_takes_its_steps_in_turn() -> None:
    """Of 50 samples; the places of two ranks are those of one, and a place stays with its rank."""
    one = ReplaySampler(PLACES, STEPS, 50, 7, 4, 1, 0, 1)
    two = [ReplaySampler(PLACES, STEPS, 50, 7, 2, 1, rank, 2) for rank in range(2)]
    small = ReplaySampler(PLACES, STEPS, 50, 7, 2, 2, 0, 1)
    at_place, starts = [[] for _ in range(PLACES)], []
    for taken in range(0, 240, 4):
        batch = one.local_batch(taken, 0)
        assert batch == two[0].local_batch(taken, 0) + two[1].local_batch(taken, 0)
        assert batch == small.local_batch(taken, 0) + small.local_batch(taken, 1)
        assert sorted(number % STEPS for number in batch)[:3] in ([0, 0, 1], [0, 1, 1], [0, 1, 2])
        for number, place in enumerate(range(taken % PLACES, taken % PLACES + 4)):
            at_place[place].append(batch[number])
        starts += [number // STEPS for number in batch if number % STEPS == 0]
    for numbers in at_place:
        for before, after in zip(numbers, numbers[1:], strict=False):
            assert after == before + 1 if before % STEPS < STEPS - 1 else after % STEPS == 0
    first_epoch = [one.sample(n) for n in range(50)]
    assert sorted(first_epoch) == list(range(50))
    assert set(starts[:40]) <= set(first_epoch[: 40 + 2 * PLACES])


@pytest.mark.parametrize("history", [1, 2])
def test_steps_start_from_the_models_own_forecast(one_rank, config_file, tmp_path, history) -> None:
    """With weights that stand still: what forecast.py makes of the analysis that the place began at."""
    trial = Trial(config_of(config_file, tmp_path, f"--data.history={history}"))
    replay, objective, batches = trial.replay, trial.objective, trial.batches
    for step in range(1, 4):  # micro-batches of 2
        trial.step(step, 0.0)
    last, micro = 2 * PLACES, PLACES // 2 - 1
    assert replay.row == micro
    numbers = batches.loader.sampler.local_batch(last, micro)
    begin = phases(STEPS)
    assert [number % STEPS for number in numbers] == [(2 + begin[6 % 3]) % 3, (2 + begin[7 % 3]) % 3]
    whole = batches.loader.dataset
    for place, number in enumerate(numbers):
        began, lead = number - number % STEPS, number % STEPS
        fields, times = whole.__getitems__([began])
        start = fields[:, :history].flatten(1, 2)
        parts = (trial.model.predict, objective.normalizer, objective.conditions, objective.step_seconds)
        *_, window = rollout(*parts, start, times, lead + 1)
        normalizer = objective.normalizer
        expected = normalizer.denormalize(window.unflatten(1, (history, -1))).flatten(1, 2)
        assert int(replay.dates[-1, place]) == int(times) + (lead + 1) * 21_600
        torch.testing.assert_close(replay.states[-1, place], expected[0], rtol=1e-5, atol=1e-5)
        if lead:
            truth = whole.__getitems__([number])[0][0, 0]
            begun = replay.start(last, micro, *whole.__getitems__(numbers))[place, 0]
            assert torch.equal(begun, truth)  # what is there is one step further, of another date


def test_neighbours_begin_at_leads_that_are_far_apart() -> None:
    """Each lead once; of any four neighbours of twelve some at short leads and some at long ones."""
    for number in (2, 3, 4, 12, 40):
        assert sorted(phases(number)) == [*range(number)]
    begin = phases(12)
    for turn in range(12):
        for place in range(12):
            leads = [(turn + begin[(place + other) % 12]) % 12 for other in range(4)]
            assert min(leads) < 6 <= max(leads)


@pytest.mark.parametrize("option", ["loss=mse", "loss=mae", "loss=relative_l2", "spectral_fraction=0.5"])
def test_losses_count_by_their_leads(one_rank, config_file, tmp_path, option) -> None:
    """With weights that stand still: of each sample its loss as validations have it, times its weight."""
    options = ["--training.rollout_weights=[3,1,0.5]", f"--training.{option}"]
    trial = Trial(config_of(config_file, tmp_path, *options))
    objective, batches = trial.objective, trial.batches
    parts = (trial.model.predict, objective.normalizer, objective.conditions, objective.step_seconds)
    for step in range(1, 4):
        expected = 0.0
        for micro in range(PLACES // 2):
            numbers = batches.loader.sampler.local_batch(trial.progress.samples, micro)
            fields, times = batches.loader.dataset.__getitems__(numbers)
            begun = trial.replay.start(trial.progress.samples, micro, fields, times)
            for number, field, time in zip(numbers, begun, times, strict=True):
                *_, last = rollout(*parts, field[None, 0], time[None], 1)
                predicted = objective.normalizer.denormalize(last[:, None])[:, 0]
                own = objective.loss_of_fields(predicted[:, None][0], field[None, 1])
                expected += float(own) * [3, 1, 0.5][number % STEPS] / 1.5 / PLACES
        assert trial.step(step, 0.0) == pytest.approx(expected, rel=1e-5)


def test_what_has_blown_up_is_not_taken_up_again(one_rank, config_file, tmp_path) -> None:
    trial = Trial(config_of(config_file, tmp_path))
    with torch.no_grad():
        trial.model.parameters["head.bias"].fill_(torch.nan)
    trial.step(1, 0.0)
    assert (trial.replay.dates == torch.iinfo(torch.int64).min).all()


LAYOUTS: dict[str, list[str]] = {
    "dp_shard 2": ["--training.local_batch_size=2"],
    "dp_replicate 2": ["--parallelism.data_parallel_replicate_degree=2", "--training.local_batch_size=2"],
    "tp 2": ["--parallelism.tensor_parallel_degree=2"],
    "cp 2": ["--parallelism.context_parallel_degree=2"],
    "pp 2": ["--parallelism.pipeline_parallel_degree=2"],
    "tiles 2": ["--model.name=unet", "--parallelism.context_parallel_degree=2"],
}
UNET = ["--model.name=unet", "--model.width=4", "--model.levels=1"]


def five_steps(path: str, folder: str, options: list[str]) -> dict[str, Any]:
    """Losses and weights of five training steps, which go round the ring once each, on each rank."""
    own = ["--training.local_batch_size=4", "--training.rollout_weights=[1,0.5,0.25]", STEADY, *options]
    trial = Trial(config_of(Path(path), Path(folder), *own))
    losses = np.array([trial.step(step, 1e-2) for step in range(1, 6)])
    group = trial.model.pipeline_group
    weights = gather_stages({name: full(p) for name, p in trial.model.parameters.items()}, group)
    replay = trial.replay
    return weights | {"losses": losses, "replay": replay.states.numpy(), "dates": replay.dates.numpy()}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_equals_one_process(one_rank, ranks, config_file, tmp_path, name) -> None:
    """The same samples from the same states, to rounding; all ranks of a sample keep the same bits."""
    options = [*(UNET if "tiles" in name else []), *LAYOUTS[name]]
    alone = five_steps(str(config_file), str(tmp_path / "one"), options[:3] if "tiles" in name else [])
    outcomes = ranks(2).run(five_steps, str(config_file), str(tmp_path / "two"), options)
    kept = [{key: outcome.pop(key) for key in ("replay", "dates")} for outcome in outcomes]
    states, dates = alone.pop("replay"), alone.pop("dates")
    assert difference(outcomes[0], alone)[0] < 1e-4
    if name.startswith("dp"):
        states, dates = (whole.reshape(2, 2, 2, *whole.shape[2:]) for whole in (states, dates))
        parts = [(states[:, rank], dates[:, rank]) for rank in range(2)]
    else:
        parts = [(states, dates)] * 2
        assert np.array_equal(kept[0]["replay"], kept[1]["replay"])
    for own, (state, date) in zip(kept, parts, strict=True):
        assert np.array_equal(own["dates"], date)
        np.testing.assert_allclose(own["replay"], state, rtol=1e-3, atol=1e-3)


def test_a_resumed_run_is_the_undisturbed_one(config_file, tmp_path) -> None:
    """With the copies of a save that go on while the next step writes into the ring."""
    options = [f"--training.replay_steps={STEPS}", "--training.global_batch_size=4"]
    options += ["--checkpoint.interval=20", "--training.ema_decay=0.9"]
    goes_on_exactly(config_file, tmp_path, options, [20])


@pytest.mark.slow
def test_another_ring_starts_empty(config_file, tmp_path, caplog) -> None:
    """A run goes on with another batch, from analyses."""
    run_train(*run_options(config_file, tmp_path, "--training.replay_steps=3", "--training.steps=20"))
    other = ["--training.replay_steps=2", "--training.global_batch_size=6"]
    run_train(*run_options(config_file, tmp_path, *other))
    assert "resumed from" in caplog.text and not dist.is_initialized()
