"""Faults of a run, provoked: the report of each, without other output."""

import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.parity import Layout, SmallRun, replicate, tp
from tests.started_jobs import ROOT, run_options, run_program, small_dataset, small_wave, write_config
from tests.test_first_start import small  # noqa: F401  (a fixture)
from training.bad_steps import Fingerprints, ReplicasDiverged, sum_of_bits

LARGE = ["--model.dim", "128", "--model.patch_size", "[1,1]", "--training.local_batch_size", "256"]
USUAL = re.compile(r"rank +\d: \w+ \d$|[\d:]+  (2 ranks|train: |[\d.]+ M parameters, |step +\d+/|saved )")
QUICK = ["--comm.train_timeout_seconds", "5"]


def drill(folder: Path, misfortune: str, *options: str) -> tuple[int, list[str]]:
    """Exit code of two ranks that meet with it, and what they say beyond the lines of a run that is well."""
    program = ["tests/drilled_rank.py", misfortune] if misfortune else ["train.py"]
    command = [sys.executable, "-m", "jobs.torchrun", "--nproc-per-node", "2", *program]
    config_file = write_config(folder, small_dataset({"10m_u_component_of_wind": small_wave(300)}))
    command += run_options(config_file, folder / "run", *options)
    ended = run_program(*command, PYTHONPATH=str(ROOT), TORCH_CPP_LOG_LEVEL="ERROR")
    lines = [line for line in ended.stderr.splitlines() if line and not USUAL.match(line)]
    return ended.returncode, lines


def test_replicas_that_diverge(tmp_path):
    """Compared before the save of step 8, which is not made."""
    options = ["--parallelism.data_parallel_replicate_degree", "2"]
    options += ["--checkpoint.interval", "4", "--checkpoint.async_mode", "disabled"]
    code, said = drill(tmp_path, "flip_a_bit", *options)
    assert code == 1 and len(said) == 1, said
    assert said[0].startswith("rossby: step 8: replicas have diverged: rank 0 ("), said
    assert ", rank 1 (" in said[0] and "have different bits in blocks.1.mlp.up.weight;" in said[0]
    assert "all were alike after step 4" in said[0]
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == ["step-00000004"]


@pytest.mark.slow
def test_memory_that_runs_out(tmp_path):
    code, said = drill(tmp_path, "run_out_of_memory", *LARGE, "--training.steps", "9")
    assert code == 1 and len(said) == 1, said
    assert said[0].startswith("rossby: rank 1 (") and "in step 1, train: out of memory" in said[0]
    assert "the planner expects a peak of 0.22 GiB a rank" in said[0] and "activations 0.19 GiB" in said[0]
    changes = ("training.mixed_precision_param", "training.local_batch_size 128", "activation_checkpoint")
    assert all(change in said[0] for change in changes), said


@pytest.mark.slow
def test_ranks_that_call_different_collectives(tmp_path):
    code, said = drill(tmp_path, "call_another_collective", *QUICK)
    assert code == 1 and len(said) == 1, said
    assert "in step 7" in said[0] and "every rank waits for others" in said[0]
    assert {path.name for path in (tmp_path / "run/hang").iterdir()} >= {"rank-0.txt", "rank-1.txt"}
    stacks = [(tmp_path / f"run/hang/rank-{rank}.txt").read_text() for rank in range(2)]
    assert "all_reduce" in stacks[1] and "call_another_collective" in stacks[1]


@pytest.mark.slow  # the last save is tried again for half a minute
def test_a_full_disk(tmp_path, small):  # noqa: F811
    """1 MB, as a store that is mounted and has no more room shows itself."""
    folder = tmp_path / "run/checkpoints"
    folder.parent.mkdir()
    folder.symlink_to(small)
    code, said = drill(tmp_path, "", "--training.steps", "9", "--model.dim", "64")
    assert code == 1 and "could not be written" in said[-1] and "No space left on device" in said[-1]
    assert "1 MB free in " in said[-1] and "a checkpoint takes 1 MB" in said[-1], said
    assert not any("RuntimeError" in line for line in said), said


@pytest.mark.parametrize(
    ("name", "code"), [("SIGTERM", 75), pytest.param("SIGSTOP", 1, marks=pytest.mark.slow)]
)
def test_rank_0_ends_in_the_last_plots(tmp_path, name, code):
    """Rank 1, which waits for it in a barrier, was named, with a traceback."""
    seconds = "30" if code == 75 else "8"
    limits = ["--comm.timeout_seconds", seconds, "--comm.train_timeout_seconds", seconds]
    ended, said = drill(tmp_path, name, "--training.steps", "2", *limits)
    lines = [line for line in said if line.startswith("rossby:")]
    assert ended == code and len(lines) == 1 and not any("Traceback" in line for line in said), said
    assert lines[0].startswith("rossby: SIGTERM on rank 0" if code == 75 else "rossby: rank 0 ("), said


# -- what the diagnoses are made of


def test_a_fingerprint_knows_every_bit():
    numbers = torch.randn(7, 5)
    for changed in range(numbers.numel()):
        other = numbers.clone()
        other.view(-1).view(torch.int32)[changed] ^= 1 << (changed % 32)
        assert sum_of_bits(other) != sum_of_bits(numbers)
    assert sum_of_bits(numbers[1:]) == sum_of_bits(numbers[1:].clone())  # wherever it lies in memory
    halves = numbers.bfloat16()
    assert sum_of_bits(halves) == sum_of_bits(halves.clone()) != sum_of_bits(numbers)


def check_parts(layout: Layout) -> list[str]:
    """The parts that a rank holds; its replicas hold them alike, until a bit of one is another."""
    fingerprints = Fingerprints(SmallRun(layout).model)
    fingerprints.compare(100, saves=False)
    if dist.get_rank() == 1:
        first = next(iter(next(iter(fingerprints.shards.values())).values())).detach()
        local = first.to_local() if isinstance(first, DTensor) else first
        local.view(-1).view(torch.int32)[0] ^= 1
    with pytest.raises(ReplicasDiverged, match=r"replicas have diverged: rank"):
        fingerprints.compare(200, saves=False)
    return sorted(fingerprints.shards)


@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        (replicate(4), [["stage 0"]] * 4),
        (replicate(2), [["stage 0, fsdp 0"], ["stage 0, fsdp 1"]] * 2),
        (replicate(2) | tp(2), [["stage 0", "stage 0, tp 0"], ["stage 0", "stage 0, tp 1"]] * 2),
    ],
    ids=["replicas", "HSDP", "replicas x tp"],
)
def test_ranks_compare_what_they_hold_alike(ranks, layout, parts):
    assert ranks(4).run(check_parts, Layout(4, layout)) == parts
