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
from traces.events import DATA, Event, Trace
from traces.timeline import Table, Timeline

ITEM_BYTES = {
    "double": 8,
    "long int": 8,
    "float": 4,
    "int": 4,
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "short": 2,
}
ENOUGH = 0.9  # of a class's time must be in operators of known work for the class to have a floor
SMALL_OUTPUT = {"aten::copy_", "aten::sum", "aten::mean", "aten::linalg_vector_norm", "aten::_foreach_norm"}
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
    milliseconds: float  # in operators of known work
    floor: float | None  # milliseconds it need take; None where too little is known


# -- the work of one operator


def dims(event: Event) -> list[list[int]]:
    found = event.args.get("Input Dims")
    return found if isinstance(found, list) else []


def product(shape: Any) -> int:
    """Elements of a tensor; of a list of tensors, of all together."""
    if shape and isinstance(shape[0], list):
        return sum(product(inner) for inner in shape)
    return math.prod(shape) if shape else 0


def attention(query: list[int], value: list[int], matmuls: int) -> float:
    """Every pair of a query and a key: 2 x head size FLOPs in each of the matmuls. (B, N, T, head)."""
    tokens, head = query[-2:]
    return 2.0 * matmuls * math.prod(query[:-2]) * tokens * value[-2] * head


def convolution(event: Event) -> float:
    """Forward or backward, as torch counts it: of tensors of these shapes, which hold no data."""
    concrete = event.args.get("Concrete Inputs", [])
    arguments = [
        torch.empty(shape, device="meta") if shape else literal_eval(text) if text else None
        for shape, text in zip(dims(event), concrete, strict=True)
    ]
    with FlopCounterMode(display=False) as counter:
        getattr(torch.ops.aten, event.name.removeprefix("aten::"))(*arguments)
    return float(counter.get_total_flops())


# Operators that multiply their first two inputs, (..., M, K) and (..., K, N), or the two after what is added.
# What an operator decomposes into is inside it and not counted again.
PRODUCTS = ("aten::mm", "aten::bmm", "aten::_scaled_mm")
SUMS_OF_PRODUCTS = ("aten::addmm", "aten::baddbmm", "aten::_addmm_activation")


def flops_of(event: Event) -> float | None:
    """FLOPs of an operator; None for a product of matrices with arguments that are not known here."""
    if event.name in PRODUCTS + SUMS_OF_PRODUCTS:
        first = 1 if event.name in SUMS_OF_PRODUCTS else 0
        left, right = dims(event)[first : first + 2]
        return 2.0 * math.prod(left) * right[-1]
    if event.name in ("aten::convolution", "aten::convolution_backward"):
        return convolution(event)
    if event.name.startswith(("aten::_scaled_dot_product", "aten::scaled_dot_product_attention")):
        if not event.name.endswith("_backward"):
            return attention(dims(event)[0], dims(event)[2], 2)
        # Grad, query, key, value; dV = P^T dO, dP = dO V^T, dQ = dP K, dK = dP^T Q.
        return attention(dims(event)[1], dims(event)[3], 4)
    unknown = any(word in event.name for word in ("mm", "attention", "attn", "convolution"))
    return None if unknown else 0.0


def work_of(event: Event) -> Work | None:
    """None where the trace does not tell: a compiled graph, a list of very many tensors."""
    shapes, types = dims(event), event.args.get("Input type", [])
    try:
        flops = flops_of(event) if any(shapes) else None
        sizes = [product(s) * _item_bytes(kind) for s, kind in zip(shapes, types, strict=False) if s]
    except (IndexError, ValueError, TypeError, SyntaxError, RuntimeError):
        return None  # not the arguments of the torch that is here
    if flops is None:
        return None
    output = 0 if event.name in SMALL_OUTPUT else max(sizes, default=0)
    return Work(flops, float(sum(sizes) + output))


def _item_bytes(kind: str) -> int:
    return ITEM_BYTES.get(kind, 4 if kind == "TensorList" else 1)


# -- what a class needs


def rates_of(timeline: Timeline) -> Rates:
    """Return what large products and copies of the device reach by planning/clusters.toml; for a device that
    is not listed, the best of this trace.
    """
    reached, machine = reached_rates(timeline), machine_known_as(timeline.trace.device)
    device = load_cluster(machine).device if machine else None
    memory = device.bandwidth if device else reached.bytes
    if device:
        return Rates(device.matmul["bf16"], memory, f"[{machine}] of planning/clusters.toml")
    return reached


@cache
def operator_table(timeline: Timeline) -> Table:
    """A row an operator that computes: its class, its name, its call (with shapes), milliseconds of the
    timeline in all steps, FLOPs and bytes (NaN where the trace does not tell). The index has the events.
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
    """Rates of the best call of this trace, where the device is not known, among shapes that take a hundredth
    of the time at least. Bytes: of calls without a FLOP.
    """
    known = operator_table(timeline).dropna().query("ms > 0")
    rates = known[["flops", "bytes"]].div(known["ms"] / 1e3, axis=0)
    calls = rates.groupby(known["call"]).max()
    times = known.groupby("call")["ms"].sum()
    frequent = calls[times > FREQUENT * times.sum()]
    plain = frequent[frequent["flops"] == 0]
    flops = max(frequent["flops"], default=0.0)
    moved = max(plain["bytes"], default=0.0)
    return Rates(flops, moved, "its best call in this trace")


def work_by_class(timeline: Timeline, rates: Rates) -> dict[str, ClassWork]:
    """Work of the classes that compute; floors at `rates`."""
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
        result[name] = ClassWork(total, milliseconds, floor)
    return result


def loaded_bytes(trace: Trace) -> float:
    """Bytes of fields that the loader hands over, a step."""
    handed = [
        product(dims(e)[0]) * _item_bytes(e.args["Input type"][0])
        for e in trace.loop_events
        if e.name == "aten::to"
        and e.parent
        and e.parent.name == DATA
        and dims(e)
        and e.args.get("Input type")
    ]
    return sum(handed) / len(trace.steps)
