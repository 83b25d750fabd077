"""Published runs by machine and framework, what copying a neighbour gives, and bands beside every time."""

import re
from functools import cache

import pytest

from benchmarks.planner_published import (
    LanguageModel,
    bands,
    bands_toml,
    distance,
    judged_runs,
    summaries,
    table,
)
from parallelisms.degrees import Degrees
from planning.anchor import KINDS
from planning.architecture import Architecture
from planning.clusters import load_cluster
from planning.error_bands import ANCHORED, BANDS, CALIBRATED, band_line, band_of, classes_of, error_bands
from planning.workload import Workload
from tests.test_plan import plan

VIT = Architecture(4096, 1536, 48, 24, 6144, 8704, 8704)
WORDS = LanguageModel(4096, 1536, 48, 24, 6144, 0, 32_000, vocabulary=32_000)
A100, H100 = load_cluster("a100x8"), load_cluster("h100x8")


@cache
def rows():
    return judged_runs()


def test_runs_held_out_are_of_all_kinds_of_layout():
    held = [row for row in rows() if row["group"] == "held out"]
    assert len(held) >= 25
    assert {row["layout"] for row in held} == set(KINDS)
    assert {"vision transformers", "long context"} <= {kind for row in held for kind in row["classes"]}
    assert {row["group"] for row in rows()} <= {"seen", "term", "held out"}
    assert all(row["source"].startswith(("https://", "mission.md")) for row in rows())
    figures = [(row["what"], row["published"]) for row in rows()]
    assert len(set(figures)) == len(figures)  # none is in two groups


def test_a_neighbour_is_seen_and_near():
    seen = [row for row in rows() if row["group"] != "held out"]
    for row in rows():
        others = [other for other in seen if other is not row]
        nearest = min(others, key=lambda other: distance(row, other))
        assert row["neighbour"] == nearest["what"]
        # What the neighbour's share of its peak would have given of this run's rate, by hand.
        shares = [run["mfu"] / (1 + run["error"]) for run in (nearest, row)]
        assert row["neighbour_error"] == pytest.approx(shares[0] / shares[1] - 1)


def test_tables_print_neighbours_groups_and_bands():
    text = table(rows()) + summaries(rows())
    assert re.search(r"planned +unit +error +copied +group", text)
    assert text.count("held out") >= 11 and "copied from the nearest" in text and "Megatron, h100" in text


def test_bands_are_those_of_the_published_runs():
    """The committed file is what the benchmark writes."""
    assert BANDS.read_text(encoding="utf-8") == bands_toml(rows())
    assert error_bands() == bands(rows())
    named = {"language models on A100", "PyTorch on H100", "tensor parallel", "long context"}
    named |= {ANCHORED + kind for kind in KINDS}
    assert set(error_bands()) == named | {"vision transformers", CALIBRATED}
    for row in (row for row in rows() if row["group"] != "held out"):
        for kind in row["classes"]:
            band = error_bands()[kind]
            assert band.fastest - 1e-3 <= 1 + row["error"] <= band.slowest + 1e-3


@pytest.mark.parametrize(
    ("model", "cluster", "degrees", "classes"),
    [
        (VIT, A100, Degrees(dp_shard=8), ["vision transformers"]),
        (VIT, H100, Degrees(dp_shard=4, tp=2), ["vision transformers", "tensor parallel"]),
        (VIT, A100, Degrees(cp=8), ["vision transformers", "long context"]),
        (WORDS, A100, Degrees(dp_shard=8), ["language models on A100"]),
        (WORDS, H100, Degrees(dp_shard=8), ["PyTorch on H100"]),
        (WORDS, H100, Degrees(cp=2, tp=4), ["long context", "tensor parallel"]),
        (VIT, load_cluster("cpu2"), Degrees(dp_shard=2), []),
    ],
)
def test_classes(model, cluster, degrees, classes):
    work = Workload(model, degrees, 1, degrees.dp)
    assert classes_of(work, cluster) == classes
    band = band_of(work, cluster)
    if not classes:
        assert band is None and "unknown" in band_line(work, cluster, 1.0)
        return
    widest = [error_bands()[kind] for kind in classes]
    assert band and band.fastest == min(b.fastest for b in widest)
    assert band.around(10.0) == (10 * band.fastest, 10 * max(b.slowest for b in widest))


def test_every_predicted_time_has_its_band():
    text = plan("--cluster", "a100x64", "--layout", "auto")
    assert "band s" in text and "error band: " in text and "of vision transformers" in text
    rows = [line for line in text.splitlines() if re.match(r" +\d+ (dp_|pp )", line)]
    assert len(rows) == 10 and all(re.search(r"\d\.\d-\d+\.\d", line) for line in rows)
