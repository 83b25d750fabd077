"""Bytes of a rank in a training step, by component and by moment of the step.

Every formula is next to its component; docs/planning.md derives them. s below is a unit: the tokens of a
micro-batch that a rank holds between blocks, x width, in the precision of matrices.
"""

import math
from dataclasses import dataclass

from planning.architecture import Shapes, count, cut, padded
from planning.workload import Workload

GIB = 2**30
FLOAT32 = 4


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank; `moments` name what a step goes through, each with the components alive in it."""

    moments: dict[str, dict[str, float]]
    host: dict[str, float]  # in the memory of the host, a rank

    @property
    def peak_moment(self) -> str:
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def components(self) -> dict[str, float]:
        """At the peak."""
        return self.moments[self.peak_moment]

    @property
    def peak(self) -> float:
        return sum(self.components.values())


def memory(work: Workload) -> Memory:
    """Memory of the rank that needs most: of a pipeline the first or the last."""
    if work.degrees.pp == 1:
        return stage_memory(work, first=True, last=True)
    ends = [(True, False), (False, True)]
    if work.schedule == "ZBVZeroBubble":  # the first rank has the first stage and the last
        ends = [(True, True), (False, False)]
    return max((stage_memory(work, *end) for end in ends), key=lambda stage: stage.peak)


def stage_memory(work: Workload, first: bool, last: bool) -> Memory:
    """The moments at which a step can be at its peak, going through the backward pass block by block."""
    states, fields = state_bytes(work, first, last), field_bytes(work, last)
    copies = work.in_flight(first)  # micro-batches on their way through a pipeline
    stored = stored_bytes(work) * copies
    tokens = work.states_at_once * work.rank_tokens * work.itemsize * copies
    prediction = tokens * work.model.out_features * last
    norms = 2 * tokens * work.model.dim * last  # input and output of the last norm
    # The patches that the embedding took, where they are not the float32 ones.
    embedded = tokens * work.degrees.tp * work.model.in_features * (first and work.itemsize < FLOAT32)
    number = work.rank_layers  # of blocks that backward goes through
    added_up = pipeline_gradient_bytes(work, first, last)
    messages = message_bytes(work, first, last)
    if work.schedule == "GPipe":  # whose first backward pass has no gradients yet, and the next less stored
        added_up = max(added_up - stored / copies, 0.0)
    always = {key: states[key] for key in ("parameters", "optimiser states", "averaged weights")}
    step = {
        **always,
        "buckets of DDP": states["gradients"] * uses_ddp(work),
        "gradients of a pipeline": added_up,
        # Where a rank has two stages, torch keeps what it sends to the end of the step.
        "messages of a pipeline": messages * work.stages_of_rank,
        "copies of weights": weight_copies(work, first, last),
        "fields": fields,
        "batches on their way": work.copies_ahead * batch_bytes(work),
        "prediction": prediction,
    }
    # Gradients of activations in the backward pass of an MLP: of its output, by tensor parallelism before
    # and after it is gathered, and of GELU's; and that of the last product's weight.
    tp = work.degrees.tp
    in_mlp = unit_bytes(work) * (tp + (tp > 1) + work.model.mlp_dim / work.model.dim)
    whole, reducing = reduction_bytes(work)
    down = work.itemsize * work.model.mlp_dim * work.model.dim / tp
    # torch reduces the gradients of a pipeline block by block, but after the last micro-batch.
    meanwhile = 0 if work.reduces_last else reducing

    def backward(done: int, gathered: int, working: bool, reduction: float) -> dict[str, float]:
        """When `done` blocks have their gradients and, `working`, the next is in its MLP's backward."""
        return {
            **step,
            "gradients": states["gradients"] * gradients_alive(work, done) / number,
            "gathered parameters": gathered_bytes(work, first, last, gathered + done * work.reduces_last),
            "activations": stored * (1 - done / number) + embedded,
            "recomputed": recomputed(work) * working,
            "gradients of activations": in_mlp * working,
            "gradients being reduced": reduction,
        }

    loss = {**step, "gathered parameters": gathered_bytes(work, first, last, 1)}
    loss |= {"activations": stored + embedded + norms, "loss": loss_bytes(work) * last}
    loss |= {} if fresh_gradients(work) else {"gradients": states["gradients"]}
    both = whole + reducing
    moments = {
        "loss": loss,
        "backward of the first block": backward(0, 2, True, down),
        "backward of the second block": backward(min(1, number - 1), 2, True, down + meanwhile),
    }
    if not work.reduces_last:
        moments["reduction of the first block"] = backward(1, 2, False, both)
        moments["reduction of the last block but one"] = backward(max(number - 2, 0), 2, False, both)
    moments["backward of the last block"] = backward(number - 1, 1, True, down + meanwhile)
    if work.rollout_steps > 1:  # a pipeline makes the forecasts of all micro-batches at once
        units = 3 + tp + 2 * work.model.mlp_dim / work.model.dim
        moments["forecast of a rollout"] = step | {
            "gradients": states["gradients"] * (work.accumulation > 1),
            "gathered parameters": loss["gathered parameters"],
            "fields": forecast_field_bytes(work),
            "activations": work.micro_batches * unit_bytes(work) * units,
            "prediction": 0,
            "gradients of a pipeline": 0,
            "messages of a pipeline": messages,
        }
    if "ZeroBubble" in work.schedule and work.degrees.pp > 1:
        # Gradients of a stage's inputs are complete, and those of its weights wait for their own pass.
        waiting = unit_bytes(work) * (work.model.qkv_features + work.model.mlp_dim) / work.model.dim
        split = backward(0, 2, False, 0) | {"gradients": states["gradients"]}
        split["gradients of activations"] = waiting * number / work.stages_of_rank
        moments["between backward passes of inputs and of weights"] = split
    if work.reduces_last:
        moments["reduction after the pipeline"] = {
            **step,
            "gathered parameters": gathered_bytes(work, first, last, number),
            "gradients": states["gradients"] / (number if fresh_gradients(work) else 1),
            "gradients being reduced": reducing,
        }
    moments["update"] = {
        **always,
        "gradients": states["gradients"],
        "fields": fields,
        "messages of a pipeline": messages,
        "batches on their way": step["batches on their way"],
        "matrix made orthogonal": orthogonal_bytes(work),
    }
    used = {name: {k: v for k, v in parts.items() if v} for name, parts in moments.items()}
    return Memory(used, host_bytes(work, states))


