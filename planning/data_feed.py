"""Whether store, network and cores bring the data as fast as the run eats them, and what does not, first.

A state is read for each sample that it is the input of, and again for each that it is a target of: dates are
shuffled, and what was read is not kept. Decoded bytes are float32; how much smaller they are stored, and how
fast a core decodes them, stands in planning/data_inputs.toml.
"""

import datetime
import math
from dataclasses import dataclass

from command_line import text_table
from config import Data
from datasets.options import parse_period
from planning.data_costs import FLOAT32, load_inputs
from planning.hardware import Cluster
from planning.workload import Workload


@dataclass(frozen=True)
class Need:
    """Something that data pass through: what it has to give, and what it does."""

    what: str
    needed: float
    there: float
    why: str

    @property
    def load(self) -> float:
        return self.needed / self.there if self.there > 0 else math.inf


def read_rate(work: Workload, samples_per_second: float) -> float:
    """Decoded bytes a second, of each sample once: ranks that share one (tp, cp, pp) read a part each."""
    return FLOAT32 * work.field_values * work.states_read * samples_per_second


def needs(work: Workload, samples_per_second: float, cluster: Cluster, from_url: bool) -> list[Need]:
    """Along the way of the data: the store, a node's network, its cores. Chunks are taken to hold one date
    and the levels that the run uses.
    """
    inputs = load_inputs()["reading"]
    decoded = read_rate(work, samples_per_second)
    stored, ratio = inputs["compression"] * decoded, inputs["compression"]
    requests = work.arrays * work.states_read * samples_per_second
    found = []
    if from_url:
        found += [
            Need(
                "requests/s of the store", requests, inputs["requests"], f"a state has {work.arrays} chunks"
            ),
            Need("GB/s of the store", stored / 1e9, inputs["bandwidth"] / 1e9, f"{ratio} of what is decoded"),
        ]
    node, per_node = cluster.storage / 1e9, stored / 1e9 / cluster.nodes
    found.append(Need("GB/s a node", per_node, node, f"{ratio} of what is decoded"))
    if cluster.cores and not cluster.shared:
        gpus = min(cluster.devices, cluster.devices_per_node)
        left = cluster.cores / cluster.devices_per_node - inputs["cores_a_gpu"]
        rate, own = inputs["decode"], inputs["cores_a_gpu"]
        why = f"{rate / 1e9:g} GB/s a core; {own} of {cluster.cores / cluster.devices_per_node:g} train"
        found.append(Need("cores a GPU", decoded / cluster.nodes / gpus / rate, left, why))
    return found


def feed_table(work: Workload, data: Data, samples_per_second: float, cluster: Cluster) -> str:
    """What is needed beside what is there, and the first that does not suffice."""
    decoded = read_rate(work, samples_per_second)
    eats = f"data to be read {decoded / 1e9:,.2f} GB/s (float32, {work.states_read} states a sample)"
    if kept := kept_gib(work, data):
        return f"{eats}: from memory, where data.cache_gib keeps all {kept:.1f} GiB of a node's rank"
    found = needs(work, samples_per_second, cluster, "://" in data.path)
    rows: list[tuple[object, ...]] = [("  through", "needed", "there", "")]
    rows += [(f"  {each.what}", each.needed, each.there, f"   {each.why}") for each in found]
    table = text_table("<28 >12,.2f >12,.2f <0", rows)
    worst = max(found, key=lambda each: each.load)
    if worst.load <= 1:
        end = f"the first to end would be {worst.what}, at {1 / worst.load:.1f} times this speed"
        return f"{eats}\n{table}\nall suffice; {end}"
    first = f"first that does not suffice: {worst.what}, {worst.load:.1f} times too few"
    return f"{eats}\n{table}\n{first}: TOO SLOW, steps wait for their data"


def kept_gib(work: Workload, data: Data) -> float:
    """GiB of the fields of both periods, where data.cache_gib keeps them; 0: it does not, or nobody knows."""
    periods = [parse_period("", each) for each in (data.train_period, data.validation_period) if each]
    if not data.train_period:
        return 0.0
    length = sum((last - first for first, last in filter(None, periods)), datetime.timedelta())
    dates = length / datetime.timedelta(hours=data.step_hours)
    size = FLOAT32 * work.field_values * dates / 2**30
    return size if size <= data.cache_gib else 0.0
