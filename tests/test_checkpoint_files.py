"""Damaged, foreign and crafted checkpoints: each named in one line, set aside, and the one before taken."""

import errno
import fcntl
import os
import pickle
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver

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
from errors import DataError, one_line
from tests.test_checkpoint import Run, build  # noqa: F401  (a fixture)
from training.run_folder import lock_folder, resume


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
def test_a_damaged_checkpoint_is_named(build, tmp_path, caplog, monkeypatch, harm, said):  # noqa: F811
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


def test_with_only_damaged_checkpoints_nothing_starts_over(build, tmp_path):  # noqa: F811
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


def test_checkpoints_are_read_and_pruned_without_locks(build, tmp_path, caplog, monkeypatch):  # noqa: F811
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


def test_links_and_strangers_among_checkpoints_are_left_alone(build, tmp_path, caplog):  # noqa: F811
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


def test_a_rollback_removes_what_a_process_reads(build, tmp_path):  # noqa: F811
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
def test_a_checkpoint_that_may_not_be_read_is_not_set_aside(build, tmp_path, monkeypatch, name):  # noqa: F811
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
