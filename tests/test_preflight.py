"""jobs/preflight.py finds what is wrong, names it and its fix: real disks, stores and cables, made small."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

from command_line import load_config
from config import Config
from errors import BAD_INPUT
from jobs import host_checks, run_checks
from jobs.host_checks import Facts, alike_row, clocks_row, files_row, shm_row, speed_row
from jobs.link_checks import PairSample, pair_rounds, pairs_row
from jobs.meeting_checks import Place, interface_rows, reach_rows
from jobs.preflight import preflight
from jobs.run_checks import HostRates, cluster_here, missing_dates, period_row, planned, save_rows
from jobs.verdicts import FAIL, PASS, WARN, Row, joined, table
from planning.clusters import load_cluster
from planning.hardware import Cluster
from tests.started_jobs import ROOT, write_config

HOUR = np.timedelta64(1, "h")
SIX = 6 * HOUR


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NGPU", "NNODES", "WORLD_SIZE", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(run_checks, "READ_FOR", 0.05)
    monkeypatch.setattr(run_checks, "WRITTEN", 2**20)


def config_in(folder: Path, *options: str) -> Config:
    """Of the tiny job, in a run's folder that does not exist yet."""
    file = folder / "tiny.toml"
    argv = ["--job.config_file", str(file if file.exists() else write_config(folder))]
    return load_config([*argv, "--job.dump_folder", str(folder / "run"), *options])


def lines(printed: str, verdict: str) -> str:
    return "\n".join(line for line in printed.splitlines() if line.startswith(verdict))


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB. Skips where none may be mounted."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "preflight", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small disk is a mounted tmpfs: not permitted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


# -- the whole, in this process


