"""Seconds that one rank computes: matrix products, attention, elementwise passes, the update.

A roofline by class of kernel: work over the rate that the class reaches on a device, or that was measured on
this machine for the very shape.
"""

import statistics
from collections import Counter, defaultdict

from parallelisms.degrees import Degrees
from planning import constants
from planning.architecture import count, cut, vit_architecture
from planning.calibration import Rates
from planning.memory import shard_parameters, unit_bytes
from planning.workload import Workload

Times = dict[str, float]  # class of kernel -> seconds


def slower_in_a_model(rates: Rates, dtype: str) -> float:
    """Ratio of the time of calibrated operations one after the other to that of each by itself, repeated:
    in a model they find other data in the caches, and memory that is new. 1 where it was not measured.
    """
    ratios = []
    for row in getattr(rates, "timings", ()):
        if row.kind.startswith("blocks/") and row.dtype == dtype:
            number, batch, tokens, dim, heads, mlp_dim = row.sizes
            model = vit_architecture((tokens, 1), (1, 1), 1, 1, dim, number, heads, mlp_dim=mlp_dim)
            backend = row.kind.partition("/")[2]
            work = Workload(model, Degrees(), batch, batch, dtype=dtype, attention=backend)
            separate = sum(sum(block_seconds(work, rates, b).values()) for b in (False, True))
            ratios.append(row.seconds / (number * separate))
    return statistics.mean(ratios) if ratios else 1.0


# -- a block


def block_seconds(work: Workload, rates: Rates, backward: bool) -> Times:
    """One micro-batch through one block of this rank; of the backward, with what it computes again."""
    times = linear_seconds(work, rates, backward)
    times["attention"] = attention_seconds(work, rates, backward)
    times["elementwise"] = elementwise_seconds(work, rates, backward)
    if backward:
        times["recomputed"] = recomputed_seconds(work, rates)
    return times


def rank_rows(work: Workload) -> int:
    """Tokens that a matrix of this rank multiplies at once: those of all its tp ranks."""
    return work.states_at_once * work.rank_tokens * work.degrees.tp


def linear_seconds(work: Workload, rates: Rates, backward: bool) -> Times:
    """In float8 the input is cast forward; backward the gradient is, and both are transposed."""
    times, rows = defaultdict(float), rank_rows(work)
    dtype = "float8" if work.float8 else work.dtype
    for shape in cut(work.model.block, work.degrees.tp).values():
        if len(shape) == 2:
            outputs, inputs = shape
            times["matmul"] += rates.linear_seconds(rows, inputs, outputs, dtype, backward)
            units = constants.FLOAT8_CAST * (outputs if backward else inputs)
            units += constants.FLOAT8_TRANSPOSE * (inputs + outputs) * backward
            size = work.float8 * work.itemsize * rows * units / constants.FLOAT8_BANDWIDTH
            if size:
                operation = "float8_backward" if backward else "float8"
                times["float8 casts"] += rates.elementwise_seconds(size, work.dtype, operation)
    return times


