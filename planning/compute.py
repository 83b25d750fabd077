"""Seconds that one rank computes: matrix products, attention, elementwise passes, the update.

FLOPs are exact (tests hold them against torch's counter). Seconds are a roofline by class of kernel: work
over the rate that the class reaches on a device, or that was measured on this machine for the very shape.
"""

from collections import defaultdict
from collections.abc import Mapping
from functools import cache

from parallelisms.degrees import Degrees
from planning.architecture import ROW, Architecture, count, cut
from planning.calibration import Rates
from planning.hardware import Cluster, Device
from planning.memory import shard_parameters, stage_shapes, unit_bytes
from planning.network import kv_heads_sent
from planning.workload import Workload

# Bytes a parameter: AdamW reads parameter, gradient and two moments and writes three of them. LAMB's
# direction takes as much, its weight decay 12, norms 8, the step 12. SGD's step takes 20, weight decay 12.
# LARS has norms (8) and scaling (8), too. Muon goes through its matrices seven times. The norm of gradients
# takes 4 and clipping 8; averaged weights 12.
UPDATE_BYTES = {"AdamW": 28, "LAMB": 60, "SGD": 32, "LARS": 48, "Muon": 28}
MUON_BYTES, CLIP_BYTES, AVERAGE_BYTES = 70, 12, 12
ITERATIONS = 5  # of Newton and Schulz: training/optimizers/muon.py, which takes seconds to import
# float8: a product's input is read for its maximum and again to be cast (2 + 2 + 1 bytes of 2), its gradient
# too; each is then transposed for the gradient of weights (1 + 1). Kernels that the compiler makes of
# torchao's casts reach 0.62 of the bandwidth: vit1b's, profiled by benchmarks/gpu.sh on an H100.
FLOAT8_CAST, FLOAT8_TRANSPOSE = 2.5, 1.0
FLOAT8_BANDWIDTH = 0.62
# Reads and writes of the predicted float32 fields of a sample, as training/objective.py makes them, operator
# by operator: normalising two dates 15, the change 5, weights 8, inputs 2, patches of three 6, loss 9 and its
# gradient 10. Compiled: three are read (the truth twice, once for its mask) and three written; loss 2.5, its
# gradient 3.
FIELD_PASSES, FIELD_PASSES_COMPILED = 55, 11.5
OLDER_PASSES, OLDER_PASSES_COMPILED = 11.5, 2  # of an older state: normalised, an input, patches
# Autocast on a GPU takes norms in float32: units of s that two of them read and write more, forward and
# backward: 16 and 18 bytes a value of 2 (cast there and back, and twice as wide between).
NORM_CASTS = (16, 18)
PAIR_PASSES = 14  # CRPS, not compiled, for each other member: difference, size and sum, twice


class Times(defaultdict[str, float]):
    """Class of kernel -> seconds."""

    def __init__(self, values: Mapping[str, float] | None = None) -> None:
        super().__init__(float, values or {})

    def __mul__(self, factor: float) -> "Times":
        return Times({name: factor * value for name, value in self.items()})

    def add(self, other: Mapping[str, float]) -> None:
        for name, value in other.items():
            self[name] += value


def slower_in_a_model(rates: Rates, dtype: str) -> float:
    """Ratio of the time of calibrated operations one after the other to that of each by itself, repeated:
    in a model they find other data in the caches, and memory that is new. 1 where it was not measured.
    """
    timings = getattr(rates, "timings", ())
    rows = [row for row in timings if row.kind.startswith("blocks/") and row.dtype == dtype]
    ratios = []
    for row in rows:
        number, batch, tokens, dim, heads, mlp_dim = row.sizes
        model, backend = Architecture(tokens, dim, number, heads, mlp_dim, 0, 0), row.kind.partition("/")[2]
        work = Workload(model, Degrees(), batch, batch, dtype=dtype, attention=backend)
        separate = sum(sum(block_seconds(work, rates, backward).values()) for backward in (False, True))
        ratios.append(row.seconds / (number * separate))
    return sum(ratios) / len(ratios) if ratios else 1.0


# -- a block


