"""Saves in the background, exact resume, and failed saves; damaged, foreign and crafted checkpoints: each is
named in one line and set aside, and the one before taken.
"""

import errno
import fcntl
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.tensor import DTensor

from checkpoints.checkpointer import Checkpointer, CheckpointProcess
from checkpoints.files import (
    Damaged,
    check_steps,
    complete_steps,
    crc32_of,
    lock,
    read_manifest,
    read_tensors,
    step_folder,
    stored_tensors,
    write_manifest,
)
from checkpoints.identity import Identity
from config import Checkpoint, Training
from errors import DataError, one_line
from tests.conftest import memory_kib
from tests.parity import Layout, SmallRun, replicate
from tests.started_jobs import ROOT, run_program, wait_until, write_config
from training.batches import choose_global_batch
from training.run_folder import lock_folder, resume
from training.state import Progress

MODES = ("disabled", "async", "async_with_pinned_mem")


class Run(SmallRun):
    """A small run in float16, whose losses are scaled."""

    def __init__(self, dim: int = 32, seed: int = 0) -> None:
        super().__init__(Layout(dtype="float16", model=(("dim", dim),)), seed)
        self.state.scaler.growth_interval = 2

    def step(self, checkpointer: Checkpointer | None = None) -> float:  # type: ignore[override]
        self.run.checkpointer = checkpointer
        return super().step(self.state.progress.step)[0]

    def save(self, checkpointer: Checkpointer) -> None:
        checkpointer.save(self.state.progress.step, self.state.state_dict())

    def step_and_save(self, checkpointer: Checkpointer, number: int = 1) -> None:
        """So many steps, with a checkpoint after each, the last of which has ended."""
        for _ in range(number):
            self.step(checkpointer)
            self.save(checkpointer)
        checkpointer.wait()


@pytest.fixture
def build(one_rank, tmp_path):
    """Checkpointers on one folder; those before are closed first."""
    made: list[Checkpointer] = []

    def build(mode: str = "disabled", keep: int = 5, folder: Path = tmp_path) -> Checkpointer:
        for checkpointer in made:
            checkpointer.close()
        settings = Checkpoint(async_mode=mode, keep_latest_k=keep)  # type: ignore[arg-type]
        made[:] = [Checkpointer(folder, settings, "x = 1", {"layout": {"dp_shard": 1}})]
        made[0].start_process()
        return made[0]

    yield build
    for checkpointer in made:
        checkpointer.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_run_is_the_same_run(build, mode):
    run, checkpointer = Run(), build(mode)
    for _ in range(3):
        run.step()
    run.save(checkpointer)
    expected = [run.step(checkpointer) for _ in range(3)]  # a save in flight must not see these updates

    other = Run(seed=1)
    assert resume(build(), other.state) and other.state.progress.step == 3
    assert [other.step() for _ in range(3)] == expected
    pairs = zip(run.state.parameters.values(), other.state.parameters.values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert other.state.scaler.factor == run.state.scaler.factor == 2.0**19


def test_only_complete_checkpoints_count_and_the_newest_stay(build, tmp_path):
    run, checkpointer = Run(), build(keep=2)
    run.step_and_save(checkpointer, 4)
    assert complete_steps(tmp_path) == [3, 4]
    (tmp_path / "step-00000050.incomplete").mkdir()
    (tmp_path / "step-00000040.deleting").mkdir()
    assert complete_steps(tmp_path) == [3, 4]
    other = Run()
    assert resume(build(keep=2), other.state) and other.state.progress.step == 4
    assert not list(tmp_path.glob("step-*.*"))


def test_a_prune_that_fails_costs_no_checkpoint(build, tmp_path, caplog, monkeypatch):
    """The save counted as failed, though it was complete; where every prune failed the run ended with 1."""
    run, checkpointer = Run(), build("async", keep=1)
    run.step_and_save(checkpointer)
    with monkeypatch.context() as full:
        full.setattr("checkpoints.files.remove", refuse)
        run.step()
        run.save(checkpointer)
        assert checkpointer.finish(2, run.state.state_dict()) == "" and not checkpointer.last_error
    assert complete_steps(tmp_path) == [1, 2] and "older checkpoints are not removed" in caplog.text
    run.step_and_save(build("async", keep=1))
    assert complete_steps(tmp_path) == [3]


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.EIO, "Input/output error")


