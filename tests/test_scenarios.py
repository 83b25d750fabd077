"""The mission's figures, computed; the decision table of docs/planning.md; published runs."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from benchmarks.planner_published import published_runs, workload
from parallelisms.degrees import Degrees
from planning.case_study import case_study_rows, runs
from planning.clusters import load_cluster
from planning.compute import block_seconds
from planning.scenarios import (
    TEXTBOOK_LAYOUT,
    Decision,
    cells,
    decisions,
    kind,
    llama,
    scenario_table,
    scenario_tables,
    textbook_rows,
    tutorial_rows,
)
from planning.search import best_layouts
from planning.step_time import spread, step_time

ROOT = Path(__file__).parent.parent


@cache
def all_scenarios() -> str:
    return scenario_tables("all")


def named(rows: str) -> dict[str, str]:
    """The computed figures; by source figure, too, where a name stands several times."""
    return {f"{what.strip()}: {source}": computed for what, source, computed, _ in cells(rows)}


def computed(rows: str, name: str) -> float:
    found = re.search(r"[\d,.]+", named(rows)[name])
    assert found, name
    return float(found[0].replace(",", ""))


@pytest.mark.parametrize(
    "name, value, within",
    [
        ("ring, n = 8, 10 us, 600 GB/s, 2.4 GB: 7.0 ms", 7.0, 0.15),
        ("n = 64, 50 us, 25 GB/s: 195 ms", 195, 1),
        ("efficiency if nothing is hidden: 83 %", 83, 1),
        ("50 epochs at 44/s: 110 hours", 110, 1),
        ("50 epochs at 0.85/s: 238 days", 238, 1),
        ("on demand, 110 h x 64 x $3.50: $24,640", 24_640, 0),
        ("in all: $10,775", 10_775, 1),
        ("scores of a layer, batch 4: 3.2 GB", 3.2, 0.05),
        ("50 epochs at 6.4/s: 3.7 days", 31.6, 0.1),  # a contradiction: what is true
        ("500 steps between checkpoints: 35 min", 9.7, 0.1),
        ("fp32 weights and Adam: 12 GB", 16.6, 0.1),
        ("data in float32: 200 TB", 50, 0.5),
    ],
)
def test_figures_of_the_case_study(name, value, within):
    assert computed(case_study_rows(), name) == pytest.approx(value, abs=within)


def test_figures_of_the_tutorial_and_the_textbook():
    tutorial, textbook = tutorial_rows(), textbook_rows()
    assert computed(tutorial, "large model on one GPU: 54 GB") > 40.8
    assert named(tutorial)["on 40 GB: out of memory"] == "does not fit"
    assert computed(tutorial, "tensor parallel 4: 38 GB") < 40
    assert computed(textbook, "together: 84 GB") == 84
    assert computed(textbook, "Llama-3-70B on 64 A100: states: 840 GB") == pytest.approx(840, rel=0.01)


def test_every_figure_of_the_mission_has_a_row():
    """The sources' figures that sections 2 to 4 of the mission print, one by one."""
    text = all_scenarios()
    for figure in """4.8 GB|9.6 GB|52 GB|71 GB|2.4 GB|26 GB|45 GB|3.8 GB|15 GB|34 GB|3.2 GB|0.85/s|6.4/s|44/s
        238 days|3,072|80 %|110 hours|7.0 ms|195 ms|1.18 s|0.9 s|83 %|3e-4|2.4e-3|0.1152|0.01|5-10 %|$24,640
        $3,080|$7,577|$118|$10,775|3.21|3.45|3.12|256, 4,096|8.8|12|37.5|42|54 GB|38 GB|72|51|0.13|16 x|35 %
        84 GB|14 GB|56 GB|840 GB|2^16|2,000|x 0.5|90 %|30 min|sqrt(L)|1,000 steps""".replace("\n", "|").split(
        "|"
    ):
        assert figure.strip() in text, figure
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize(
    "number, source, true",
    [
        (1, "4,096", "8,192"),
        (2, "1.2 B", "1.39 B"),
        (3, "200 TB", "50 TB"),
        (4, "17", "16"),
        (5, "96 %", "94%"),
        (5, "3.7 days", "31.6 days"),
        (6, "12 GB", "16.6 GB"),
        (7, "35 min", "9.7 h"),
        (8, '3.21 "hPa"', "315 m2 s-2"),
        (9, "5-10 %", "35%"),
        (10, "1.18 s", "9.4 s"),
        (10, "16.5 %", "2.1%"),
        (11, "does not fit", "fits"),
        (12, "4.5 GB", "11.8 GB"),
        (13, "$900,000", "$9.0 M"),
        (13, "7 x", "2.3 x"),
        (14, "80 %", "81%"),
        (14, "80 %", "95%"),
        (15, "35 TB", "25 TB"),
    ],
)
def test_each_contradiction_of_the_mission_is_printed(number, source, true):
    """Section 6: both figures on one line, which names the number."""
    lines = [line for line in all_scenarios().splitlines() if f"({number})" in line]
    assert any(source in line and true in line.partition(source)[2] for line in lines), lines


