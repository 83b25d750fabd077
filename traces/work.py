"""Work of an operator, from the input shapes in the trace, and the minimum time that it needs.

FLOPs count a multiplication and an addition as two; recomputed ones count, for the device does them. Bytes
are those of the inputs and of an output as large as the largest of them: what must pass through memory.
"""

import math
from functools import cache
from typing import Any, NamedTuple

import pandas as pd

from planning.clusters import load_cluster, machine_known_as
from traces.classes import COMPUTE
from traces.events import Event
from traces.timeline import Table, Timeline

ITEM_BYTES = {
    **dict.fromkeys(("double", "long int"), 8),
    **dict.fromkeys(("float", "int", "TensorList"), 4),
    **dict.fromkeys(("c10::BFloat16", "c10::Half", "short"), 2),
}
ENOUGH = 0.9  # of a class's time must be in operators of known work for the class to have a floor
SMALL_OUTPUT = {"aten::copy_", "aten::sum", "aten::mean", "aten::linalg_vector_norm", "aten::_foreach_norm"}
# Operators that multiply two matrices, and the position of the first one among their inputs.
PRODUCTS = {"mm": 0, "bmm": 0, "_scaled_mm": 0, "addmm": 1, "baddbmm": 1, "_addmm_activation": 1}


class Work(NamedTuple):
    flops: float
    bytes: float


class Rates(NamedTuple):
    """FLOPs and bytes that the device can do in a second, and the source of that. 0: not known."""

    flops: float
    bytes: float
    source: str


class ClassWork(NamedTuple):
    """Work and time of a class in a step."""

    work: Work
    time: float  # milliseconds
    milliseconds: float  # in operators of known work
    floor: float | None  # minimum milliseconds; None if too little is known


# -- the work of one operator


def dims(event: Event) -> list[list[int]]:
    found = event.args.get("Input Dims")
    return found if isinstance(found, list) else []


def product(shape: Any) -> int:
    """Return the number of elements of a tensor; of a list of tensors, of all together."""
    if shape and isinstance(shape[0], list):
        return sum(map(product, shape))
    return math.prod(shape) if shape else 0


def flops_of(event: Event) -> float | None:
    """Return the FLOPs of an operator; None for a product of matrices with arguments that are not known here.

    What an operator decomposes into is inside it and not counted again.
    """
    name, shapes = event.name.removeprefix("aten::"), dims(event)
    if name in PRODUCTS:  # (..., M, K) and (..., K, N)
        left, right = shapes[PRODUCTS[name] : PRODUCTS[name] + 2]
        return 2.0 * math.prod(left) * right[-1]
    if name.startswith(("_scaled_dot_product", "scaled_dot_product_attention")):
        # (B, N, T, E): 2 E for each pair of query and key in each of two products; backward, where the
        # output's gradient comes first, in four: dV = P^T dO, dP = dO V^T, dQ = dP K, dK = dP^T Q.
        backward = name.endswith("_backward")
        query, value = shapes[backward], shapes[2 + backward]
        return (8.0 if backward else 4.0) * math.prod(query) * value[-2]
    unknown = any(word in name for word in ("mm", "attention", "attn", "convolution"))
    return None if unknown else 0.0


def work_of(event: Event) -> Work | None:
    """Return an operator's work; None for a compiled graph or a list of very many tensors."""
    shapes, types = dims(event), event.args.get("Input type", [])
    try:
        flops = flops_of(event) if any(shapes) else None
        sizes = [product(s) * ITEM_BYTES.get(kind, 1) for s, kind in zip(shapes, types, strict=False) if s]
    except (IndexError, ValueError, TypeError):
        return None  # not the arguments of the torch that is here
    if flops is None:
        return None
    output = 0 if event.name in SMALL_OUTPUT else max(sizes, default=0)
    return Work(flops, float(sum(sizes) + output))


# -- what a class needs


def rates_of(timeline: Timeline) -> Rates:
    """Return what large products and copies of the device reach by planning/clusters.toml; 0: not listed."""
    if not (machine := machine_known_as(timeline.trace.device)):
        return Rates(0.0, 0.0, "")
    device = load_cluster(machine).device
    return Rates(device.matmul["bf16"], device.bandwidth, f"[{machine}] of planning/clusters.toml")


@cache
def operator_table(timeline: Timeline) -> Table:
    """Return a row an operator that computes: class, milliseconds in all steps, FLOPs and bytes
    (NaN where the trace does not have them). The index has the events.
    """
    segments = timeline.table[[bool(e) and e.kind == "op" for e in timeline.table["operator"]]]
    table = segments.groupby("operator", sort=False).agg({"name": "last", "ms": "sum"})
    work = [work_of(event) or Work(math.nan, math.nan) for event in table.index]
    table = table.rename(columns={"name": "class"})
    table[["flops", "bytes"]] = pd.DataFrame(work, index=table.index, columns=["flops", "bytes"], dtype=float)
    return table


def work_by_class(timeline: Timeline, rates: Rates) -> dict[str, ClassWork]:
    """Return the work of the classes that compute; floors at `rates`."""
    known, steps, result = operator_table(timeline).dropna(), len(timeline.windows), {}
    for name in COMPUTE:
        rows, time = known[known["class"] == name], timeline.by_class[name]
        total, floor = Work(*(rows[["flops", "bytes"]].sum() / steps)), None
        milliseconds = rows["ms"].sum() / steps
        if milliseconds >= ENOUGH * time > 0 and rates.flops:
            # A cache may have what a multiplication reads: bytes are a floor only where nothing is computed.
            computing, moving = rows["flops"] / rates.flops, rows["bytes"] / rates.bytes
            least = computing.where(rows["flops"] > 0, moving).sum() * 1e3 / steps
            floor = min(least, time)  # a device may be faster than its listed rates
        result[name] = ClassWork(total, time, milliseconds, floor)
    return result