def test_a_folder_without_a_checkpoint_is_none(build, tmp_path):
    """An empty folder was refused as "already has step 99"."""
    (tmp_path / "step-00000099").mkdir()
    check_steps(tmp_path, 50, saves=True)
    run, checkpointer = Run(), build()
    assert not resume(checkpointer, run.state)
    run.state.progress.step = 98
    run.step_and_save(checkpointer)
    assert complete_steps(tmp_path) == [99]


def test_another_model_is_refused_by_name(build):
    run, checkpointer = Run(), build()
    run.step_and_save(checkpointer)
    with pytest.raises(
        ValueError, match=r"step-00000001: model.patch_embedding.weight is \[32, 80\] there and \[64"
    ):
        resume(build(), Run(dim=64).state)


@pytest.mark.parametrize(
    ("mode", "has_vanished"), [("disabled", False), ("async", False), ("disabled", True)]
)
def test_a_save_that_fails_is_said_and_the_run_goes_on(
    build, tmp_path, mode, has_vanished, caplog, monkeypatch
):
    """Where the disk had vanished, the question for its free space ended rank 0 alone with a traceback."""
    run, checkpointer = Run(), build(mode)
    run.step_and_save(checkpointer)
    with monkeypatch.context() as lost:
        if has_vanished:
            lost.setattr("checkpoints.checkpointer.shutil.disk_usage", refuse)
        (tmp_path / "step-00000002.incomplete").write_text("a file where a folder has to be")
        run.step_and_save(checkpointer)
    assert "checkpoint of step 2 could not be written" in caplog.text
    said = "cannot be read: [Errno 5]" if has_vanished else f"complete one: {step_folder(tmp_path, 1)}"
    assert said in caplog.text
    run.step_and_save(checkpointer)
    assert complete_steps(tmp_path) == [1, 3] and not checkpointer.last_error


def test_a_folder_that_vanished_is_made_again(build, tmp_path):
    folder = tmp_path / "checkpoints"
    run, checkpointer = Run(), build(folder=folder)
    run.step()
    shutil.rmtree(folder)
    run.save(checkpointer)
    checkpointer.wait()
    assert complete_steps(folder) == [1]


def started_process(checkpointer: Checkpointer) -> Any:
    assert checkpointer.process
    checkpointer.process.started.result()
    return checkpointer.process.process._save_process


def test_the_process_listens_on_this_host_alone_and_ends_by_no_signal_to_all(build, tmp_path):
    run, checkpointer = Run(), build("async_with_pinned_mem")
    port = f":{checkpointer.process.store[0].port:04X}"
    listening = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    addresses = [line.split()[1] for line in listening.splitlines() if port in line and " 0A " in line]
    assert addresses == ["0100007F" + port]
    process = started_process(checkpointer)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        os.kill(process.pid, number)
    run.step_and_save(checkpointer)
    assert complete_steps(tmp_path) == [1] and process.is_alive()


def test_a_full_disk_and_the_death_of_the_process_cost_a_save_each(build, tmp_path, caplog, monkeypatch):
    """/dev/full takes no byte: a link to it stands where this rank's file will be."""
    run, checkpointer = Run(dim=128), build("async_with_pinned_mem")
    run.step_and_save(checkpointer)
    unfinished = tmp_path / "step-00000002.incomplete"
    unfinished.mkdir()
    (unfinished / "__0_0.distcp").symlink_to("/dev/full")
    run.step_and_save(checkpointer)
    assert os.strerror(errno.ENOSPC) in caplog.text and "training goes on" in caplog.text
    assert complete_steps(tmp_path) == [1] and not unfinished.exists()

    process = started_process(checkpointer)
    process.kill()  # while it writes nothing
    process.join()
    run.step_and_save(checkpointer)
    assert complete_steps(tmp_path) == [1, 3]

    run.step()
    process = started_process(checkpointer)
    os.kill(process.pid, signal.SIGSTOP)
    run.save(checkpointer)
    checkpointer.wait_for_staging()
    process.kill()  # while it writes
    monkeypatch.setattr(process, "is_alive", lambda: True)  # as it is for a while on a busy machine
    checkpointer.wait()
    assert "step 4 could not be written: Checkpoint background process is dead" in caplog.text
    run.step_and_save(checkpointer)
    assert complete_steps(tmp_path) == [1, 3, 5] and not list(tmp_path.glob("*.incomplete"))


