"""Whether this machine, the data and the network are what a run needs: before it starts, in a minute.

    .venv/bin/python -m jobs.preflight train_configs/demo.toml
    .venv/bin/python -m jobs.preflight --job.config_file F --section.key value

--cluster NAME     the machine of planning/clusters.toml to compare with (default: that of this GPU, or cpu)
--clusters FILE    your own machines, in the same form; as often as you like

NGPU, NNODES and RDZV_ENDPOINT as for run_train.sh: the same command on every node. What a host has is looked
at once a host, links by all ranks; one table, with pass, warn or fail and the fix. docs/preflight.md says
what each row means. Exit codes: 0 nothing fails, 2 something does that has to be mended first, 1 it did not
come to an end.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from command_line import own_options, split_options, start
from errors import BAD_INPUT, RunFailed, end_when_interrupted, one_line_errors, tell
from parallelisms.degrees import number_in_environment
from project_folder import PROJECT

OPTIONS = own_options(cluster="", clusters=[])


def read(argv: list[str], doc: str | None = "") -> tuple[argparse.Namespace, list[str]]:
    """Own options, and the configuration's with its file named. Answers --help. Raises ConfigError."""
    own, rest = split_options(argv, OPTIONS)
    if rest and not rest[0].startswith("-"):
        rest = ["--job.config_file", *rest]
    start(rest, doc, checked=False)  # whether it can work is the first row
    return own, rest


