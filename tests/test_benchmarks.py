"""Benchmarks at their smallest size: each can be imported, and those that need no data print their table."""

import importlib
import json
import os
import runpy
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.results_file import FOLDER_VARIABLE
from tests.planned import run_main
from tests.started_jobs import ROOT, run_program

SCRIPTS = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem != "__init__")
SHORT = '--more "--data.train_period=[\\"2001-01-01\\",\\"2001-03-01\\"] --training.steps=3 --model.dim=16"'
SHORTER = SHORT[:-1] + ' --data.validation_period=[\\"2001-03-05\\",\\"2001-03-14\\"]"'
# A command, words of its last line, and its exit codes: 1 where a limit is asked for.
RUNS = [
    ("planner_published", "llama3-405b 256k", (0,)),
    ("trainer_overhead --steps 4", "at least 2 are needed", (2,)),
    ("significance --draws 50", "365", (0, 1)),
    ("verification_speed --dates 2", "at least 4 are needed", (2,)),
]
SLOW = [
    ("layout_parity --optimizers few --ranks 1 2", "Muon: 2 layouts", (0,)),
    ("layout_parity 'fsdp 2, zero-2'", "formulas in 1 of the 1", (0,)),
    ("trainer_overhead saves --rounds 1 --dim 64", "async_with_pinned_mem", (0, 1)),
    ("chaos cycles --seed 10 --events 2", "seconds", (0,)),
    ("loader --quick --rounds=1", "6 x 91 x 180", (0,)),
    ("attack --cases 12 --kind keys", " s", (0,)),
    ("attack sources --seeds 2", " s", (0,)),
    ("attack scores --seeds 2", " s", (0,)),
    ("verification_speed --dates 4 --levels 1", "memory from 1 to 4", (0, 1)),
    ("trainer_overhead --rounds=1 --steps=20 --dim=24", "asked", (0, 1)),
    (f"skill windows --seeds=1 --task=simulated {SHORTER}", "strips", (0,)),
]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_benchmark_can_be_imported(name: str) -> None:
    assert importlib.import_module(f"benchmarks.{name}").__doc__


def check_output(done: Any, last: str, codes: tuple[int, ...]) -> None:
    assert done.returncode in codes, done.stderr
    lines = (done.stdout if done.returncode != 2 else done.stderr).splitlines()
    assert last in lines[-1] and (done.returncode != 2 or len(lines) == 1)


@pytest.mark.parametrize(("run", "last", "codes"), RUNS)
def test_a_small_run_prints_its_table(tmp_path, monkeypatch, run: str, last: str, codes) -> None:
    """In this process."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    name, *words = shlex.split(run)
    main: Any = partial(runpy.run_path, str(ROOT / f"benchmarks/{name}.py"), run_name="__main__")
    check_output(run_main(main, *words), last, codes)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("run", "last", "codes"), SLOW)
def test_a_longer_run_prints_its_table(tmp_path, run: str, last: str, codes) -> None:
    name, *words = shlex.split(run)
    environment = {**os.environ, FOLDER_VARIABLE: str(tmp_path), "OMP_NUM_THREADS": "1"}
    how: Any = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True, "timeout": 850}
    done = subprocess.run([sys.executable, f"benchmarks/{name}.py", *words], check=False, **how)
    check_output(done, last, codes)


def test_the_steps_that_are_compared_can_be_taken(one_rank) -> None:
    """Those of step_time.py need the tutorial's code, and minutes."""
    from benchmarks.step_time import STEPS, build_rossby

    build_rossby("", 64, "float32")
    losses = [STEPS["rossby, sdpa"]() for _ in range(2)]
    assert losses[1] < losses[0]


# -- several ranks


@pytest.mark.slow
def test_a_rehearsal_on_two_ranks_ends_in_its_table(tmp_path: Path) -> None:
    done = run_program("benchmarks/cluster.sh", "--rehearse", OUT=str(tmp_path), NGPU="2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "layouts against one process, 0 out of tolerance" in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "cluster.jsonl").read_text().splitlines()]
    assert {row["part"] for row in rows} == {"parity", "links", "scaling"}
    assert not [row for row in rows if "failed" in row]
