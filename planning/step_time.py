"""Seconds of a training step by class: computation, exposed communication, waits.

Computation is a roofline by class of kernel: work over the rate that the class reaches on a device.

While a block computes, the parameters of the next are gathered and the gradients of the last reduced; only
the time beyond the computation is exposed. Collectives of tensor and context parallelism, except the ring's,
are between operations and fully exposed.

planning/error_bands.toml has the errors of plans of published runs by kind, which
benchmarks/planner_published.py writes. A kind that is not there has too few runs.
"""

import tomllib
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

from planning import constants
from planning.clusters import Cluster, Device
from planning.constants import FLOAT32
from planning.memory import shard_parameters, stage_shapes, unit_bytes
from planning.network import axis_seconds, rollout_collectives, route, sample_collectives, seconds
from planning.workload import Workload, count, cut, padded

Times = dict[str, float]  # class of kernel -> seconds
BANDS = Path(__file__).with_name("error_bands.toml")
ANCHORED = "anchored, "  # before a kind of layout: planned with a measured run of the same kind and machine


@dataclass(frozen=True)
class Band:
    """Measured over planned seconds of a step: limits of nine tenths of the runs, and the median."""

    runs: int
    fastest: float
    median: float
    slowest: float


ERROR_BANDS = {name: Band(**keys) for name, keys in tomllib.loads(BANDS.read_text(encoding="utf-8")).items()}


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimiser step on the slowest rank, by class; all classes add up to `total`."""

    computing: dict[str, float]
    communicating: dict[str, float]  # exposed
    waiting: dict[str, float]
    samples: int  # of the global batch
    hidden: float  # seconds of collectives of parameters and gradients, while others compute
    kind: str  # of known runs: with this kind of layout, anchored or not
    band: Band | None  # None: too few runs of this kind are known, or none on a CPU

    @property
    def classes(self) -> dict[str, float]:
        """Name -> seconds of the classes that take any."""
        every = self.computing | self.communicating | self.waiting
        return {name: seconds for name, seconds in every.items() if seconds > 0}

    @property
    def total(self) -> float:
        return sum(self.classes.values())

    @property
    def limits(self) -> tuple[float, float] | None:
        """The fastest and the slowest step by the error band; None: no run of the kind is known."""
        return (self.total * self.band.fastest, self.total * self.band.slowest) if self.band else None

    @property
    def exposed(self) -> float:
        """Seconds of exposed communication."""
        return sum(self.communicating.values())

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.total

    def mfu(self, work: Workload, peak: float) -> float:
        """Model FLOP/s over the dense bf16 peak of all devices."""
        return work.sample_flops * self.samples_per_second / (peak * work.degrees.world)


def step_time(work: Workload, cluster: Cluster) -> StepTime:
    """Return the seconds of a step on the slowest rank, scaled by the cluster's anchor if there is one."""
    device, layers, rows = cluster.device, work.rank_layers, rank_rows(work)
    axes = ("fsdp", "dp_replicate", "cp", "tp", "pp")
    routes = {axis: route(cluster, work.degrees, axis) for axis in axes}
    passes = (work.passes + work.forecasts, work.passes)  # of a step, forward and backward
    computing: Times = defaultdict(float)
    communicating: Times = defaultdict(float)
    in_block, inside = [], 0.0  # of a micro-batch: one block forward and backward; all that communicates

    for backward, number in zip((False, True), passes, strict=True):
        # -- what computes in a block
        times = linear_seconds(work, device, backward)
        times["attention"] = attending = attention_seconds(work, device, backward)
        times["elementwise"] = elementwise_seconds(work, device, backward)
        if backward and work.ac_mode != "none":
            again = elementwise_seconds(work, device, backward=False)
            if work.ac_mode != "selective":
                again += sum(linear_seconds(work, device, False).values())
                again += attention_seconds(work, device, False)
                if not work.compiled:  # recomputation stops before the last product of a segment
                    outputs, inputs = cut(work.model.block, work.degrees.tp)["mlp.down.weight"]
                    again -= device.linear_seconds(rows, inputs, outputs, work.dtype, False) / work.segment
            times["recomputed"] = again
        in_block.append(sum(times.values()))
        for name, value in times.items():
            computing[name] += number * layers * value

        # -- what communicates within a sample: collectives of tp and cp, and the sends of a pipeline
        of_axes = dict.fromkeys(("tp", "cp"), 0.0) | axis_seconds(sample_collectives(work)[backward], routes)
        of_axes = {axis: transfer * layers / work.model.layers for axis, transfer in of_axes.items()}
        if work.method == "ring":  # which attention hides
            hidden = layers * attending * (1 - 1 / work.degrees.cp)
            of_axes["cp"] = max(of_axes["cp"] - hidden, 0.0)
        # A stage sends its tokens on, and their gradients back, and waits for those of its neighbours.
        of_axes["pp"] = work.stages_of_rank * seconds("send", unit_bytes(work), routes["pp"])
        if work.stages_of_rank > 1:  # of one stage while the next computes
            of_axes["pp"] = max(of_axes["pp"] - layers * in_block[backward], 0.0)
        for axis, transfer in of_axes.items():
            communicating[axis] += number * transfer
            inside += transfer
    for axis, transfer in axis_seconds(rollout_collectives(work), routes).items():
        communicating[axis] += work.forecasts * transfer * (work.degrees.pp == 1)

    # -- what computes outside blocks: the ends of the model, which are never in float8, fields, the update
    shapes = cut(work.model.first | work.model.last, work.degrees.tp)
    head, embedding = (
        device.linear_seconds(rows, inputs, outputs, work.dtype, backward=False)
        for outputs, inputs in (shapes["head.weight"], shapes.get("patch_embedding.weight", (0, 0)))
    )
    computing["matmul"] += passes[0] * (head + embedding)
    computing["matmul"] += passes[1] * (2 * head + embedding)  # no gradient goes into the patches
    # Fields of a micro-batch are normalised, cut, weighted, and their errors summed, in float32.
    newest, older = constants.FIELD_PASSES[work.compiled]
    pairs = constants.PAIR_PASSES * work.members * (work.members > 1 and not work.compiled)
    size = FLOAT32 * (newest + pairs + (work.history - 1) * older) * work.accumulation
    size *= work.local_batch * work.members * work.field_values * work.rollout_steps
    computing["fields"] = device.elementwise_seconds(size) if size else 0.0
    # The update: cpu_offload uses the host memory, shared by the ranks of a node. Muon's products: every rank
    # makes them of whole matrices, (m, n) with m <= n, of all its blocks.
    if work.offload:
        moved = update_bytes(work) + constants.CLIP_BYTES * shard_parameters(work)
        ranks = min(cluster.devices_per_node, work.degrees.world)
        computing["update"] = moved * ranks / cluster.host_bandwidth
    else:
        owners = work.degrees.dp_replicate if work.zero1 else 1
        kernels = device.elementwise_seconds(update_bytes(work) / owners)
        of_all = (constants.CLIP_BYTES + constants.AVERAGE_BYTES * work.ema) * shard_parameters(work)
        products = 0.0
        for shape in work.model.block.values() if work.optimizer == "Muon" else ():
            if len(shape) == 2:
                m, n = sorted(shape)
                for inputs, outputs in ((n, m), (m, m), (m, n)):
                    products += device.linear_seconds(m, inputs, outputs, work.dtype, False)
        products *= constants.ITERATIONS * work.rank_layers / owners
        computing["update"] = kernels + device.elementwise_seconds(of_all) + products

    # -- data parallelism, of which a part is hidden; what is hidden slows what computes. FSDP reduces and
    # scatters gradients in every pass, and all-reduces them over replicas (HSDP) in the last. Those of a
    # pipeline are reduced after the last micro-batch of a batch, when nothing is left to hide it. cpu_offload
    # copies a rank's shard to the device before each gather, and its gradients back. DDP reduces buckets in
    # the backward pass, and nothing hides the last one; ZeRO-1 then gathers the updated weights.
    forward, backward = in_block
    replicas, exposed, total = routes["dp_replicate"], 0.0, 0.0
    if not work.uses_fsdp and replicas.ranks > 1:
        size = FLOAT32 * sum(n * count(unit) for unit, n in stage_shapes(work, first=True, last=True))
        buckets = max(round(size / constants.BUCKET), 1)
        bucket = seconds("all-reduce", size / buckets, replicas)
        gathered = seconds("all-gather", size, replicas) * work.zero1
        exposed = bucket + max((buckets - 1) * bucket - backward * layers, 0.0) + gathered
        total = buckets * bucket + gathered
    elif work.uses_fsdp:
        block = padded(cut(work.model.block, work.degrees.tp), work.fsdp_ranks)
        shard = block / work.fsdp_ranks
        gather = seconds("all-gather", work.itemsize * block, routes["fsdp"])
        scatter = seconds("reduce-scatter", work.reduce_itemsize * block, routes["fsdp"])
        all_reduce = seconds("all-reduce", work.reduce_itemsize * shard, replicas)
        gathers_again = not work.stays_gathered and work.reshard != "never"  # in the backward pass
        forwards = work.passes + work.forecasts * gathers_again
        forwards = work.reductions if work.stays_gathered else forwards
        gathers = forwards + work.passes * gathers_again
        total = layers * (gathers * gather + work.reductions * scatter + all_reduce)
        copy = FLOAT32 * shard / cluster.host_link * work.offload
        gather += copy
        scatter += copy
        again = gather * gathers_again  # on the same network as reductions
        exposed = forwards * (gather + (layers - 1) * max(gather - forward, 0.0))  # nothing hides the first
        if work.reduces_last:
            exposed += work.passes * layers * max(again - backward, 0.0)
            exposed += work.reductions * layers * (scatter + all_reduce)
        else:
            exposed += layers * max(again + scatter + all_reduce - backward, 0.0) + scatter + all_reduce
            exposed += (work.reductions - 1) * layers * max(again + scatter - backward, 0.0)
    hidden = max(total - exposed, 0.0)
    ring = routes["fsdp" if work.uses_fsdp else "dp_replicate"].ring
    slower = 0.0 if cluster.shared else constants.NCCL_SLOWDOWN
    computing["slowed by collectives"] = slower * ring.bandwidth / cluster.inside.bandwidth * hidden
    names = {"tp": "exposed tensor parallel", "cp": "exposed context parallel", "pp": "exposed pipeline"}
    sent = {names[axis]: transfer for axis, transfer in communicating.items()}
    sent |= {"exposed data parallel": exposed}

    # -- stages wait for the slowest rank of the one before, and all ranks for the one that computes longest.
    # A pipeline idles for p - 1 micro-batches of one of a rank's stages; zero-bubble schedules fill all but
    # the gradients of inputs, a third. The forecasts of a rollout pass one stage at a time.
    slowest = 1.0 if cluster.shared else spread(work.degrees.world)
    idle = (1 / 3 if "ZeroBubble" in work.schedule else 1.0) / work.stages_of_rank
    bubble = work.accumulation * work.rollout_steps * (sum(in_block) * layers + inside) * idle
    bubble = (work.degrees.pp - 1) * (bubble + work.forecasts * in_block[0] * layers)
    waiting = {"bubble": slowest * bubble, "stragglers": (slowest - 1) * sum(computing.values())}
    if not cluster.shared:  # a GPU waits for the host where kernels are short
        more = constants.FSDP_OPERATORS * work.uses_fsdp
        operators = [more + number for number in constants.OPERATORS[work.compiled]]
        launching = constants.LAUNCH * layers * (operators[0] * passes[0] + operators[1] * passes[1])
        waiting["launches"] = max(launching - sum(computing.values()), 0.0)

    # -- a measured run of this kind corrects all seconds; known runs of its kind have a band of errors
    is_anchored = cluster.anchor == work.kind
    factor, kind = (cluster.anchor_factor, ANCHORED + work.kind) if is_anchored else (1.0, work.kind)
    band = None if cluster.shared and not is_anchored else ERROR_BANDS.get(kind)
    scaled = [{k: factor * v for k, v in times.items()} for times in (computing, sent, waiting)]
    return StepTime(scaled[0], scaled[1], scaled[2], work.global_batch, factor * hidden, kind, band)