def test_a_sound_machine_passes(quick: None, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    config = config_in(tmp_path)
    assert preflight(config, cluster_here("", [], 1)) == 0
    printed = capsys.readouterr().out
    names = ("configuration", "devices", "data, train", "plan", "checkpoints, speed", "interface")
    asked = f"torch=={torch.__version__.partition('+')[0]}" in (ROOT / "requirements.txt").read_text()
    assert f"{'pass' if asked else 'warn'}  versions  " in printed
    assert "0 fail" in printed and all(f"pass  {name}  " in printed for name in names)
    assert not config.dump_folder.exists()  # it leaves nothing


def unreadable(folder: Path) -> None:
    for file in next(folder.glob("*.zarr")).rglob(".z*"):
        file.write_text("{")


def damaged(folder: Path) -> None:
    array = next(folder.glob("*.zarr")) / "10m_u_component_of_wind"
    for chunk in (path for path in array.rglob("*") if path.is_file() and not path.name.startswith(".")):
        chunk.write_bytes(chunk.read_bytes()[:20])


def without_dates(folder: Path) -> None:
    """The third and the fourth are missing."""
    path = next(folder.glob("*.zarr"))
    with xr.open_zarr(path) as opened:
        kept = opened.load().isel(time=[0, 1, *range(4, opened.sizes["time"])])
    for each in kept.variables.values():
        each.encoding.clear()
    kept.to_zarr(path, mode="w", zarr_format=2)


def nothing(folder: Path) -> None:
    return


@pytest.mark.parametrize(
    ("spoil", "options", "named"),
    [
        (nothing, ["--parallelism.tensor_parallel_degree", "3"], "tensor_parallel_degree = 3"),
        (nothing, ["--job.dump_folder", "/proc/run"], "job.dump_folder = '/proc/run'"),
        (nothing, ["--data.path", "/nowhere/era5.zarr"], "/nowhere/era5.zarr"),
        (unreadable, [], "fail  data  .*wb.zarr"),
        (damaged, [], "fail  data  .*10m_u_component_of_wind at 2020-01-01T00:00:00 cannot be read"),
        (without_dates, [], "fail  data, train .*2 missing: 2020-01-01T12:00:00 and 1 more"),
    ],
    ids=["degree", "folder", "path", "store", "chunk", "date"],
)
def test_a_fault_is_named(
    spoil: Callable[[Path], None],
    options: list[str],
    named: str,
    quick: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    config = config_in(tmp_path, *options)
    spoil(tmp_path)
    assert preflight(config, cluster_here("", [], 1)) == BAD_INPUT
    printed = capsys.readouterr()

    assert re.search(named, lines(printed.out, "fail")), printed.out
    assert "fix: " in printed.out and printed.err.startswith("rossby: preflight: ")


def test_an_interface_that_is_not_there_is_named(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib7")
    assert preflight(config_in(tmp_path), None) == BAD_INPUT
    assert "GLOO_SOCKET_IFNAME = ib7: no such interface here, but lo" in capsys.readouterr().out


def test_a_full_disk_is_named(
    quick: None, small: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Three checkpoints of 85 kB fit into a MiB, 21 do not, and into what is full nothing at all."""
    folder = ["--job.dump_folder", str(small / "run"), "--training.steps=1000", "--checkpoint.interval=10"]
    for keep, code in (("2", 0), ("20", BAD_INPUT)):
        assert preflight(config_in(tmp_path, *folder, "--checkpoint.keep_latest_k", keep), None) == code
    (small / "others").write_bytes(bytes(2**20))
    capsys.readouterr()
    assert preflight(config_in(tmp_path, *folder), None) == BAD_INPUT
    assert "0.0 MiB free" in lines(capsys.readouterr().out, "fail  checkpoints")


def test_too_little_shared_memory_is_named(small: Path) -> None:
    """A container's 64 MiB do for neither; with nothing to put there it is only said."""
    assert shm_row(small, loaders=0, nccl=0).verdict == WARN
    row = shm_row(small, loaders=2**21, nccl=0)
    assert row.verdict == WARN and f"{small}: 1 MiB free, 2 needed" in row.found and "pipes" in row.fix
    assert shm_row(small, loaders=0, nccl=2**25).verdict == FAIL
    assert shm_row(Path("/"), loaders=2**21, nccl=2**25).verdict == PASS


# -- single checks, by hand


def test_rows_of_several_hosts_are_the_worst_one() -> None:
    found = [[Row("cores", PASS, "64")], [Row("cores", WARN, "1", "ask for more")], [Row("cores", WARN, "2")]]
    (row,) = joined(["node 0", "node 1", "node 2"], found)
    assert (row.verdict, row.found) == (WARN, "node 1: 1; so it is on node 2") and row.fix == "ask for more"
    assert table([row]).splitlines()[1].strip() == "fix: ask for more"


def test_hosts_that_differ_are_named() -> None:
    same, other = {"torch": "2.13.0", "Rossby": "a"}, {"torch": "2.12.1", "Rossby": "a"}
    hosts, facts = ["node 0", "node 1", "node 2"], [Facts(same, 0.0), Facts(same, 0.4), Facts(other, 9.0)]
    row = alike_row(hosts, facts)
    assert row.verdict == FAIL and row.found == "node 2 has torch 2.12.1, node 0 has 2.13.0"
    assert clocks_row(hosts, facts).found == "node 2: +8.6 s beside the median"
    assert alike_row(hosts[:2], facts[:2]).verdict == clocks_row(hosts[:2], facts[:2]).verdict == PASS


def test_a_slow_device_is_named() -> None:
    row = speed_row(["rank 0", "rank 1", "rank 2"], [700e12, 350e12, 710e12], "cuda")
    assert row.verdict == WARN and "rank 1 2.0 times" in row.found
    assert speed_row(["rank 0", "rank 1"], [700e12, 690e12], "cuda").verdict == PASS


def test_open_files_of_thousands_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_checks.resource, "getrlimit", lambda _: (1024, 4096))
    assert files_row(8).verdict == PASS
    assert files_row(512).fix == "ulimit -n 2560 before the start"
    assert files_row(4096).fix == "raise nofile in limits.conf"


def dates(first: str, last: str) -> np.ndarray:
    return np.arange(np.datetime64(first, "s"), np.datetime64(last, "s"), SIX)


def test_missing_dates_of_a_period() -> None:
    whole = dates("2001-01-01", "2001-06-01")
    there = np.delete(whole, [10, 11, 40])
    gaps, stretches = missing_dates(there, (whole[0], whole[-1] + 5 * HOUR), SIX)
    assert [list(gap) for gap in gaps] == [list(whole[[10, 11]]), [whole[40]]] and not stretches
    gaps, stretches = missing_dates(whole, (whole[0], np.datetime64("2001-12-31T23:59:59")), SIX)
    assert not gaps and stretches[0][0] == np.datetime64("2001-06-01") and len(stretches[0]) == 214 * 4


def test_few_missing_dates_are_said_and_many_refused() -> None:
    """Of 100 dates; a last day counts as far as the data go."""
    whole = dates("2001-01-01", "2001-01-26")
    end = np.datetime64("2001-01-25T23:59:59")
    verdicts = {}
    for number in (0, 1, 5, 6):
        there = np.delete(whole, np.arange(10, 10 + number))[:-1]  # the last one at 12:00
        verdicts[number] = period_row("data, train", there, (whole[0], end)).verdict
    assert verdicts == {0: PASS, 1: WARN, 5: FAIL, 6: FAIL}  # 5 of 99


def test_a_season_of_every_year_is_no_gap() -> None:
    """As the simulated weather is: 100 days from 1 January on, one of them a leap year's."""
    first = [np.datetime64(f"{year}-01-01", "s") for year in (2003, 2004, 2005)]
    there = np.concatenate([dates(str(day), str(day + np.timedelta64(100, "D"))) for day in first])
    assert missing_dates(there, (there[0], np.datetime64("2005-12-31T18:00:00")), SIX) == ([], [])
    gaps, stretches = missing_dates(there[200:], (there[0], there[-1]), SIX)
    assert not gaps and len(stretches) == 1  # 50 days at the begin are


def test_saves_that_do_not_end_before_the_next(quick: None, tmp_path: Path) -> None:
    """10 MB/s from each of two hosts: a save of 1 GB takes 50 s."""
    config = config_in(tmp_path, "--checkpoint.interval", "1000")
    selection = run_checks.open_data(config)[0]
    assert selection
    made, _ = planned(config, selection, cluster_here("", [], 1), 1)
    assert made and 1000 * made.time.total < 50
    rows = save_rows(config, 10**9, [10e6, 10e6], made)
    assert rows[-1].verdict == FAIL and "written in 50 s" in rows[-1].found
    rates = [HostRates(1e9, 1e9)]
    row = run_checks.feed_row(config, selection, [each.dates for each in rates], made)
    assert row.verdict == PASS and "from memory" in row.found


def test_a_model_that_does_not_fit_says_what_would(quick: None, tmp_path: Path) -> None:
    """On 4 GiB, 96 blocks of width 1,024 with their moments: 1.2 billion parameters x 16 bytes."""
    size = ("--model.dim=1024", "--model.num_layers=96", "--model.num_heads=16")
    config = config_in(tmp_path, *size, "--training.global_batch_size=16")
    selection, here = run_checks.open_data(config)[0], cluster_here("", [], 1)
    assert selection and here
    made, (row,) = planned(config, selection, replace(here, device=replace(here.device, memory=2**32)), 1)
    assert made and row.verdict == FAIL and row.found.startswith("does not fit: 1")
    assert "8 devices" in row.fix


def test_data_that_come_too_slowly(quick: None, tmp_path: Path) -> None:
    config = config_in(tmp_path, "--data.cache_gib", "1e-9")
    selection = run_checks.open_data(config)[0]
    assert selection
    made, _ = planned(config, selection, cluster_here("", [], 1), 1)
    assert made
    needed = 2 * made.time.samples_per_second  # the state and the one after it
    verdicts = [
        run_checks.feed_row(config, selection, [part * needed], made).verdict for part in (2, 0.7, 0.3)
    ]
    assert verdicts == [PASS, WARN, FAIL]


def test_pairs_of_nodes_meet_in_few_rounds() -> None:
    assert pair_rounds(1) == [] and pair_rounds(2) == [[(0, 1)]]
    for nodes in (3, 4, 7, 64):
        rounds = pair_rounds(nodes)
        assert len(rounds) <= 5
        assert all(len({n for pair in pairs for n in pair}) == 2 * len(pairs) for pairs in rounds)
        met = {pair for pairs in rounds for pair in pairs}
        assert {(min(i, (i + 1) % nodes), max(i, (i + 1) % nodes)) for i in range(nodes)} <= met


def pairs_of(nodes: int, rate: Callable[[int, int], float]) -> list[PairSample]:
    """As both ends see them."""
    met = [pair for pairs in pair_rounds(nodes) for pair in pairs]
    return [PairSample((a, b), 20e-6, rate(a, b)) for a, b in met for _ in range(2)]


@pytest.fixture
def cluster() -> Cluster:
    return load_cluster("h100x64")  # 368 GB/s between nodes


def test_a_slow_node_and_a_slow_link_are_told_apart(cluster: Cluster) -> None:
    places = [f"node {n}" for n in range(8)]
    good = pairs_row(pairs_of(8, lambda a, b: 350e9), places, cluster)
    assert good.verdict == PASS and "350 to 350 GB/s of 368 planned" in good.found
    node = pairs_row(pairs_of(8, lambda a, b: 30e9 if 5 in (a, b) else 350e9), places, cluster)
    assert node.verdict == FAIL and node.found.endswith("; slow node: node 5")
    link = pairs_row(pairs_of(8, lambda a, b: 150e9 if (a, b) == (2, 3) else 350e9), places, cluster)
    assert link.verdict == WARN and link.found.endswith("; slow link: node 2 - node 3, 150 GB/s")
    late = [PairSample((0, 1), 50e-3, 350e9)] * 2
    assert "slow link: node 0 - node 1" in pairs_row(late, places, cluster).found


def test_addresses_that_lead_nowhere() -> None:
    here, there = Place(0, "a", "docker0", "172.17.0.1", 1), Place(1, "b", "docker0", "172.17.0.1", 1)
    assert "an interface of each host alone" in reach_rows(here, [here, there])[0].found
    (row,) = reach_rows(here, [here, Place(1, "b", "eth0", "127.0.0.1", 9)])
    assert row.verdict == FAIL and "node 1 (b, eth0 127.0.0.1) cannot be reached" in row.found


def test_a_loopback_does_not_join_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    rows, name = interface_rows(several=True)
    assert name == "lo" and rows[0].verdict == FAIL and "a loopback" in rows[0].found
    assert interface_rows(several=False)[0][0].verdict == PASS


# -- as a user starts it


def command(*words: str, host: tuple[str, ...] = (), **environment: str) -> subprocess.Popen:
    settings = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    words = (*host, sys.executable, "-m", "jobs.preflight", *words)
    return subprocess.Popen(
        words, cwd=ROOT, env=settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow  # half a minute on a busy machine
def test_the_demo_passes_on_two_ranks() -> None:
    started = command("train_configs/demo.toml", NGPU="2")
    printed, errors = started.communicate(timeout=240)
    assert started.returncode == 0, printed + errors
    assert "pass  configuration" in printed and "links, dp_shard" in printed and "0 fail" in printed
    assert printed.count("configuration") == 1 and not errors  # one table


HOSTS = ("preflight-a", "preflight-b")


@pytest.fixture(scope="module")
def slow_cable() -> Iterator[None]:
    """Two network namespaces, 10.213.99.1 and .2, joined at 200 Mbit/s, and a bridge's address in each."""

    def run(*words: str) -> None:
        subprocess.run(words, check=True, capture_output=True, text=True)

    try:
        for host in HOSTS:
            run("ip", "netns", "add", host)
        ends = ("netns", HOSTS[0], "type", "veth", "peer", "wire", "netns", HOSTS[1])
        run("ip", "link", "add", "wire", *ends)
        for number, host in enumerate(HOSTS, start=1):
            inside = ("ip", "netns", "exec", host)
            run(*inside, "ip", "link", "add", "docker0", "type", "veth", "peer", "container")
            for name, address in (("wire", f"10.213.99.{number}/24"), ("docker0", "172.31.0.1/16")):
                run(*inside, "ip", "addr", "add", address, "dev", name)
            for name in ("lo", "wire", "docker0", "container"):
                run(*inside, "ip", "link", "set", name, "up")
            shape = ("tbf", "rate", "200mbit", "burst", "64kb", "latency", "400ms")
            run(*inside, "tc", "qdisc", "add", "dev", "wire", "root", *shape)
        yield
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a slow link needs network namespaces and tc: {getattr(error, 'stderr', error)}")
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], capture_output=True, check=False)


def on_both(folder: Path, port: int, **setting: str) -> list[subprocess.Popen]:
    folder.mkdir()
    network = {"NGPU": "1", "NNODES": "2", "RDZV_ENDPOINT": f"10.213.99.1:{port}", **setting}
    files = [str(write_config(folder)), "--job.dump_folder", str(folder / "run")]
    return [command(*files, host=("ip", "netns", "exec", host), **network) for host in HOSTS]


@pytest.mark.slow  # a quarter of a minute, a whole one on a busy machine
def test_the_network_between_two_hosts(slow_cable: None, tmp_path: Path) -> None:
    jobs = {
        r"slow link: node 0 \(.*wire 10.213.99.1\) - node 1 \(.*wire 10.213.99.2\), 0.0": on_both(
            tmp_path / "slow", 29513
        ),
        r"172.31.0.1\) has the address of node": on_both(
            tmp_path / "wrong", 29514, GLOO_SOCKET_IFNAME="docker0"
        ),
    }
    for named, both in jobs.items():
        printed = [started.communicate(timeout=240) for started in both]
        assert [started.returncode for started in both] == [BAD_INPUT, BAD_INPUT], printed
        assert re.search(named, lines(printed[0][0], "fail")), printed
        assert not printed[1][0]  # one table