# -- what stays from step to step


def stage_shapes(work: Workload, first: bool, last: bool) -> list[tuple[Shapes, int]]:
    """(parameters, how many such units) of a stage after tensor parallelism, as FSDP wraps them."""
    rest: Shapes = {}
    rest |= work.model.first() if first else {}
    rest |= work.model.last() if last else {}
    tp = work.degrees.tp
    return [(cut(work.model.block(), tp), work.rank_layers), (cut(rest, tp), 1)]


def shard_parameters(work: Workload, first: bool = True, last: bool = True) -> int:
    """Parameters of this rank: FSDP pads the first dim of each to a multiple of its ranks."""
    units = stage_shapes(work, first, last)
    ranks = work.fsdp_ranks if work.uses_fsdp else 1
    return sum(number * padded(unit, ranks) // ranks for unit, number in units)


def state_bytes(work: Workload, first: bool = True, last: bool = True) -> dict[str, float]:
    """float32 master parameters, gradients, two moments; ZeRO-1 deals the moments out over replicas."""
    number = shard_parameters(work, first, last)
    on_device = 0 if work.offload else 1
    owners = work.degrees.dp_replicate if work.zero1 else 1
    return {
        "parameters": on_device * FLOAT32 * number,
        "gradients": on_device * FLOAT32 * number,
        "optimiser states": on_device * work.state_itemsize * number / owners,
        "averaged weights": on_device * FLOAT32 * number * work.ema,
    }


def host_bytes(work: Workload, states: dict[str, float]) -> dict[str, float]:
    """A checkpoint is copied to the host before it is written: one copy of parameters, moments, averages.
    Batches wait there as they were read.
    """
    number = shard_parameters(work)
    saved = (FLOAT32 + work.state_itemsize + FLOAT32 * work.ema) * number
    offloaded = (FLOAT32 * number + saved) * work.offload
    return {
        "checkpoint being written": saved * work.asynchronous,
        "offloaded states": offloaded,
        "batches read ahead": work.batches_ahead * batch_bytes(work),
    }


def orthogonal_bytes(work: Workload) -> float:
    """Muon's largest matrix, whole: as gathered, twice in the iteration, its square at most twice."""
    if work.optimizer != "Muon":
        return 0
    sizes = [math.prod(shape) for shape in work.model.block().values() if len(shape) == 2]
    return 5 * work.itemsize * max(sizes)


# -- parameters in use


def weight_copies(work: Workload, first: bool, last: bool) -> float:
    """Autocast's copy of each matrix; FSDP gathers in that precision instead.

    Compiled blocks that are computed again cast theirs again: one block's are alive.
    """
    if work.uses_fsdp or work.itemsize == FLOAT32:
        return 0
    (block, number), (rest, _) = stage_shapes(work, first, last)
    again = work.compiled and work.ac_mode != "none"
    units = [(block, 1 if again else number), (rest, 1)]
    matrices = sum(n * count({k: s for k, s in unit.items() if len(s) > 1}) for unit, n in units)
    return work.itemsize * matrices


def gathered_bytes(work: Workload, first: bool, last: bool, blocks: int) -> float:
    """FSDP: `blocks` blocks, and all the time what is in no block; "never" keeps all blocks, and so does a
    pipeline.

    In the backward pass two: one computes while the next is gathered. Those before stay in a pipeline.
    """
    if not work.uses_fsdp:
        return 0
    (block, number), (rest, _) = stage_shapes(work, first, last)
    alive = number if work.reshard == "never" or work.stays_gathered else min(blocks, number)
    return work.itemsize * (alive * padded(block, work.fsdp_ranks) + padded(rest, work.fsdp_ranks))


def reduction_bytes(work: Workload) -> tuple[float, float]:
    """FSDP: a block's gradients whole in the precision of matrices, and the copy that is being reduced."""
    if not work.uses_fsdp:
        return 0, 0
    block = padded(cut(work.model.block(), work.degrees.tp), work.fsdp_ranks)
    return work.itemsize * block, work.reduce_itemsize * block


def fresh_gradients(work: Workload) -> bool:
    """Return True if gradients appear in the last backward pass, not in an earlier one."""
    return (work.reductions if work.uses_fsdp else work.passes) == 1


def uses_ddp(work: Workload) -> bool:
    """Return True if DDP reduces gradients, in buckets that it allocates once and for all.

    Gradients of a single pass are parts of them; those of earlier ones are copied there in the last.
    """
    return work.degrees.dp_replicate > 1 and not work.uses_fsdp


def gradients_alive(work: Workload, done: int) -> int:
    """Number of blocks with gradients of their own, when `done` have passed their backward pass."""
    if not fresh_gradients(work):
        return work.rank_layers
    return 0 if work.reduces_last or uses_ddp(work) else max(done, 0)


def pipeline_gradient_bytes(work: Workload, first: bool, last: bool) -> float:
    """Bytes of a stage's unsharded gradients, which its micro-batches add up and exchange after the last.

    Without a pipeline FSDP reduces and scatters the gradients of every pass.
    """
    if not work.reduces_last:
        return 0
    itemsize = max(work.reduce_itemsize, work.itemsize)
    if "ZeroBubble" in work.schedule and work.itemsize < itemsize:
        # Gradients of weights that are computed by themselves do not reach the sums of FSDP: they are added
        # up in half precision, too, on the last rank for both of its stages (torch 2.13).
        itemsize += work.itemsize
    return itemsize * sum(number * count(unit) for unit, number in stage_shapes(work, first, last))


def message_bytes(work: Workload, first: bool, last: bool) -> float:
    """Buffers of what a rank's stages receive, one for each micro-batch's tokens and one for its gradients.

    torch keeps them from step to step.
    """
    kinds = 2 * work.stages_of_rank - first - last if work.degrees.pp > 1 else 0
    return kinds * work.micro_batches * unit_bytes(work)


# -- activations


def unit_bytes(work: Workload) -> float:
    """s: tokens of this rank x width x bytes."""
    return work.states_at_once * work.rank_tokens * work.model.dim * work.itemsize


def block_activations(work: Workload, mode: str) -> float:
    """Bytes that a block stores between its forward and backward pass (docs/speed.md).

    Tensor parallelism keeps what it gathered: the inputs of qkv and up in mode "none", and the partial sums
    of projection in mode "selective", are of the tokens of all its ranks.
    """
    model, s, tp = work.model, unit_bytes(work), work.degrees.tp
    hidden = model.hidden_kept  # before GELU; again after it
    qkv = model.qkv_features / model.dim
    sums = 4 * work.states_at_once * model.heads / tp * work.rank_tokens * tp  # log-sum-exp of attention
    if mode == "full":
        return s
    if mode == "every_n_blocks":
        return s / work.every_n
    if mode == "selective":
        casts = work.float8 and not work.compiled  # the compiler computes them again, too
        return s * (1 + qkv + 1 + hidden + casts) + s * tp + scores_bytes(work) + sums
    turns = FLOAT32 * work.rank_tokens * tp * model.head_dim * model.axial  # cosines and sines
    exchanged = 1 if work.degrees.cp > 1 else 0  # attention's output before and after it went back
    if work.method == "all_gather" and exchanged:  # keys and values of all ranks instead
        exchanged = (qkv - 1) * work.degrees.cp
        qkv = 0 if model.axial else qkv  # which are turned before, and queries with them
    statistics = 16 * work.states_at_once * work.rank_tokens
    units = 1 + qkv + normed(work) + 1 + exchanged + 1 + 2 * hidden
    return s * units + 2 * s * tp + scores_bytes(work) + sums + statistics + turns


def normed(work: Workload) -> int:
    """Queries, keys and values that are not parts of the qkv product's output, in units: normed or turned."""
    around = work.method if work.degrees.cp > 1 else ""
    if not work.model.qk_norm and (not work.model.axial or around == "ulysses"):
        return 0  # what came back is kept, not what was turned
    return 2 if around in ("ring", "all_gather") else 3  # values go to other ranks as they are


def scores_bytes(work: Workload) -> float:
    """The "math" kernel keeps T x T numbers a head, but computes them again around a ring."""
    if work.attention != "math" or (work.degrees.cp > 1 and work.method == "ring"):
        return 0
    queries = work.rank_tokens * work.degrees.tp
    heads = work.model.heads / work.degrees.tp
    return work.states_at_once * heads * queries * work.model.tokens * work.itemsize


def stored_bytes(work: Workload) -> float:
    """Bytes of all blocks, from their forward pass to their backward pass."""
    return work.rank_layers * block_activations(work, work.ac_mode)


def recomputed(work: Workload) -> float:
    """Bytes that a block's backward pass computes again, in addition to those that were stored.

    "selective": norms, the middle of the residual stream, GELU, while the output of projection is no longer
    needed. "full" and "every_n_blocks": all that mode "none" keeps of the blocks that are recomputed as one.
    """
    s, tp = unit_bytes(work), work.degrees.tp
    if work.ac_mode == "selective":
        return s * (1 + tp + work.model.mlp_dim / work.model.dim + normed(work))
    if work.ac_mode in ("full", "every_n_blocks"):
        number = min(work.every_n if work.ac_mode == "every_n_blocks" else 1, work.rank_layers)
        return number * block_activations(work, "none") - s
    return 0.0


def field_bytes(work: Workload, last: bool = True) -> float:
    """float32: the states as read, windows of a rollout, and the shards of input, truth and weights, the last
    two kinds of each member.

    Of a rollout there is, too, the gradient of the next window, and the shard of its new state.
    """
    cp, tp, crosses = work.degrees.cp, work.degrees.tp, work.gradient_steps > 1
    times = 2 if work.degrees.pp > 1 and last else 1  # what a pipeline's last stage needs is stacked
    shards = work.input_values / cp + times * (2 + crosses) * work.field_values / (cp * tp)
    windows = work.rollout_steps * (work.rollout_steps > 1) + crosses
    whole = work.states_read + work.members * work.history * windows
    return FLOAT32 * work.local_batch * (whole * work.field_values + work.members * shards)


def forecast_field_bytes(work: Workload) -> float:
    """float32, of a rollout's forecast: the states as read, the windows so far, and of the last one the state
    in physical units and as normalised, and the input before and after it is cut into patches.
    """
    windows = work.history * (work.rollout_steps - 1) + 2
    of_member = windows * work.field_values + 2 * work.input_values
    return FLOAT32 * work.local_batch * (work.states_read * work.field_values + work.members * of_member)


def batch_bytes(work: Workload) -> float:
    """Bytes of a micro-batch as the loader gives it, in float32; a store of float16 has half."""
    return FLOAT32 * work.local_batch * work.states_read * work.field_values


def loss_bytes(work: Workload) -> float:
    """The gradient of the predictions, and in float32 the errors of one sample, twice; CRPS has those of all
    members, and the sums of their distances, before and after one is added.
    """
    values, copies = work.rank_tokens * work.model.out_features, 4 * work.members if work.members > 1 else 2
    return (work.states_at_once * work.itemsize + copies * FLOAT32) * values