def spread(devices: int) -> float:
    """Ratio of the slowest of `devices` to the one that rates are of, in time.

    Speeds are normally distributed: the slowest of n is z(n) deviations below the mean, the fastest of a
    node z(8) above it, and a node's difference is 2 z(8) deviations.
    """
    if devices == 1:
        return 1.0
    node = normal_maximum(constants.NODE)
    return 1 + constants.SPREAD * (normal_maximum(devices) + node) / (2 * node)


def normal_maximum(number: int) -> float:
    """Expected largest of `number` standard normal numbers (Blom 1958), within 1 %."""
    return NormalDist().inv_cdf((number - 0.375) / (number + 0.25))


# -- computation of a block


def rank_rows(work: Workload) -> int:
    """Tokens that a matrix of this rank multiplies at once: those of all its tp ranks."""
    return work.states_at_once * work.rank_tokens * work.degrees.tp


def linear_seconds(work: Workload, device: Device, backward: bool) -> Times:
    """Return seconds of linear layers. float8 casts the input, backward the gradient, and transposes both."""
    times, rows = defaultdict(float), rank_rows(work)
    dtype = "float8" if work.float8 else work.dtype
    for shape in cut(work.model.block, work.degrees.tp).values():
        if len(shape) == 2:
            outputs, inputs = shape
            times["matmul"] += device.linear_seconds(rows, inputs, outputs, dtype, backward)
            units = constants.FLOAT8_CAST * (outputs if backward else inputs)
            units += constants.FLOAT8_TRANSPOSE * (inputs + outputs) * backward
            size = work.float8 * work.itemsize * rows * units / constants.FLOAT8_BANDWIDTH
            if size:
                operation = "float8_backward" if backward else "float8"
                times["float8 casts"] += device.elementwise_seconds(size, operation)
    return times