def test_a_process_that_waits_for_one_that_has_died_ends(one_rank, monkeypatch):
    """Its rank waited for its start for ten minutes, and the watchdog ended the run."""
    with monkeypatch.context() as patch:  # the process of another rank, which does not come
        patch.setattr("checkpoints.checkpointer.dist.get_world_size", lambda *_: 2)
        process = CheckpointProcess()
    started = time.monotonic()
    process.close()
    assert time.monotonic() - started < 10 and process.started.exception()


def test_little_shared_memory_is_logged_and_a_thread_writes(build, tmp_path, caplog, monkeypatch):
    run, checkpointer = Run(), build("async_with_pinned_mem")
    monkeypatch.setattr("checkpoints.checkpointer.shutil.disk_usage", lambda _: SimpleNamespace(free=10**3))
    run.step_and_save(checkpointer)
    assert "/dev/shm has 0 MB free" in caplog.text and not checkpointer.process
    assert complete_steps(tmp_path) == [1]


def test_few_open_files_are_logged_and_a_thread_writes(build, tmp_path, caplog, monkeypatch):
    run, checkpointer = Run(), build("async_with_pinned_mem")
    monkeypatch.setattr("checkpoints.checkpointer.resource.getrlimit", lambda _: (210, 210))
    run.step_and_save(checkpointer)
    assert "210 files open" in caplog.text and not checkpointer.process and complete_steps(tmp_path) == [1]


def test_without_shared_memory_a_thread_writes(build, tmp_path, monkeypatch):
    """As on macOS."""
    monkeypatch.setattr("checkpoints.checkpointer.SHARED_MEMORY", str(tmp_path / "none"))
    run, checkpointer = Run(), build("async_with_pinned_mem")
    run.step_and_save(checkpointer)
    assert not checkpointer.process and complete_steps(tmp_path) == [1]


def test_host_memory_does_not_grow_with_saves(build):
    run, checkpointer = Run(dim=96), build("async_with_pinned_mem", keep=1)  # 5 MB with its moments
    run.step()
    sizes = []
    for save in range(25):
        run.state.progress.step += 1
        run.save(checkpointer)
        if save in (5, 24):
            checkpointer.wait()
            sizes.append(memory_kib() + memory_kib(started_process(checkpointer).pid))
    assert sizes[1] - sizes[0] < 10_000  # KiB; 19 saves are 38 MB, and other tests leave gaps to fill


def count_staged(layout: Layout, folder: Path) -> tuple[int, int]:
    """Bytes in the copies of this rank, and of all that it has."""
    small = SmallRun(layout, ema_decay=0.9)
    small.step(0)
    checkpointer, tensors = Checkpointer(folder, Checkpoint(), "", {}), small.state.state_dict()
    for step in (1, 2):
        checkpointer.save(step, tensors)
    checkpointer.wait()
    assert checkpointer.process and checkpointer.stager and checkpointer.saved_step == 2
    copies = checkpointer.stager._state_dict_stager._cached_storage_mapping.values()
    staged = sum(storage.nbytes() for storage in copies)
    checkpointer.close()
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors.values()]
    return staged, sum(tensor.nbytes for tensor in local)


def test_a_rank_copies_what_it_writes_alone(ranks, tmp_path):
    """Each replica copied the whole state: 160 GB of /dev/shm for 1 B parameters with averages on 8 ranks."""
    for staged, size in ranks(2).run(count_staged, Layout(2, replicate()), tmp_path):
        assert 0.75 * size / 2 < staged < 1.25 * size / 2
    assert complete_steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("mode", MODES)
