"""benchmarks/cluster.sh, rehearsed, and its table."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cluster import table
from tests.started_jobs import ROOT


@pytest.mark.slow
def test_a_rehearsal_on_two_ranks_ends_in_its_table(tmp_path: Path) -> None:
    environment = os.environ | {"OUT": str(tmp_path), "NGPU": "2", "ROSSBY_PYTHON": sys.executable}
    command = ["benchmarks/cluster.sh", "--rehearse"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "layouts against one process, 0 out of tolerance" in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "cluster.jsonl").read_text().splitlines()]
    assert {row["part"] for row in rows} == {"parity", "links", "scaling"}
    assert not [row for row in rows if "failed" in row]


def test_the_table_has_efficiency_beside_the_best_of_the_fewest_ranks(tmp_path: Path) -> None:
    common = {"run": "now", "part": "scaling", "kinds": ["weak"], "what": "", "planned": 10.0}
    rows = [
        {**common, "ranks": 1, "layout": "one", "samples_per_second": 8.0},
        {**common, "ranks": 2, "layout": "shard 2", "samples_per_second": 12.0},
        {**common, "run": "before", "ranks": 1, "layout": "one", "samples_per_second": 99.0},
        {"run": "now", "part": "parity", "what": "tp 2", "good": False},
        {"run": "now", "part": "parity", "what": "ring 2", "failed": "RuntimeError: no"},
    ]
    path = tmp_path / "cluster.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = table(path, "now")
    assert "1 layouts against one process, 1 out of tolerance\nout of tolerance: tp 2" in text
    (line,) = [line for line in text.splitlines() if "shard 2" in line]
    assert line.split()[-2:] == ["-17%", "75.0%"]
    assert "failed: parity, ring 2: RuntimeError: no" in text