def launch_ranks(argv: list[str]) -> None:
    """Becomes the launcher of this host's ranks, which run this program, where there are to be several."""
    number, hosts = (number_in_environment(name) for name in ("NGPU", "NNODES"))
    if "RANK" in os.environ or number * hosts == 1:
        return
    options = ["--nproc_per_node", str(number), "--nnodes", str(hosts)]
    if hosts > 1:
        options += ["--rdzv_endpoint", os.environ.get("RDZV_ENDPOINT", "")]
    paths = filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")])
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
    os.environ.setdefault("OMP_NUM_THREADS", str(max(len(os.sched_getaffinity(0)) // number, 1)))
    command = [sys.executable, "-P", "-m", "jobs.launch", *options, str(Path(__file__)), *argv]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    end_when_interrupted()
    with one_line_errors():
        read(sys.argv[1:], __doc__)  # before torch takes its seconds
        if "NGPU" in os.environ:
            launch_ranks(sys.argv[1:])

import torch
import torch.distributed as dist

from command_line import load_config
from config import Config
from config_checks import check
from datasets.selection import Selection
from jobs import host_checks, link_checks, run_checks
from jobs.log_setup import start_logging
from jobs.meeting_checks import Meeting, meet, nodes
from jobs.rank_tree import RankTree
from jobs.start_checks import local_ranks
from jobs.verdicts import FAIL, ORDER, PASS, Row, attempt, joined, table
from jobs.watchdog import is_lost_connection
from parallelisms.degrees import AXES, Degrees, num_ranks, resolve_degrees
from parallelisms.mesh import build_mesh, start_ranks
from planning.hardware import Cluster

TIMEOUT = 120  # seconds that a rank waits for the others


def main(argv: list[str]) -> None:
    with one_line_errors():
        own, rest = read(argv)
        config = load_config(rest, checked=False)
        os.environ.setdefault("NGPU", str(max(torch.cuda.device_count(), 1)))
        launch_ranks(argv)
        start_logging(is_first=False)
        cluster = run_checks.cluster_here(own.cluster, own.clusters, num_ranks())
        sys.exit(preflight(config, cluster))


def preflight(config: Config, cluster: Cluster | None) -> int:
    """The exit code, the same on every rank. All ranks together; rank 0 prints the table."""
    begun = time.monotonic()
    meeting = meet()
    if meeting.fails:
        if os.environ.get("RANK", "0") == "0":
            report(meeting.rows, begun, ": with this ranks form no group, and no more was looked at")
        return BAD_INPUT
    device = start_ranks("auto", TIMEOUT)
    tree = RankTree(TIMEOUT)
    try:
        rows = Examination(config, cluster, meeting, tree, device).rows()
        code = tree.share(report(rows, begun) if tree.is_first else 0)
        tree.close()
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        reason = str(error).splitlines()[0]
        raise RunFailed(f"preflight: rank {tree.rank} lost another one: {reason}") from error
    dist.destroy_process_group()
    return code


def report(rows: list[Row], begun: float, more: str = "") -> int:
    """Prints the table; the exit code."""
    number = {verdict: sum(row.verdict == verdict for row in rows) for verdict in ORDER}
    counts = ", ".join(f"{count} {verdict}" for verdict, count in number.items())
    print(f"{table(rows)}\n\n{counts}; {time.monotonic() - begun:.0f} s{more}", flush=True)
    if number[FAIL]:
        tell(f"preflight: {number[FAIL]} of {len(rows)} checks fail; the table says what and the fix")
    return BAD_INPUT if number[FAIL] else 0


class Examination:
    """All checks of a job whose ranks can talk. Made, and each method called, by all ranks together."""

    def __init__(
        self, config: Config, cluster: Cluster | None, meeting: Meeting, tree: RankTree, device: torch.device
    ) -> None:
        self.config, self.cluster, self.tree, self.device = config, cluster, tree, device
        self.first_rows, self.places = meeting.rows, [str(place) for place in meeting.places]
        self.is_host = int(os.environ.get("LOCAL_RANK", 0)) == 0  # what concerns a host is looked at by one
        self.local = local_ranks()[1]

    def rows(self) -> list[Row]:
        """On rank 0; empty on the others."""
        refused = attempt("configuration", check, self.config)[1]
        found = f"{self.config.job.config_file}, {num_ranks()} rank(s)"
        layout = refused or [Row("configuration", PASS, found)]
        selection, own, rates = self.host() if self.is_host else (None, [], None)
        facts, speed, links = self.facts(), self.speed(), self.links(not refused)
        hosts, measured = self.of_hosts(own), self.of_hosts(rates)
        if not self.tree.is_first:
            return []
        across = [host_checks.alike_row(self.places, facts), host_checks.clocks_row(self.places, facts)]
        machine = [*layout, *joined(self.places, hosts), *across, *self.first_rows, speed, *links]
        return [*machine, *(self.run(selection, measured) if selection and not refused else [])]

    def of_hosts(self, value: object) -> list:
        """On rank 0 what the first rank of each host gave."""
        return (self.tree.gather(value) or [])[:: self.local]

    def facts(self) -> list[host_checks.Facts]:
        """What all hosts should have in common, and their clocks at the same moment."""
        software = host_checks.software() if self.is_host else {}
        self.tree.barrier()
        return self.of_hosts(host_checks.Facts(software, time.time()))

    def host(self) -> tuple[Selection | None, list[Row], run_checks.HostRates]:
        """This host alone: what it has, whether it can read the data, how fast it reads and writes."""
        config = self.config
        selection, data = run_checks.open_data(config)
        dates, shared = 0.0, 0
        if selection:
            shared = run_checks.loader_bytes(config, selection)
            dates, read = self.read(selection)
            data += read
        written, folder = run_checks.folder_rows(config.dump_folder)
        rows = [*host_checks.host_rows(config, shared), *data, *folder]
        return selection, rows, run_checks.HostRates(dates, written)

    def read(self, selection: Selection) -> tuple[float, list[Row]]:
        """Dates/s of this host, and what is damaged or empty."""
        what = (self.config, selection, self.tree.rank)
        name = "data, values"
        found, refused = attempt(name, run_checks.read_rate, *what, fix=run_checks.READABLE)
        return (0.0, refused) if refused else (found[0], [run_checks.values_row(found[1])])

    def speed(self) -> Row:
        """Of every rank's device: the slow node."""
        speeds = self.tree.gather(host_checks.device_speed(self.device)) or [1.0]
        names = [f"rank {rank} on {self.places[rank // self.local]}" for rank in range(len(speeds))]
        return host_checks.speed_row(names, speeds, self.device.type)

    def links(self, valid: bool) -> list[Row]:
        """By axis of the mesh, and between nodes. What is not valid is taken for shards over all ranks."""
        world, settings = num_ranks(), self.config.parallelism
        if world == 1:
            return []
        degrees = resolve_degrees(world, settings) if valid else Degrees(dp_shard=world)
        order = settings.axis_order if valid else AXES
        mesh = build_mesh(self.device.type, degrees, order)
        axes = self.tree.gather(link_checks.axis_samples(self.tree, mesh, order, self.cluster)) or []
        pairs = self.tree.gather(link_checks.pair_samples(self.tree, nodes(), self.local, self.device)) or []
        several, figures_assumed = nodes() > 1, bool(self.cluster and self.cluster.shared)
        limit = link_checks.BROKEN if figures_assumed else link_checks.SLOW
        fix = link_checks.FIX if several else link_checks.INSIDE
        rows = link_checks.axis_rows([each for found in axes for each in found], limit, fix)
        between = [each for found in pairs for each in found]
        return [*rows, link_checks.pairs_row(between, self.places, self.cluster)] if between else rows

    def run(self, selection: Selection, rates: list[run_checks.HostRates]) -> list[Row]:
        """On rank 0: dates, the plan, and what its step asks of data and checkpoints."""
        config = self.config
        periods, model = run_checks.period_rows(config, selection), run_checks.model_rows(config, selection)
        made, verdict = run_checks.planned(config, selection, self.cluster, num_ranks())
        rows = [*periods, *model, *verdict]
        if all(each.dates for each in rates):
            rows.append(run_checks.feed_row(config, selection, [each.dates for each in rates], made))
        size = run_checks.save_bytes(config, selection, made)
        return rows + run_checks.save_rows(config, size, [each.written for each in rates], made)


if __name__ == "__main__":
    main(sys.argv[1:])
