"""Work of an operator by the shapes that the trace has of its inputs, and how long it need take.

FLOPs count a multiplication and an addition as two; recomputed ones count, for the device does them. Bytes
are those of the inputs and of an output as large as the largest of them: what must pass through memory.
"""

import math
from ast import literal_eval
from functools import cache
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch.utils.flop_counter import FlopCounterMode

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
FREQUENT = 0.01  # of a class's time: what an operator must take for its rate to count as what can be reached


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
    floor: float | None  # milliseconds it need take; None where too little is known


# -- the work of one operator


def dims(event: Event) -> list[list[int]]:
    found = event.args.get("Input Dims")
    return found if isinstance(found, list) else []


def product(shape: Any) -> int:
    """Return the number of elements of a tensor; of a list of tensors, of all together."""
    if shape and isinstance(shape[0], list):
        return sum(product(inner) for inner in shape)
    return math.prod(shape) if shape else 0


def attention(query: list[int], value: list[int], matmuls: int) -> float:
    """Return 2 x head size FLOPs for each pair of query and key in each of the matmuls, (B, N, T, head)."""
    tokens, head = query[-2:]
    return 2.0 * matmuls * math.prod(query[:-2]) * tokens * value[-2] * head


def convolution(event: Event) -> float:
    """Return the FLOPs that torch counts of meta tensors of these shapes, forward or backward."""
    arguments = [
        torch.empty(shape, device="meta") if shape else literal_eval(text) if text else None
        for shape, text in zip(dims(event), event.args.get("Concrete Inputs", []), strict=True)
    ]
    with FlopCounterMode(display=False) as counter:
        getattr(torch.ops.aten, event.name.removeprefix("aten::"))(*arguments)
    return float(counter.get_total_flops())


def flops_of(event: Event) -> float | None:
    """Return the FLOPs of an operator; None for a product of matrices with arguments that are not known here.

    What an operator decomposes into is inside it and not counted again.
    """
    name, shapes = event.name.removeprefix("aten::"), dims(event)
    if (
        name in PRODUCTS
    ):  # of the first two inputs, (..., M, K) and (..., K, N), or the two after what is added
        left, right = shapes[PRODUCTS[name] : PRODUCTS[name] + 2]
        return 2.0 * math.prod(left) * right[-1]
    if name in ("convolution", "convolution_backward"):
        return convolution(event)
    if name.startswith(("_scaled_dot_product", "scaled_dot_product_attention")):
        if not name.endswith("_backward"):
            return attention(shapes[0], shapes[2], 2)
        # Grad, query, key, value; dV = P^T dO, dP = dO V^T, dQ = dP K, dK = dP^T Q.
        return attention(shapes[1], shapes[3], 4)
    unknown = any(word in name for word in ("mm", "attention", "attn", "convolution"))
    return None if unknown else 0.0


def work_of(event: Event) -> Work | None:
    """Return an operator's work; None for a compiled graph or a list of very many tensors."""
    shapes, types = dims(event), event.args.get("Input type", [])
    try:
        flops = flops_of(event) if any(shapes) else None
        sizes = [product(s) * ITEM_BYTES.get(kind, 1) for s, kind in zip(shapes, types, strict=False) if s]
    except (IndexError, ValueError, TypeError, SyntaxError, RuntimeError):
        return None  # not the arguments of the torch that is here
    if flops is None:
        return None
    output = 0 if event.name in SMALL_OUTPUT else max(sizes, default=0)
    return Work(flops, float(sum(sizes) + output))


# -- what a class needs


def rates_of(timeline: Timeline) -> Rates:
    """Return what large products and copies of the device reach by planning/clusters.toml; for a device that
    is not listed, the best of this trace.
    """
    if machine := machine_known_as(timeline.trace.device):
        device = load_cluster(machine).device
        return Rates(device.matmul["bf16"], device.bandwidth, f"[{machine}] of planning/clusters.toml")
    return reached_rates(timeline)


@cache
def operator_table(timeline: Timeline) -> Table:
    """Return a row an operator that computes: class, name, call (with shapes), milliseconds in all steps,
    FLOPs and bytes (NaN where the trace does not have them). The index has the events.
    """
    segments = timeline.table[[bool(e) and e.kind == "op" for e in timeline.table["operator"]]]
    times = segments.groupby("operator", sort=False).agg({"name": "last", "ms": "sum"})
    work = [work_of(event) or Work(math.nan, math.nan) for event in times.index]
    return pd.DataFrame(
        {
            "class": times["name"],
            "name": [event.name for event in times.index],
            "call": [f"{event.name} {dims(event)}" for event in times.index],
            "ms": times["ms"],
            "flops": [flops for flops, _ in work],
            "bytes": [moved for _, moved in work],
        }
    )


def reached_rates(timeline: Timeline) -> Rates:
    """Return the rates of the best call among shapes that take a hundredth of the time at least. Bytes: of
    calls without a FLOP.
    """
    known = operator_table(timeline).dropna().query("ms > 0")
    rates = known[["flops", "bytes"]].div(known["ms"] / 1e3, axis=0)
    calls = rates.groupby(known["call"]).max()
    times = known.groupby("call")["ms"].sum()
    frequent = calls[times > FREQUENT * times.sum()]
    moved = frequent["bytes"][frequent["flops"] == 0]
    return Rates(max(frequent["flops"], default=0.0), max(moved, default=0.0), "its best call in this trace")


def work_by_class(timeline: Timeline, rates: Rates) -> dict[str, ClassWork]:
    """Return the work of the classes that compute; floors at `rates`."""
    known, steps, result = operator_table(timeline).dropna(), len(timeline.windows), {}
    for name in COMPUTE:
        rows = known[known["class"] == name]
        total = Work(*(rows[["flops", "bytes"]].sum() / steps))
        milliseconds, floor = rows["ms"].sum() / steps, None
        enough = milliseconds >= ENOUGH * timeline.by_class[name] > 0
        if enough and (rates.flops if total.flops else rates.bytes):
            # A cache may hold what a multiplication reads: bytes are a floor only where nothing is computed.
            by_flops, by_bytes = (
                rows[what] / rate if rate else 0.0 * rows[what]
                for what, rate in (("flops", rates.flops), ("bytes", rates.bytes))
            )
            least = by_flops.where(by_flops > 0, by_bytes).sum()
            # Rare calls may be faster than the best frequent one.
            floor = min(least * 1e3 / steps, timeline.by_class[name])
        result[name] = ClassWork(total, timeline.by_class[name], milliseconds, floor)
    return result
