"""Named machines: names, users' files, shared cores; costs in closed form and by a simulation."""

import math
import random
import re
import statistics
from pathlib import Path

import pytest

from config import Checkpoint
from planning import clusters
from planning.clusters import all_machines, load_cluster
from planning.cost import HOUR, checkpoint_storage, expected_time, fleets

NAMES = list(all_machines())


def write(folder: Path, text: str) -> list[Path]:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return [path]


def test_a_name_alone_is_a_node() -> None:
    assert [load_cluster(name).devices for name in ("a100", "a100-40", "cpu")] == [8, 4, 2]
    assert all(load_cluster(name).nodes == 1 for name in NAMES)
    cluster = load_cluster("a100x64")
    assert (cluster.devices, cluster.nodes, cluster.with_devices(12).nodes) == (64, 8, 2)
    with pytest.raises(ValueError, match="give at least 1"):
        cluster.with_devices(0)


@pytest.mark.parametrize("name", NAMES)
def test_machines_are_plausible(name: str) -> None:
    """Nothing measured lies above its peak, and what costs less per device is not the dearer kind."""
    cluster = load_cluster(name)
    device = cluster.device
    assert all(device.matmul[key] <= device.peak[key] for key in device.peak)
    assert set(device.matmul) == set(device.peak) >= {"bf16", "fp32"}
    assert set(device.attention_forward) == set(device.attention_backward) == {64, 128}
    assert all(rate < device.peak["bf16"] for rate in device.attention_forward.values())
    assert all(device.attention_backward[e] <= device.attention_forward[e] for e in (64, 128))
    assert device.reserved < device.memory / 5
    assert cluster.spot < cluster.on_demand
    assert cluster.inside.latency <= cluster.between.latency


def test_ranks_divide_a_cpu() -> None:
    one, two = load_cluster("cpu1"), load_cluster("cpu2")
    assert one.device.matmul["fp32"] == 2 * two.device.matmul["fp32"]
    assert one.device.memory == 2 * two.device.memory
    assert one.on_demand == 2 * two.on_demand
    assert one.device.reserved == two.device.reserved  # a process costs what it costs
    assert load_cluster("cpu4").device == two.device  # on a second node
    assert one.with_devices(2) == two


@pytest.mark.parametrize(
    ("flags", "machine"), [("avx2 amx_tile avx512_bf16", "cpu"), ("avx512_bf16", "cpu-epyc"), ("avx2", "cpu")]
)
def test_a_cpu_is_known_by_its_products_in_bf16(monkeypatch, tmp_path: Path, flags: str, machine: str):
    (tmp_path / "cpuinfo").write_text(f"flags : {flags}\n")
    monkeypatch.setattr(clusters, "CPUINFO", tmp_path / "cpuinfo")
    assert clusters.machine_known_as("cpu") == machine


def test_files_change_machines_and_add_some(tmp_path: Path) -> None:
    changed = "[a100]\non_demand = 2\npeak = { bf16 = 300e12, fp32 = 150e12 }\n"
    cluster = load_cluster("a100x64", write(tmp_path, changed))
    assert (cluster.on_demand, cluster.device.peak["bf16"], cluster.spot) == (2, 300e12, 1.23)
    added = '[juwels]\nlike = "a100-40"\nbetween = { latency = 1e-5, bandwidth = 80e9 }\n'
    cluster = load_cluster("juwelsx32", write(tmp_path, added))
    assert (cluster.nodes, cluster.between.bandwidth) == (8, 80e9)
    assert cluster.device.memory == load_cluster("a100-40").device.memory
    measured = load_cluster("a100", write(tmp_path, "[a100]\nstorage = 8e9\nspot = 1.1 # assumed\n"))
    assert measured.assumed == ["spot", *(key for key in load_cluster("a100").assumed if key != "storage")]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("h10x64", "did you mean h100?"),
        ("a100x0", "give at least 1"),
        ("a100x99999999999999", "at most 1,000,000 devices"),
        ("zz", "valid: a100, a100-8hdr, a100-40, a100-80, h100, h200, b200, cpu"),
        ("", "no such machine"),
        ("[a100]\non_demnd = 3\n", "a100.on_demnd = 3: no such key; did you mean on_demand?"),
        ("[a100]\nmemory = -1\n", "a100.memory = -1: give a positive number"),
        ("[a100]\nmemory = inf\n", "give a positive number"),
        ("[a100]\npeak = { bf15 = 1e12 }\n", "a table of positive numbers with the keys bf16, fp32"),
        ("[a100]\ninside = { latency = 1e-6 }\n", "with the keys latency, bandwidth"),
        ("[a100]\nknown_as = 3\n", "give a list"),
        ("[a100]\nattention_forward = { bf16 = 1e14 }\n", "with the keys of head sizes"),
        ("[a100]\ninside = { latency = 1e-6, bandwidth = 1e9, fp8 = 1 }\n", "keys latency, bandwidth"),
        ('[mine]\nlike = "a10"\n', "mine.like = 'a10': no such machine"),
        ("[mine]\nmemory = 8e9\n", "[mine] is not complete; add reserved, peak"),
        ("spot = 3\n", "is outside a machine"),
        ("[a100\n", "give a TOML file"),
    ],
)
def test_wrong_names_and_files_end_in_one_line(tmp_path: Path, name: str, said: str) -> None:
    """A name, or the text of a file."""
    is_text = "\n" in name
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        load_cluster("a100", write(tmp_path, name)) if is_text else load_cluster(name)
    assert "\n" not in str(error.value) and str(error.value).startswith("--clusters ") >= is_text


