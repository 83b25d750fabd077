"""Runs from end to end on a small archive: the contract of a run's folder, resuming, layouts, precision."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import train as trainer
from checkpoints.files import complete_steps
from tests.planned import run_train
from tests.started_jobs import last_step, losses, records, run_options, write_config
from tests.test_identity import NAMES, waves
from tests.test_metrics import CONTRACT
from training.bad_steps import TrainingDiverged


@pytest.fixture(scope="module")
def config_file(tmp_path_factory) -> Path:
    """40 days of two waves that travel east at different speeds: easily learned, badly persisted."""
    periods = {
        "train_period": ["2020-01-01", "2020-01-31"],
        "validation_period": ["2020-02-01", "2020-02-09"],
    }
    return write_config(
        tmp_path_factory.mktemp("archive"),
        waves(160),
        data={"forcings": ["sin_local_time"]} | periods,
        model={"dim": 32},
        lr_scheduler={"decay_type": "cosine"},
        training={"steps": 12, "local_batch_size": 8},
        metrics={"loggers": ["tensorboard"]},
        checkpoint={"interval": 500, "async_mode": "disabled"},
        validation={"enable": True, "plots": False},
    )


def run(config_file: Path, folder: Path, *options: str) -> list[dict]:
    """A run in this process; the objects of its metrics.jsonl."""
    return run_train(*run_options(config_file, folder, *options))


@pytest.fixture(scope="module")
def plain(config_file, tmp_path_factory) -> Path:
    """The folder of a run of the configuration as it stands."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    run(config_file, folder)
    return folder


def test_a_run_leaves_what_the_contract_names_and_learns(config_file, tmp_path):
    options = ["--training.steps=150", "--optimizer.lr=3e-3", "--validation.plots", "--checkpoint.enable"]
    options += ["--profiling.enable_profiling", "--profiling.profile_freq=50", "--validation.interval=100"]
    records = run(config_file, tmp_path / "run", *options)
    there = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"config.toml", "metrics.jsonl", "checkpoints", "tensorboard", "traces", "plots"} <= there
    *_, trace = sorted((tmp_path / "run/traces").glob("*.json.gz"))
    names = {event.get("name") for event in json.loads(gzip.open(trace).read())["traceEvents"]}
    assert {"data", "forward", "backward", "optimizer", "checkpoint"} <= names
    plots = {path.stem for path in (tmp_path / "run/plots").iterdir()}
    assert plots == {"loss", "rmse", "maps"}
    assert complete_steps(tmp_path / "run/checkpoints") == [100, 150]  # 100: before its validation
    assert (
        list(losses(tmp_path / "run")) == list(range(1, 151))
        and list(records[0])[: len(CONTRACT)] == CONTRACT
    )
    validations = [r for r in records if "val/loss" in r]
    assert [r["step"] for r in validations] == [100, 150]
    for name in NAMES:
        last = validations[-1]
        assert last[f"val/rmse/{name}"] < 0.5 * last[f"val/rmse_persistence/{name}"]
        assert last[f"val/rmse/{name}"] < last[f"val/rmse_training_mean/{name}"]


def test_a_killed_run_goes_on_to_the_bit(start_job, config_file, tmp_path):
    options = ["--checkpoint.enable", "--checkpoint.interval", "10", "--training.steps", "40"]
    run(config_file, tmp_path / "reference", *options)
    killed = start_job(config_file, tmp_path / "killed", *options)
    killed.wait_for_step(15)
    killed.kill_all()
    assert 15 <= last_step(tmp_path / "killed") < 40
    run(config_file, tmp_path / "killed", *options)
    assert losses(tmp_path / "killed") == losses(tmp_path / "reference")


@pytest.mark.parametrize("saves", ["true", "false"])
def test_a_run_that_diverges_says_where_it_ended(config_file, tmp_path, saves):
    """A rate that grows to 1e30 spoils the weights after some steps; checkpoints of those are not kept."""
    options = ["--optimizer.lr=1e30", "--training.max_norm=0", "--training.steps=40"]
    options += ["--lr_scheduler.warmup_steps=0"]
    options += [f"--checkpoint.enable={saves}", "--checkpoint.interval=1"]
    message = r"of the last .*on ranks \[0\].*no checkpoint to go back to; lower optimizer.lr"
    with pytest.raises(TrainingDiverged, match=message):
        run(config_file, tmp_path / "run", *options)


def test_deterministic_switch_is_set_and_unset(config_file, tmp_path):
    try:
        run(config_file, tmp_path / "run", "--training.deterministic", "--training.steps", "2")
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


# -- layouts, against one process; tests/test_parity.py has the numbers of all of them


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, ["--training.local_batch_size=4"]),
        (2, ["--parallelism.context_parallel_degree=2"]),
        (2, ["--parallelism.context_parallel_degree=2", "--parallelism.context_parallel_method=all_gather"]),
        (2, ["--parallelism.context_parallel_degree=2", "--parallelism.context_parallel_method=ring"]),
        (2, ["--parallelism.pipeline_parallel_degree=2"]),
        (2, ["--parallelism.tensor_parallel_degree=2"]),
        (4, ["--parallelism.data_parallel_replicate_degree=2", "--training.local_batch_size=2"]),
    ],
)
def test_ranks_train_the_same_run(start_job, plain, config_file, tmp_path, ranks, options):
    job = start_job(config_file, tmp_path / "two", *options, NGPU=str(ranks))
    assert job.end(180) == 0, job.output
    assert losses(tmp_path / "two") == pytest.approx(losses(plain), rel=1e-5)
    expected, found = records(plain)[-1], records(tmp_path / "two")[-1]  # of the validation: gathered fields
    expected["validation_seconds"] = found["validation_seconds"]
    assert found == pytest.approx(expected, rel=1e-4)
    assert "training mean" in job.output and job.output.count("validation over") == 1


class Waits(TorchDispatchMode):
    """Operators that would wait for a GPU: values that Python reads, and shapes that depend on values."""

    READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition("::")[2].partition(".")[0]
        masks = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if masks or name in self.READS:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--training.mixed_precision_param", "float16", "--training.ema_decay", "0.9"],
        ["--training.spike_threshold", "10", "--training.rollout_steps", "[2]", "--optimizer.name", "LAMB"],
        ["--training.loss", "crps", "--training.members", "2", "--model.noise_dim", "2"],
        ["--optimizer.name", "Muon", "--model.stochastic_depth", "0.2", "--data.history", "2"],
    ],
    ids=["plain", "float16", "rollout", "ensemble", "muon"],
)
def test_steps_read_no_value(config_file: Path, tmp_path: Path, monkeypatch, options) -> None:
    """With the real loader; a value that Python reads makes it wait for a GPU."""
    waits, step = Waits(), trainer.train_step

    def watched(*args):
        with waits:
            return step(*args)

    monkeypatch.setattr(trainer, "train_step", watched)
    short = ["--training.steps", "4", "--validation.enable", "false"]
    short += ["--data.num_workers", "1"]  # the sampler, of host tensors, has a thread of its own
    run(config_file, tmp_path, *short, *options)
    assert waits.seen == []