def test_a_save_leaves_no_second_team_of_threads(build, mode):
    """Where two threads of a process compute in parallel loops, the workers of both sleep between them: steps
    after the first save took 1.8 x as long on two cores.
    """

    def count_workers() -> int:
        """Count threads of this process's name that are not Python's: those of OpenMP."""
        names = []
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # it has ended meanwhile
                names.append((task / "comm").read_text())
        return names.count(Path("/proc/self/comm").read_text()) - threading.active_count()

    number = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        checkpointer = build(mode)
        torch.zeros(2**20).add_(1)  # starts the team of this thread
        tensors = {f"layer {number}": torch.zeros(2**16 if number < 20 else 8) for number in range(500)}
        workers = count_workers()
        checkpointer.save(1, tensors)
        checkpointer.wait()
        wait_until(lambda: count_workers() <= workers, 10)  # a thread that has ended is gone a little later
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(number)


def test_the_global_batch_goes_on():
    def next_batch(asked: int, smallest: int, progress: Progress) -> int:
        return choose_global_batch(Training(global_batch_size=asked), smallest, progress)

    assert next_batch(-1, 8, Progress()) == 8
    assert next_batch(-1, 4, Progress(global_batch=16)) == 16
    assert next_batch(32, 4, Progress(global_batch=16)) == 32
    with pytest.raises(ValueError, match="16 samples a step are no multiple .* = 6"):
        next_batch(-1, 6, Progress(global_batch=16))


@pytest.mark.parametrize("mode", ["disabled", "async", pytest.param(MODES[-1], marks=pytest.mark.slow)])
def test_a_last_save_that_failed_is_tried_again_and_never_called_complete(build, tmp_path, mode, monkeypatch):
    folder, pauses = tmp_path / "checkpoints", []
    run, checkpointer = Run(), build(mode, folder=folder)
    in_the_way = folder / "step-00000001.incomplete"
    in_the_way.write_text("a file where a folder has to be")
    monkeypatch.setattr("checkpoints.checkpointer.time.sleep", pauses.append)
    run.step()
    run.save(checkpointer)
    problem = checkpointer.finish(1, run.state.state_dict())
    assert "the last checkpoint, of step 1, could not be written" in problem and "\n" not in problem
    assert pauses == [1, 2, 4, 8, 16] and complete_steps(folder) == []

    checkpointer = build(mode, folder=folder)
    run.save(checkpointer)
    monkeypatch.setattr("checkpoints.checkpointer.time.sleep", lambda _: in_the_way.unlink(missing_ok=True))
    assert checkpointer.finish(1, run.state.state_dict()) == "" and complete_steps(folder) == [1]


SCRIPT = """
import multiprocessing, os, signal, sys, time
from pathlib import Path
import torch
from checkpoints.checkpointer import Checkpointer
from config import Checkpoint
from parallelisms.mesh import start_ranks

if __name__ == "__main__":
    start_ranks(60, "gloo")
    checkpointer = Checkpointer(Path(sys.argv[1]), Checkpoint(), "", {})
    checkpointer.start_process()
    while not (children := multiprocessing.active_children()):
        time.sleep(0.001)
"""
ORPHAN = """
    checkpointer.process.started.result()
    os.kill(children[0].pid, signal.SIGSTOP)  # as in a write that takes long
    checkpointer.save(1, {"weight": torch.ones(2)})
    print(children[0].pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
INTERRUPTED = """
    for _ in range(10):
        os.kill(children[0].pid, signal.SIGINT)
        time.sleep(0.02)
    checkpointer.save(1, {"weight": torch.ones(2)})
    checkpointer.close()
    print(checkpointer.last_error or "saved")