@pytest.mark.parametrize("name", ["case_study", "scenarios"])
def test_no_result_of_a_scenario_is_typed_in(name):
    """The third cell of every row is computed, or "-"; no percentage stands in a remark."""
    tree = ast.parse((ROOT / "planning" / f"{name}.py").read_text(encoding="utf-8"))
    rows = []
    for node in (n for n in ast.walk(tree) if isinstance(n, ast.JoinedStr)):
        parts = (str(p.value) if isinstance(p, ast.Constant) else "{}" for p in node.values)
        rows += [line.split("|") for line in "".join(parts).splitlines() if line.count("|") >= 3]
    assert len(rows) > 20
    for what, _, result, remark in rows:
        assert "{}" in result or result.strip() == "-", f"{what}: {result}"
        assert not re.search(r"\d ?%", remark), f"{what}: {remark}"


def test_the_case_study_compares_one_setting():
    """Its 1, 8 and 64 GPUs: checkpointed every 7 blocks, bf16, fused attention; batches 8, 8 and 12 x 4."""
    works = runs()
    assert {(w.ac_mode, w.every_n, w.dtype, w.attention) for w in works} == {
        ("every_n_blocks", 7, "bfloat16", "sdpa")
    }
    assert [(w.local_batch, w.accumulation, w.degrees.world) for w in works] == [
        (8, 1, 1),
        (8, 1, 8),
        (12, 4, 64),
    ]
    published = [workload(run, model) for run, model in published_runs() if run["model"] == "case-study"]
    assert [(w.local_batch, w.ac_mode, w.every_n) for w in published] == [
        (w.local_batch, w.ac_mode, w.every_n) for w in works
    ]


@pytest.mark.parametrize("decision", decisions(), ids=lambda d: d.job)
def test_the_decision_table_is_what_the_search_finds(decision: Decision):
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith(f"| {decision.job} |")]
    best = best_layouts(decision.work, load_cluster(decision.cluster), number=1)[0].work
    assert kind(best.degrees) == decision.kind and f"| {decision.kind} |" in row


def test_the_layout_of_the_textbook_is_among_the_best():
    """Within a sixth of the best where each GPU has its own link between nodes."""
    found = best_layouts(llama(), load_cluster("a100-8hdrx64"), number=99)
    (made,) = [p for p in found if p.work.degrees == TEXTBOOK_LAYOUT]
    assert made.time.total < 7 / 6 * found[0].time.total


def test_several_devices_wait_for_the_slowest_and_collectives_take_their_share():
    work, cluster = llama(), load_cluster("a100-8hdrx64")
    time = step_time(work, cluster)
    waits = ("exposed", "bubble", "host", "stragglers")
    busy = sum(v for k, v in time.classes.items() if not k.startswith(waits))
    assert time.classes["stragglers"] == pytest.approx((spread(64) - 1) * busy)
    assert 0 < time.classes["slowed by collectives"] < 0.25 * time.communication
    assert "stragglers" not in step_time(work.replace(degrees=Degrees()), cluster.with_devices(1)).classes


def test_float8_is_faster_and_pays_for_its_casts():
    rates = load_cluster("h100x8").rates
    work = llama()
    half, eighth = (block_seconds(work.replace(float8=on), rates, False) for on in (False, True))
    assert eighth["matmul"] < 0.6 * half["matmul"] and "float8 casts" not in half
    assert sum(eighth.values()) < sum(half.values())


def test_a_scenario_that_does_not_exist():
    line = [sys.executable, "plan.py", "--scenario", "casestudy"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "case_study" in done.stderr
    with pytest.raises(ValueError, match="no such scenario"):
        scenario_tables("none")


def test_long_remarks_wrap():
    assert len(scenario_table("t", "a | 1 | 2 | " + "word " * 20).splitlines()) > 3