def block_seconds(work: Workload, rates: Rates, backward: bool) -> Times:
    """One micro-batch through one block of this rank; of the backward, with what it computes again."""
    times = linear_times(work, rates, backward)
    times["attention"] += attention_time(work, rates, backward)
    times["elementwise"] += elementwise_time(work, rates, backward)
    if backward:
        times.add({f"recomputed {name}": value for name, value in recomputed_times(work, rates).items()})
    return times


def linear_times(work: Workload, rates: Rates, backward: bool) -> Times:
    times = Times()
    for name in rank_matrices(work.model, work.degrees.tp):
        if name.startswith(("attention.", "mlp.")):
            times["matmul"] += linear_time(work, rates, name, backward)
            if work.float8:
                times["float8 casts"] += float8_time(work, rates, name, backward)
    return times


@cache
def rank_matrices(model: Architecture, tp: int) -> dict[str, tuple[int, int]]:
    """Matrix -> (features in, features out) of one of `tp` ranks."""
    shapes = cut(model.block() | model.first() | model.last(), tp)
    return {n.removesuffix(".weight"): (s[1], s[0]) for n, s in shapes.items() if len(s) == 2}


def linear_time(work: Workload, rates: Rates, name: str, backward: bool) -> float:
    """The ends multiply in half precision."""
    dtype = "float8" if work.float8 and name.startswith(("attention.", "mlp.")) else work.dtype
    inputs, outputs = rank_matrices(work.model, work.degrees.tp)[name]
    return rates.linear_seconds(rank_rows(work), inputs, outputs, dtype, backward)


def rank_rows(work: Workload) -> int:
    """Tokens that a matrix of this rank multiplies at once: those of all its tp ranks."""
    return work.states_at_once * work.rank_tokens * work.degrees.tp


def float8_time(work: Workload, rates: Rates, name: str, backward: bool) -> float:
    """Forward the input is cast; backward the gradient, and both are transposed.

    Where tensor parallelism gathers what is cast already, each rank has cast its tokens alone: of inputs of
    matrices that are cut by columns, and of gradients of those cut by rows.
    """
    inputs, outputs = rank_matrices(work.model, work.degrees.tp)[name]
    is_gathered = work.gathered_itemsize < work.itemsize and backward == (f"{name}.weight" in ROW)
    passes = FLOAT8_CAST * (outputs if backward else inputs) / (work.degrees.tp if is_gathered else 1)
    passes += FLOAT8_TRANSPOSE * (inputs + outputs) if backward else 0
    passes /= 1.0 if work.fused_casts else FLOAT8_BANDWIDTH
    return rates.elementwise_seconds(work.itemsize * rank_rows(work) * passes, work.dtype)