"""


def run_script(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """In a fresh process."""
    script = folder / "script.py"
    script.write_text(SCRIPT + text)
    return run_program(sys.executable, script, folder, PYTHONPATH=str(ROOT))


def has_ended(child: str) -> bool:
    status = Path(f"/proc/{child}/status")
    return not status.exists() or "State:\tZ" in status.read_text()


def test_a_process_that_writes_ends_with_its_trainer(tmp_path):
    """It wrote for seconds while the next start cleared the same folder."""
    done = run_script(tmp_path, ORPHAN)
    assert done.returncode == -signal.SIGKILL, done.stderr
    wait_until(lambda: has_ended(done.stdout.strip()), 5)
    assert not complete_steps(tmp_path)


@pytest.mark.slow
def test_a_process_that_is_starting_ends_with_its_trainer(start_job, tmp_path):
    """It imported torch for seconds before it looked whether the trainer was there."""
    job = start_job(write_config(tmp_path), tmp_path / "run")

    def started() -> list[str]:
        tasks = Path(f"/proc/{job.process.pid}/task").glob("*/children")
        pids = [pid for path in tasks if path.exists() for pid in path.read_text().split()]
        return [pid for pid in pids if b"--multiprocessing-fork" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    wait_until(started)
    (child,) = started()
    time.sleep(0.3)
    job.process.kill()
    job.process.wait()
    time.sleep(0.3)
    assert has_ended(child)


def test_ctrl_c_does_not_end_a_process_that_is_starting(tmp_path):
    """In a fresh process: multiprocessing's resource tracker unblocks signals when it starts."""
    done = run_script(tmp_path, INTERRUPTED)
    assert done.stdout == "saved\n" and "Traceback" not in done.stderr, done.stderr


# -- damage


def shard(folder: Path) -> Path:
    return next(folder.glob("*.distcp"))


def truncate(folder: Path) -> None:
    os.truncate(shard(folder), shard(folder).stat().st_size - 1)