def attention_seconds(work: Workload, rates: Rates, backward: bool) -> float:
    """Of a block, the mean of all; context parallelism shards heads, or queries: the same work."""
    model, heads, seconds = work.model, max(work.model.heads // work.degrees.tp, 1), 0.0
    blocks = Counter(model.window_tokens or (model.tokens,))
    for size, number in blocks.items():
        shape = (work.states_at_once * (model.tokens // size), heads, size, model.head_dim)
        seconds += number * rates.attention_seconds(*shape, work.dtype, backward, work.attention)
    return seconds / blocks.total() / work.degrees.cp


def elementwise_units(work: Workload, backward: bool) -> dict[str, float]:
    """Operation -> units that it reads and writes in a block; compiled, neighbours are fused.

    Gradients of biases are sums over tokens, backward.
    """
    hidden = work.model.mlp_dim / work.model.dim
    activation, passes = constants.ACTIVATION_PASSES[backward]
    units = constants.PASSES[work.compiled, backward] | {activation: passes * hidden}
    if not work.compiled and work.itemsize < constants.FLOAT32:
        units["norm cast"] = constants.NORM_CASTS[backward]
    return units | {"sum": (5 + hidden) * backward, "exchange": exchange_units(work, backward)}


def exchange_units(work: Workload, backward: bool) -> float:
    """Return the units that a pass copies or adds around its collectives.

    DTensor gathers into the first dim and moves tokens to the second (torch's _maybe_view_chunk_cat), and
    back before it scatters. ulysses stacks q, k and v, puts them and the output in the order of ranks, then
    of tokens; all_gather does so with keys and values. The ring adds up its parts in float32. Windows that
    cut rows are copied together, q, k, v and the output.
    """
    cp, tp = work.degrees.cp, work.degrees.tp
    copied = 8.0 * tp * (tp > 1 and work.states_at_once > 1) + 8 * work.model.copied_fraction
    if cp == 1:
        return copied
    keys = (work.model.qkv_features / work.model.dim - 1) / 2  # fewer than queries where these share them
    if work.method == "ulysses":
        return copied + (4 if work.compiled else 6) * (1 + 2 * keys) + 4
    if work.method == "all_gather":
        return copied + 4 * keys * (1 + cp)
    merged = work.itemsize + 8 + 44 * keys if backward else work.itemsize + 24
    return copied + cp * merged / work.itemsize


def elementwise_seconds(work: Workload, rates: Rates, backward: bool) -> float:
    """Each pass also casts weights: float32 ones are read and copies written, or gradients the other way
    round; FSDP moves about as much, as it casts shards and copies what it gathered into place.
    """
    sizes = {name: unit_bytes(work) * units for name, units in elementwise_units(work, backward).items()}
    if work.itemsize < constants.FLOAT32 or work.uses_fsdp:
        sizes["cast"] = (constants.FLOAT32 + work.itemsize) * count(cut(work.model.block, work.degrees.tp))
    return sum(rates.elementwise_seconds(size, work.dtype, name) for name, size in sizes.items() if size)


def recomputed_seconds(work: Workload, rates: Rates) -> float:
    """Seconds of the part of the forward pass that activation checkpointing repeats in the backward pass."""
    if work.ac_mode == "none":
        return 0.0
    again = elementwise_seconds(work, rates, backward=False)
    if work.ac_mode == "selective":
        return again
    again += sum(linear_seconds(work, rates, False).values()) + attention_seconds(work, rates, False)
    if not work.compiled:  # recomputation stops before the last product of a segment
        outputs, inputs = cut(work.model.block, work.degrees.tp)["mlp.down.weight"]
        again -= rates.linear_seconds(rank_rows(work), inputs, outputs, work.dtype, False) / work.segment
    return again


# -- the ends, the fields and the update


def end_seconds(work: Workload, rates: Rates, backward: bool) -> Times:
    """Patch embedding and head of one micro-batch, in half precision; no gradient goes into the patches."""
    rows, shapes = rank_rows(work), cut(work.model.first | work.model.last, work.degrees.tp)
    outputs, inputs = shapes["head.weight"]
    matmul = rates.linear_seconds(rows, inputs, outputs, work.dtype, backward)
    if embedding := shapes.get("patch_embedding.weight"):
        matmul += rates.linear_seconds(rows, embedding[1], embedding[0], work.dtype, False)
    return {"matmul": matmul}


def field_seconds(work: Workload, rates: Rates) -> float:
    """Fields of a micro-batch: normalised, cut, weighted, and their errors summed, in float32."""
    values = work.local_batch * work.members * work.field_values * work.rollout_steps
    newest, older = constants.FIELD_PASSES[work.compiled]
    pairs = constants.PAIR_PASSES * work.members * (work.members > 1 and not work.compiled)
    passes = newest + pairs + (work.history - 1) * older
    return rates.elementwise_seconds(constants.FLOAT32 * passes * values) if values else 0.0


def update_seconds(work: Workload, rates: Rates) -> float:
    owners, number = work.degrees.dp_replicate if work.zero1 else 1, shard_parameters(work)
    kernels = rates.elementwise_seconds(update_bytes(work) / owners, "float32", "adamw")
    rest = rates.elementwise_seconds((constants.CLIP_BYTES + constants.AVERAGE_BYTES * work.ema) * number)
    return kernels + rest + orthogonal_seconds(work, rates) / owners


def update_bytes(work: Workload) -> float:
    """Read and written by a rank's optimiser."""
    number, inside = shard_parameters(work), 0.0
    if work.optimizer == "Muon":
        inside = number * work.model.layers * work.model.matrix_parameters / work.model.parameters
    return constants.UPDATE_BYTES[work.optimizer] * (number - inside) + constants.MUON_BYTES * inside


def orthogonal_seconds(work: Workload, rates: Rates) -> float:
    """Muon's products: every rank makes them of whole matrices, (m, n) with m <= n, of all its blocks."""
    if work.optimizer != "Muon":
        return 0.0
    total = 0.0
    for m, n in map(sorted, work.model.matrices):
        for product in ((m, n, m), (m, m, m), (m, m, n)):
            total += rates.linear_seconds(*product, work.dtype, False)
    return constants.ITERATIONS * work.rank_layers * total
