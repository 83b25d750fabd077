"""What data cost, and whether they come as fast as a run eats them, beside sums done by hand."""

import dataclasses
import re
import sys

import pytest

from errors import ConfigError
from planning import data_costs
from planning.clusters import load_cluster
from planning.data_costs import DataSet, bytes_of, load_inputs, table
from planning.data_feed import feed_table, needs, read_rate
from planning.workload import workload_of
from tests.planned import ROOT
from training.config_checks import load_checked

H200, LIMIT = load_cluster("h200x64"), 64 * 11.9  # samples/s at 4,096 tokens, at the compute limit


@pytest.fixture
def vit(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "64")
    config = load_checked(["--job.config_file", str(ROOT / "train_configs/vit1b_4096.toml")])
    return config, workload_of(config, 64, (1024, 2048), 17)


def test_64_h200_at_the_compute_limit(vit):
    """217 GB/s decoded; 1,523 states/s of 7 arrays; two states a sample; 8 nodes."""
    config, work = vit
    assert read_rate(work, LIMIT) == pytest.approx(217e9, rel=0.005)
    found = {need.what: need for need in needs(work, LIMIT, H200, from_url=True)}
    assert found["requests/s of the store"].needed == pytest.approx(7 * 2 * LIMIT)
    assert found["GB/s a node"].needed == pytest.approx(0.72 * 217.2 / 8, rel=0.005)
    assert found["cores a GPU"].needed == pytest.approx(217.2 / 64 / 2.6, rel=0.005)
    assert found["cores a GPU"].there == 112 / 8 - 2
    text = feed_table(work, config.data, LIMIT, H200)
    assert "first that does not suffice: GB/s of the store, 6.3 times too few: TOO SLOW" in text


def test_what_does_not_suffice_is_named(vit):
    config, work = vit
    local = dataclasses.replace(config.data, path="data.zarr")
    assert "first that does not suffice: GB/s a node, 2.0 times" in feed_table(work, local, LIMIT, H200)
    few_cores = dataclasses.replace(H200, cores=18, storage=1e12)
    assert "first that does not suffice: cores a GPU, 5.2 times" in feed_table(work, local, LIMIT, few_cores)
    fast = dataclasses.replace(H200, storage=1e12)
    assert "all suffice; the first to end would be cores a GPU, at 9.2 times" in feed_table(
        work, local, LIMIT, fast
    )
    unknown = dataclasses.replace(fast, cores=0)
    assert "cores" not in feed_table(work, local, LIMIT, unknown)


def test_fields_in_memory_are_not_read_again(vit):
    config, work = vit
    kept = dataclasses.replace(config.data, cache_gib=float("inf"))
    assert "from memory" in feed_table(work, kept, LIMIT, H200)


def test_sizes_by_hand():
    """64 x 32 cells of 4 bytes, 52 levels and 4 surfaces, 5,844 dates."""
    data = DataSet(**load_inputs()["data"]["64 x 32: era5_64x32.toml"])
    assert data.decoded == 64 * 32 * 4 * 56 * 5844 == bytes_of((32, 64), 56, 5844)
    assert data.requests == 8 * 59 and data.kept_bytes == 64 * 32 * 4 * 16 * 5844
    last = DataSet(**load_inputs()["data"]["1024 x 2048, 1979-2018, from 0.25"])
    assert last.kept_bytes == 1024 * 2048 * 4 * 17 * 58440


def test_own_prices(tmp_path, monkeypatch, capsys):
    path = tmp_path / "mine.toml"
    path.write_text("[prices]\negress = 0.01\n[rates]\nmine = 1e9\n")
    text = table(load_inputs(str(path)))
    assert "mine" in text and re.search(r"1\.5 degrees.* 3\.37 ", text)
    wrong = ["[price]\negress = 1", "[prices]\negres = 1", "[prices]\negress = -1"]
    for text in [*wrong, "[prices", "[data.x]\na = 1"]:
        path.write_text(text)
        with pytest.raises(ConfigError, match=f"--inputs {path}: "):
            load_inputs(str(path))
    monkeypatch.setattr(sys, "argv", ["data_costs.py", "--input", "x"])
    with pytest.raises(SystemExit) as ended:
        data_costs.main()
    assert ended.value.code == 2 and "--input: not an option" in capsys.readouterr().err


def test_the_page_shows_what_the_command_prints():
    assert table(load_inputs()) in (ROOT / "docs/data.md").read_text()