def attention_seconds(work: Workload, device: Device, backward: bool) -> float:
    """Return the mean seconds of attention in a block; context parallelism shards it by heads or queries."""
    model, heads, seconds = work.model, max(work.model.heads // work.degrees.tp, 1), 0.0
    blocks = Counter(model.window_tokens or (model.tokens,))
    for size, number in blocks.items():
        windows = work.states_at_once * (model.tokens // size)
        seconds += number * device.attention_seconds(
            windows, heads, size, model.head_dim, work.dtype, backward, work.attention
        )
    return seconds / blocks.total() / work.degrees.cp


def elementwise_seconds(work: Workload, device: Device, backward: bool) -> float:
    """Return the seconds in which a block reads and writes its tokens; compiled, neighbours are fused.

    Gradients of biases are sums over tokens. Each pass also casts weights: float32 ones are read and copies
    written, or gradients the other way round; FSDP moves about as much, as it casts shards and copies what it
    gathered into place.
    """
    hidden = work.model.mlp_dim / work.model.dim
    activation, passes = constants.ACTIVATION_PASSES[backward]
    units = constants.PASSES[work.compiled, backward] | {activation: passes * hidden}
    if not work.compiled and work.itemsize < FLOAT32:
        units["norm cast"] = constants.NORM_CASTS[backward]
    units["sum"] = (5 + hidden) * backward
    sizes = {operation: unit_bytes(work) * number for operation, number in units.items()}
    if work.itemsize < FLOAT32 or work.uses_fsdp:
        sizes["cast"] = (FLOAT32 + work.itemsize) * count(cut(work.model.block, work.degrees.tp))
    return sum(device.elementwise_seconds(size, operation) for operation, size in sizes.items() if size)


# -- the update


def update_bytes(work: Workload) -> float:
    """Read and written by a rank's optimiser; one that was not measured counts as AdamW."""
    number, inside = shard_parameters(work), 0.0
    if work.optimizer == "Muon":
        inside = number * work.model.matrix_parameters / work.model.parameters
    measured = constants.UPDATE_BYTES.get(work.optimizer, constants.UPDATE_BYTES["AdamW"])
    return measured * (number - inside) + constants.MUON_BYTES * inside