def flip_a_bit(folder: Path) -> None:
    content = bytearray(shard(folder).read_bytes())
    content[len(content) // 2] ^= 1
    shard(folder).write_bytes(content)


def flip_the_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"ranks": 1', '"ranks": 3'))


class Code:
    """Unpickled, it would run a command."""

    def __reduce__(self):
        return os.system, ("touch ran",)


def craft(folder: Path) -> None:
    """A `.metadata` that runs a command, under a manifest made for it."""
    (folder / ".metadata").write_bytes(pickle.dumps(Code()))
    manifest = read_manifest(folder)
    files = {name: (entry["bytes"], entry["crc32"]) for name, entry in manifest.pop("files").items()}
    files[".metadata"] = ((folder / ".metadata").stat().st_size, crc32_of(folder / ".metadata"))
    write_manifest(folder, manifest, files)


HARMS = [
    (truncate, "__0_0.distcp: has"),
    (flip_a_bit, "__0_0.distcp: its bytes are not those"),
    (lambda folder: shard(folder).unlink(), "__0_0.distcp: is missing"),
    (lambda folder: (folder / "manifest.json").unlink(), "manifest.json: cannot be read: No such file"),
    (flip_the_manifest, "manifest.json: its checksum"),
    (lambda folder: os.truncate(folder / "manifest.json", 5), "manifest.json: cannot be read"),
    (craft, ".metadata: refused: contains posix.system"),
]


@pytest.mark.parametrize(("harm", "said"), HARMS)
def test_a_damaged_checkpoint_is_named(build, tmp_path, caplog, monkeypatch, harm, said):
    """And the one before it taken."""
    monkeypatch.chdir(tmp_path)
    run, checkpointer = Run(), build()
    run.step_and_save(checkpointer, 2)
    harm(step_folder(tmp_path, 2))
    other = Run(seed=1)
    assert resume(build(), other.state) and other.state.progress.step == 1
    lines = [record.getMessage() for record in caplog.records if "set aside" in record.getMessage()]
    assert len(lines) == 1 and said in lines[0] and "\n" not in lines[0]
    assert (tmp_path / "step-00000002.damaged").is_dir() and complete_steps(tmp_path) == [1]
    assert not (tmp_path / "ran").exists()


def test_with_only_damaged_checkpoints_nothing_starts_over(build, tmp_path):
    run, checkpointer = Run(), build()
    run.step_and_save(checkpointer)
    truncate(step_folder(tmp_path, 1))
    for _ in range(2):  # not at the next start either
        with pytest.raises(ValueError, match=r"no checkpoint is left .* \(step-00000001.damaged\)"):
            resume(build(), Run().state)


def test_objects_that_are_no_tensors_are_refused(one_rank, tmp_path):
    """DCP would unpickle them without a list."""
    state_dict_saver.save({"a": torch.zeros(2), "b": {"c": "text"}}, checkpoint_id=str(tmp_path))
    with pytest.raises(Damaged, match="refused: contains .*BytesStorageMetadata|b.c is no tensor"):
        stored_tensors(tmp_path)


def test_checkpoints_are_read_and_pruned_without_locks(build, tmp_path, caplog, monkeypatch):
    """Which is said; a checkpoint on such a file system was taken for damaged."""
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    run, checkpointer = Run(), build("disabled", keep=1)
    run.step_and_save(checkpointer, 2)
    other = Run(seed=1)
    assert resume(build(), other.state) and other.state.progress.step == 2 and complete_steps(tmp_path) == [2]
    lock_folder(tmp_path)
    assert "cannot be locked" in caplog.text


def test_fewer_steps_than_the_folder_holds_is_an_error(tmp_path):
    step_folder(tmp_path, 100).mkdir()
    (step_folder(tmp_path, 100) / "manifest.json").touch()
    check_steps(tmp_path, 100, saves=True)
    with pytest.raises(ValueError, match="training.steps = 60: .* already has step 100"):
        check_steps(tmp_path, 60, saves=True)


def test_links_and_strangers_among_checkpoints_are_left_alone(build, tmp_path, caplog):
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("not ours")
    folder.mkdir()
    (folder / "step-00000900").symlink_to(elsewhere)
    (folder / "step-00000800.incomplete").symlink_to(elsewhere)
    (folder / "step-00000700").write_text("a file")
    (folder / "notes").mkdir()
    before = sorted(folder.iterdir())
    run, checkpointer = Run(), build("disabled", folder=folder)
    assert not resume(checkpointer, run.state)
    run.step_and_save(checkpointer)
    assert complete_steps(folder) == [1]
    assert (elsewhere / "precious").exists() and set(before) < set(folder.iterdir())
    assert caplog.text.count("left alone") == 4


def test_a_rollback_removes_what_a_process_reads(build, tmp_path):
    """It stayed the newest: a restart resumed from the bad weights, and saving that step again failed."""
    run, checkpointer = Run(), build("disabled", keep=0)
    run.step_and_save(checkpointer, 3)
    tensors = run.state.state_dict()
    with lock(step_folder(tmp_path, 3)):
        checkpointer.restart(1)
        assert checkpointer.newest() == 1 and complete_steps(tmp_path) == [1]
        with pytest.raises(DataError, match="step-00000003/.metadata: cannot be read: No such file"):
            read_tensors(step_folder(tmp_path, 3), tensors)
        checkpointer.save(3, tensors)
        assert not checkpointer.last_error and checkpointer.newest() == 3
    assert resume(build("disabled"), Run().state) and not list(tmp_path.glob("*.deleting"))


@pytest.mark.parametrize("name", ["manifest.json", "__0_0.distcp", ".metadata"])
def test_a_checkpoint_that_may_not_be_read_is_not_set_aside(build, tmp_path, monkeypatch, name):
    run, checkpointer = Run(), build()
    run.step_and_save(checkpointer, 2)
    real = Path.open

    def forbid(path: Path, *arguments, **options):
        if path == step_folder(tmp_path, 2) / name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", forbid)
    with pytest.raises(DataError, match=f"step-00000002/{name}: permission denied; give the user") as caught:
        resume(build(), Run().state)
    assert not isinstance(caught.value, Damaged) and complete_steps(tmp_path) == [1, 2]


def test_a_file_without_permission_is_one_line():
    """Also where no code expects it: metrics.jsonl, or the folder of a run."""
    line = one_line(PermissionError(errno.EACCES, "Permission denied", "runs/metrics.jsonl"))
    assert line and line.startswith("runs/metrics.jsonl: permission denied")
    assert one_line(OSError(28, "full")) is None


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"[model"])
def test_a_configuration_that_cannot_be_read_is_damage(tmp_path, content):
    (tmp_path / "config.toml").write_bytes(content)
    with pytest.raises(Damaged):
        Identity.of(tmp_path)