def attention_time(work: Workload, rates: Rates, backward: bool) -> float:
    """Over all tokens of a sample; context parallelism deals out heads, or queries: the same work."""
    model, tp, cp = work.model, work.degrees.tp, work.degrees.cp
    shape = (work.states_at_once, max(model.heads // tp, 1), model.tokens, model.head_dim)
    seconds = rates.attention_seconds(*shape, work.dtype, backward, work.attention) / cp
    return seconds * model.computed_scores(work.attention)


def elementwise_passes(work: Workload, backward: bool) -> list[tuple[str, float]]:
    """(operation, units of s that it reads and writes) of a block; compiled, neighbours are fused.

    Forward: two norms, two sums of the residual stream, GELU. Backward: the same, the gradients of biases,
    which are sums over tokens, and the gradients of q, k and v put together.
    """
    hidden = work.model.mlp_dim / work.model.dim
    gelu = hidden * work.model.activation_passes(work.compiled, backward)
    turned = work.model.turning_units(work.itemsize, work.compiled)
    turned *= 2 if backward and not work.compiled else 1
    exchanged = [("copy", units)] if (units := exchange_units(work, backward)) else []
    if work.compiled and not backward:  # a sum and the norm after it in one pass
        return [("layer_norm", 8.0 + turned), ("gelu", gelu), *exchanged]
    if not backward:
        return [("layer_norm", 4.0 + turned), ("add", 6.0), ("gelu", gelu), *exchanged]
    sums = (5 + hidden) * work.model.biases + 3 * work.degrees.tp * work.model.gradient_sums
    if work.compiled:
        return [("layer_norm_backward", 8.0 + turned), ("gelu_backward", gelu), ("sum", sums), *exchanged]
    adds = [("layer_norm_backward", 6.0 + turned), ("add", 6.0), ("gelu_backward", gelu)]
    return [*adds, ("sum", sums), ("copy", 12.0), *exchanged]


def exchange_units(work: Workload, backward: bool) -> float:
    """Return the units of s that a pass copies or adds around its collectives.

    DTensor gathers into the first dim and moves tokens to the second (torch's _maybe_view_chunk_cat), and
    back before it scatters. Asynchronous products with a reduce-scatter copy their partial sums, of all
    tokens, to the ranks of these tokens, which read and add them (torch's _symmetric_memory). ulysses stacks
    q, k and v, puts them and the output in the order of ranks, then of tokens; all_gather does so with keys
    and values. The ring adds up its parts in float32.
    """
    model, cp, tp, half = work.model, work.degrees.cp, work.degrees.tp, work.itemsize
    moved = tp > 1 and work.states_at_once > 1 and not work.async_tp
    copied = 4 * tp * (1 + work.gathered_itemsize / half) * moved
    if work.async_tp and tp > 1 and not work.fused_casts:
        copied += 2 * (3 * tp + 1)
    grouped = kv_heads_sent(work) / model.heads
    if cp == 1:
        return copied
    if work.method == "ulysses":
        return copied + 4 * (1 + 2 * grouped) + 4 + (0 if work.compiled else 2 * (1 + 2 * grouped))
    if work.method == "all_gather":
        return copied + 4 * grouped * (1 + cp)
    merged = half + 8 + 44 * grouped if backward else half + 24
    return copied + cp * merged / half


def elementwise_time(work: Workload, rates: Rates, backward: bool) -> float:
    """Never less than a launch each: small tensors are bound by the host."""
    s = unit_bytes(work)
    copies = weight_cast_bytes(work) / work.rank_layers
    passes = [(operation, s * units) for operation, units in elementwise_passes(work, backward)]
    passes += [("cast", copies)] if copies else []
    if isinstance(rates, Device) and work.casts_norms:
        passes.append(("cast", s * NORM_CASTS[backward]))
    return sum(
        max(rates.elementwise_seconds(size, work.dtype, operation), rates.launch)
        for operation, size in passes
    )


def weight_cast_bytes(work: Workload) -> float:
    """Each pass: float32 weights read and half-precision copies written, or gradients the other way round.

    FSDP moves about as much: it casts shards, and copies what it gathered into place.
    """
    if work.itemsize == 4 and not work.uses_fsdp:
        return 0.0
    (block, number), _ = stage_shapes(work, first=False, last=False)
    return (4 + work.itemsize) * number * count(block)


def recomputed_times(work: Workload, rates: Rates) -> Times:
    """Seconds of the part of the forward pass that activation checkpointing repeats in the backward pass."""
    if work.ac_mode == "none":
        return Times()
    again = Times({"elementwise": elementwise_time(work, rates, backward=False)})
    if work.ac_mode == "selective":
        return again
    if work.ac_mode == "every_second_product":  # TorchTitan's "selective op": attention is kept
        again.add(linear_times(work, rates, backward=False) * 0.5)
        return again
    again.add(linear_times(work, rates, backward=False))
    again["attention"] += attention_time(work, rates, backward=False)
    if not work.compiled:  # recomputation stops before the last product of a segment
        segment = work.every_n if work.ac_mode == "every_n_blocks" else 1
        again["matmul"] -= linear_time(work, rates, "mlp.down", backward=False) / segment
    return again


# -- the ends, the fields and the update


def end_seconds(work: Workload, rates: Rates, backward: bool) -> Times:
    """Patch embedding, last norm and head of one micro-batch; no gradient goes into the patches."""
    model = work.model
    matmul = linear_time(work, rates, "head", backward)
    if model.in_features:
        matmul += linear_time(work, rates, "patch_embedding", backward=False)
    norm = rates.elementwise_seconds(unit_bytes(work) * (3 if backward else 2), work.dtype)
    outputs = backward * rank_rows(work) * model.out_features / work.degrees.tp
    loss = rates.elementwise_seconds(model.loss_bytes * outputs, work.dtype)
    return Times({"matmul": matmul, "elementwise": norm + loss})


def field_seconds(work: Workload, rates: Rates) -> float:
    """Fields of a micro-batch: normalised, cut, weighted, and their errors summed, in float32."""
    values = work.local_batch * work.members * work.field_values * work.rollout_steps
    pairs = PAIR_PASSES * work.members * (work.members > 1)
    passes = FIELD_PASSES_COMPILED if work.compiled else FIELD_PASSES + pairs
    passes += (work.history - 1) * (OLDER_PASSES_COMPILED if work.compiled else OLDER_PASSES)
    return rates.elementwise_seconds(4 * passes * values)


def update_seconds(work: Workload, rates: Rates) -> float:
    owners, number = work.degrees.dp_replicate if work.zero1 else 1, shard_parameters(work)
    kernels = rates.elementwise_seconds(update_bytes(work) / owners, "float32", "adamw")
    rest = rates.elementwise_seconds((CLIP_BYTES + AVERAGE_BYTES * work.ema) * number)
    return kernels + rest + orthogonal_seconds(work, rates) / owners


def update_bytes(work: Workload) -> float:
    """Read and written by a rank's optimiser."""
    number, inside = shard_parameters(work), 0.0
    if work.optimizer == "Muon":
        inside = number * work.model.layers * work.model.matrix_parameters / work.model.parameters
    return UPDATE_BYTES[work.optimizer] * (number - inside) + MUON_BYTES * inside


def orthogonal_seconds(work: Workload, rates: Rates) -> float:
    """Muon's products: every rank makes them of whole matrices, (m, n) with m <= n, of all its blocks."""
    if work.optimizer != "Muon":
        return 0.0
    dtype, total = "float32" if work.dtype == "float32" else "bfloat16", 0.0
    for m, n in (sorted(shape) for shape in work.model.block().values() if len(shape) == 2):
        products = ((m, n, m), (m, m, m), (m, m, n))
        total += sum(rates.linear_seconds(*product, dtype, backward=False) for product in products)
    return ITERATIONS * work.rank_layers * total


def host_update_seconds(work: Workload, cluster: Cluster) -> float:
    """Seconds of the update on the host (cpu_offload); the ranks of a node share its memory."""
    ranks = min(cluster.devices_per_node, work.degrees.world)
    moved = update_bytes(work) + CLIP_BYTES * shard_parameters(work)
    return moved * ranks / cluster.host_bandwidth


# -- FLOPs


def hardware_flops(work: Workload) -> float:
    """FLOPs of one sample, forward and backward, as the kernels run them (torch.utils.flop_counter).

    Attention's fused backward computes the scores again: 10 T^2 D, not 8. Patches have no gradient.
    """
    model = work.model
    ends = 2 * model.tokens * model.dim * (2 * model.in_features + 3 * model.out_features)
    fused = 2.5 if work.attention != "math" else 2
    attention = (1 + fused) * model.attention_flops()
    once = model.layers * (3 * model.matmul_flops() + attention) + ends + recomputed_flops(work)
    patches = 2 * model.tokens * model.dim * model.in_features  # have one where a state before them has
    between = (work.gradient_steps - 1) * patches
    forecast = model.flops() * (work.rollout_steps - 1)
    return work.members * (once * work.gradient_steps + between + forecast)


def recomputed_flops(work: Workload) -> float:
    """FLOPs of one sample and pass: blocks again, but for the last product of each recomputed segment."""
    model = work.model
    if work.ac_mode in ("none", "selective"):
        return 0.0
    if work.ac_mode == "every_second_product":
        return model.layers * model.matmul_flops() / 2
    segment = work.every_n if work.ac_mode == "every_n_blocks" else 1
    down = 2 * model.tokens * model.dim * model.mlp_dim
    again = model.block_flops() * model.layers - down * -(-model.layers // segment)
    return again
