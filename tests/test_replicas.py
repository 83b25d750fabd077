"""Replicas that leave and rejoin: equal to a plain run, nothing lost or half done, then alike to the bit."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader

from checkpoints.files import complete_steps, step_folder, stored_tensors
from command_line import to_toml
from config import FaultTolerance
from errors import ConfigError
from jobs.replica_state import settings_of_replicas
from jobs.replicas import brief, buckets, check_replicas, import_torchft
from tests.test_train import archive, config_file, losses, read, read_complete_lines, run, start
from training.config_checks import load_checked

__all__ = ["archive", "config_file"]  # fixtures
ROOT = Path(__file__).parent.parent
PAIR = ["--fault_tolerance.enable", "--fault_tolerance.group_size", "2", "--comm.timeout_seconds", "60"]


@pytest.fixture(scope="module")
def lighthouse() -> Iterator[str]:
    """The address of a lighthouse of this process, which misses a killed replica after two seconds."""
    try:
        import_torchft()
    except ImportError as error:
        pytest.skip(f"{error}: torchft is an extra, see requirements-extras.txt")
    from torchft.coordination import LighthouseServer  # type: ignore[reportMissingImports]

    server = LighthouseServer(bind="[::]:0", min_replicas=1, heartbeat_timeout_ms=2000)
    yield server.address()
    server.shutdown()


def replica(number: int, file: Path, folder: Path, lighthouse: str, *options: str, ranks: int = 1):
    """One replica of two, through the launcher, as a user starts it."""
    own = ["--fault_tolerance.replica_id", str(number), "--fault_tolerance.lighthouse", lighthouse]
    return start(file, folder, *PAIR, *own, *options, NGPU=str(ranks))


def ends(process: subprocess.Popen, timeout: float = 180) -> str:
    """What a process that has to end well said on stderr."""
    _, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, err.decode()
    return err.decode()


def wait_for_steps(process: subprocess.Popen, folder: Path, count: int) -> None:
    while (
        not (folder / "metrics.jsonl").exists() or len(read_complete_lines(folder / "metrics.jsonl")) < count
    ):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def steps(records: list[dict]) -> dict[int, tuple[float, float]]:
    """Step -> loss and gradient norm."""
    return {r["step"]: (r["loss"], r["grad_norm"]) for r in records if "loss" in r}


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """The model in a checkpoint, whole."""
    path = step_folder(folder / "checkpoints", step)
    state = {n: torch.empty(e.size) for n, e in stored_tensors(path).items() if n.startswith("model.")}
    state_dict_loader.load(state, checkpoint_id=str(path), no_dist=True)
    return state


# -- with every replica there


@pytest.mark.slow
def test_two_replicas_of_two_ranks_train_the_plain_run(config_file, tmp_path, lighthouse):
    plain = run(config_file, tmp_path / "plain", "--training.global_batch_size", "16", "--checkpoint.enable")
    options = ["--training.local_batch_size", "4", "--checkpoint.enable"]
    pair = [replica(i, config_file, tmp_path / "pair", lighthouse, *options, ranks=2) for i in (0, 1)]
    for process in pair:
        ends(process)
    first, second = (read(tmp_path / f"pair/replica-{i}") for i in (0, 1))
    np.testing.assert_allclose(losses(first), losses(plain), rtol=1e-6)
    assert steps(first) == steps(second) and first[-1] == second[-1]  # the validation too, to the bit
    expected, found = weights(tmp_path / "plain", 12), weights(tmp_path / "pair/replica-0", 12)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)
    assert complete_steps(tmp_path / "pair/replica-1/checkpoints") == []  # one of them saves


# -- with one that is lost


@pytest.mark.slow
def test_a_lost_replica_that_is_waited_for_changes_nothing(config_file, tmp_path, lighthouse):
    """It dies somewhere in a step and comes back with an old checkpoint: as if nothing had been."""
    options = ["--training.steps", "60", "--checkpoint.enable", "--checkpoint.interval", "8"]
    options += ["--checkpoint.async_mode", "disabled"]
    plain = run(config_file, tmp_path / "plain", *options, "--training.global_batch_size", "16")
    options += ["--fault_tolerance.min_replica_size", "2"]
    kept, folder = (
        replica(1, config_file, tmp_path / "pair", lighthouse, *options),
        tmp_path / "pair/replica-0",
    )
    lost = replica(0, config_file, tmp_path / "pair", lighthouse, *options)
    wait_for_steps(lost, folder, 20)
    lost.kill()
    lost.wait()
    assert complete_steps(folder / "checkpoints")
    again = replica(0, config_file, tmp_path / "pair", lighthouse, *options)
    said, said_again = ends(kept), ends(again)
    assert "resumed from" in said_again and "Traceback" not in said + said_again
    records = read(tmp_path / "pair/replica-1")
    assert [r["step"] for r in records if "loss" in r] == list(range(1, 61))
    np.testing.assert_allclose(losses(records), losses(plain), rtol=1e-6)
    assert read(folder)[-1] == records[-1]


@pytest.mark.slow
def test_the_others_go_on_and_one_that_comes_back_is_alike_to_the_bit(config_file, tmp_path, lighthouse):
    """Its folder is empty. What a checkpoint holds, it gets from the other: averages, moments, the step."""
    options = ["--training.steps", "400", "--training.local_batch_size", "2", "--training.ema_decay", "0.99"]
    options += ["--training.global_batch_size", "32", "--model.stochastic_depth", "0.2"]
    options += ["--training.spike_threshold", "50", "--checkpoint.enable", "--checkpoint.interval", "100"]
    kept, folder = (
        replica(0, config_file, tmp_path / "pair", lighthouse, *options),
        tmp_path / "pair/replica-1",
    )
    lost = replica(1, config_file, tmp_path / "pair", lighthouse, *options)
    wait_for_steps(lost, folder, 20)
    lost.kill()
    lost.wait()
    died = max(steps(read(folder)))
    again = replica(1, config_file, tmp_path / "again", lighthouse, *options)
    said_by_kept, said = ends(kept), ends(again)
    records, healed = read(tmp_path / "pair/replica-0"), read(tmp_path / "again/replica-1")
    done = [r["step"] for r in records + healed if "loss" in r]
    assert set(done) == set(range(1, 401)) and done.count(died) == 1
    assert np.isfinite(losses(records)).all() and losses(records)[-1] < losses(records)[0]
    assert min(steps(healed)) > died + 1, "the other did not go on alone"
    assert "took over the state" in said and "1 of 2 replicas are here" in said_by_kept
    both = steps(healed).keys() & steps(records).keys()  # a loaded machine may keep one from a step
    assert 400 in both and all(steps(healed)[step] == steps(records)[step] for step in both)
    assert healed[-1] == records[-1]


# -- what a user gets wrong


def test_replicas_of_other_settings_do_not_mix(config_file, tmp_path, lighthouse):
    right = replica(0, config_file, tmp_path / "pair", lighthouse)
    wrong = replica(1, config_file, tmp_path / "pair", lighthouse, "--optimizer.lr", "0.5")
    _, err = wrong.communicate(timeout=60)
    right.kill()
    right.communicate()
    lines = [line for line in err.decode().splitlines() if line.startswith("rossby:")]
    assert wrong.returncode == 2 and len(lines) == 1 and "Traceback" not in err.decode()
    assert lines[0].startswith("rossby: optimizer.lr = 0.5: another replica has 0.001")


def test_without_torchft_one_line_says_how_to_get_it(config_file, tmp_path):
    (tmp_path / "torchft.py").write_text("raise ImportError('not here')\n")
    command = [sys.executable, str(ROOT / "train.py"), "--job.config_file", str(config_file), *PAIR]
    found = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, cwd=ROOT
    )
    assert found.returncode == 2 and len(found.stderr.splitlines()) == 1
    assert found.stderr.startswith("rossby: fault_tolerance.enable = True: needs torchft (not here)")
    assert "pip install torchft==" in found.stderr


@pytest.mark.parametrize(
    ("address", "reason"),
    [("", "expected http://host:port"), ("vm:29510", "expected http"), ("http://127.0.0.1:9", "not answer")],
)
def test_a_lighthouse_that_is_not_there_is_named(address, reason, monkeypatch):
    monkeypatch.setattr("jobs.replicas.import_torchft", lambda: None)
    monkeypatch.setattr("jobs.replicas.REACH_SECONDS", 0.1)
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    with pytest.raises(ValueError, match=reason) as raised:
        check_replicas(FaultTolerance(enable=True, lighthouse=address))
    assert "torchft_lighthouse --min_replicas" in str(raised.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fault_tolerance.replica_id", "2"),
        ("fault_tolerance.min_replica_size", "3"),
        ("training.global_batch_size", "8"),
    ],
)
def test_impossible_places_are_refused(config_file, key, value):
    with pytest.raises(ConfigError, match=key):
        load_checked(["--job.config_file", str(config_file), *PAIR, f"--{key}", value])


# -- the parts


def test_a_replica_has_a_folder_of_its_own_and_its_settings_can_be_run_again(config_file, tmp_path):
    arguments = ["--job.config_file", str(config_file), "--job.dump_folder", str(tmp_path / "run")]
    config = load_checked([*arguments, *PAIR, "--fault_tolerance.replica_id", "1"])
    assert config.dump_folder == tmp_path / "run/replica-1"
    (tmp_path / "again.toml").write_text(to_toml(config))
    assert load_checked(["--job.config_file", str(tmp_path / "again.toml")]).dump_folder == config.dump_folder
    other = load_checked([*arguments, *PAIR, "--data.num_workers", "3"])
    assert settings_of_replicas(config, 1) == settings_of_replicas(other, 1) != settings_of_replicas(other, 2)


def test_buckets_hold_neighbours_of_one_type_up_to_a_size():
    tensors = [
        torch.zeros(n, dtype=d) for n, d in [(4, torch.float32), (4, torch.float32), (9, torch.float32)]
    ]
    tensors += [torch.zeros(2, dtype=torch.bfloat16), torch.zeros(1)]
    assert [[t.numel() for t in bucket] for bucket in buckets(tensors, 32)] == [[4, 4], [9], [2], [1]]


def test_errors_are_told_in_brief():
    gloo = (
        "[/build/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1: reset. This is typically caused by"
    )
    assert brief(RuntimeError(gloo)) == "Read error [127.0.0.1]:1: reset"
    assert brief(TimeoutError()) == "TimeoutError"