# -- cost


def simulate(work: float, interval: float, rate: float, restart: float, generator: random.Random) -> float:
    """Seconds of one run, event by event: an independent account of the same process."""
    now, done, next_preemption = 0.0, 0.0, generator.expovariate(rate)
    while done < work:
        target = min(done + interval, work)
        if now + target - done <= next_preemption:
            now, done = now + target - done, target
            continue
        now = next_preemption
        while True:  # restarts, which may be preempted too
            next_preemption = now + generator.expovariate(rate)
            if now + restart <= next_preemption:
                now += restart
                break
            now = next_preemption
    return now


@pytest.mark.parametrize(
    ("interval", "rate", "restart"), [(64.0, 1e-3, 40.0), (256.0, 4e-3, 128.0), (500.0, 2e-3, 0.0)]
)
def test_expected_time_is_the_mean_of_simulated_runs(interval: float, rate: float, restart: float) -> None:
    generator, work = random.Random(0), 2048.0
    runs = [simulate(work, interval, rate, restart, generator) for _ in range(4000)]
    error = statistics.stdev(runs) / math.sqrt(len(runs))
    assert abs(statistics.mean(runs) - expected_time(work, interval, rate, restart)) < 4 * error


def test_runs_that_nothing_interrupts_or_that_hardly_end() -> None:
    """Shorter than its interval, or without saves: (e^(rate s) - 1)/rate. Thousands of preemptions between
    two saves: no overflow, and no number that looks like an answer.
    """
    assert expected_time(1000.0, 300.0, rate=0.0) == 1000.0 and expected_time(0.0, 60.0, rate=1e-4) == 0.0
    for interval in (1e9, math.inf):
        alone = expected_time(5e3, interval, rate=1e-4, restart=0.0)
        assert alone == pytest.approx(math.expm1(0.5) / 1e-4)
    assert expected_time(1e7, 1e6, rate=1e-2) == math.inf


def test_fleets_of_a_cluster() -> None:
    """419 interruptions of 2,048 nodes in 54 days (Llama 3, section 3.3.4): 8 nodes, a year, 11 of them."""
    cluster = load_cluster("a100x64")
    found = fleets(cluster)
    assert list(found) == ["on demand", "spot"]
    assert found["spot"].dollars_an_hour == pytest.approx(64 * 1.23)
    taken_away = found["spot"].rate - found["on demand"].rate
    assert taken_away * HOUR == pytest.approx(8 * cluster.spot_interruptions)
    year = 365 * 24 * HOUR
    assert found["on demand"].rate * year == pytest.approx(419 / 2048 / 54 * 365 * 8, rel=0.02)


def test_storage() -> None:
    assert checkpoint_storage(100, Checkpoint(keep_latest_k=1, keep_best="val/loss"), 10_000) == 300
    assert checkpoint_storage(100, Checkpoint(keep_latest_k=5, interval=500), 10_000) == 600
    assert checkpoint_storage(100, Checkpoint(keep_latest_k=5, interval=500), 1_000) == 200
    assert checkpoint_storage(100, Checkpoint(keep_latest_k=0, interval=500), 1_001) == 300
