"""Bytes of a rank in a training step, by component and by moment of the step.

Every formula is next to its component; docs/planning.md derives them. s below is a unit: the tokens of a
micro-batch that a rank has between blocks, x width, in the precision of matrices.
"""

import statistics
from dataclasses import dataclass

from planning.constants import FLOAT32
from planning.workload import Shapes, Workload, count, cut, padded


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank; `moments` name what a step goes through, each with the components alive in it."""

    moments: dict[str, dict[str, float]]
    host: float  # of the host: what cpu_offload moves there, and its copy while a checkpoint is written

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
    return max((stage_memory(work, first, last) for first, last in ends), key=lambda stage: stage.peak)


def stage_memory(work: Workload, first: bool, last: bool) -> Memory:
    """Return the memory at the possible peaks of a step: the loss, the backward pass of some blocks, a
    reduction of FSDP, and the forecast of a rollout. first, last: whether the stage has ends of the model.
    """
    model, tp, number = work.model, work.degrees.tp, work.rank_layers
    s, copies = unit_bytes(work), work.in_flight(first)
    tokens, values = s / model.dim * copies, work.field_values
    (block, _), (ends, _) = stage_shapes(work, first, last)

    # DDP reduces gradients in buckets that are always there: gradients of one pass are parts of them, those
    # of earlier passes are copied there in the last.
    uses_ddp = work.degrees.dp_replicate > 1 and not work.uses_fsdp
    # -- what stays from step to step: float32 masters, gradients, moments (ZeRO-1 shards them), averages
    masters = FLOAT32 * shard_parameters(work, first, last) * (not work.offload)
    owners = work.degrees.dp_replicate if work.zero1 else 1
    messages = message_bytes(work, first, last)
    always = {
        "parameters": masters,
        "optimiser states": work.state_itemsize / FLOAT32 * masters / owners,
        "averaged weights": masters * work.ema,
        # As the loader gives them, in float32; a store of float16 has half.
        "batches on their way": work.copies_ahead * FLOAT32 * work.local_batch * work.states_read * values,
    }
    # Autocast copies each matrix; FSDP gathers in that precision instead, and float8 casts in every pass.
    # Compiled blocks that are computed again cast theirs again: one block's are alive.
    copied = not work.uses_fsdp and work.itemsize < FLOAT32 and not work.float8
    of_block, of_ends = (count({k: v for k, v in shapes.items() if len(v) > 1}) for shapes in (block, ends))
    alive = 1 if work.compiled and work.ac_mode != "none" else number
    weights = work.itemsize * copied * (alive * of_block + of_ends)

    # -- what a step keeps until its backward passes
    stored = number * block_activations(work, work.ac_mode) * copies
    # The patches that the embedding took, where they are not the float32 ones.
    patches = tokens * tp * model.in_features * (first and work.itemsize < FLOAT32)
    pipeline = pipeline_gradient_bytes(work, first, last)
    if work.schedule == "GPipe":  # the first backward pass has no gradients yet, the next less stored
        pipeline = max(pipeline - stored / copies, 0.0)
    # Fields in float32: the states as read and, if they are, as rolled; windows of a rollout; and the shards
    # of input, truth and weights, the last two kinds of each member. Of a rollout there is, too, the gradient
    # of the next window, and the shard of its new state.
    crosses = work.rollout_steps > 1
    stacked = 2 if work.degrees.pp > 1 and last else 1  # what a pipeline's last stage needs
    shards = stacked * (2 + crosses) * values / (work.degrees.cp * tp) + work.input_values / work.degrees.cp
    windows = work.history * (work.rollout_steps + 1) * crosses
    states = work.states_read * (1 + work.rolls) + work.members * windows
    step = always | {
        "fields": FLOAT32 * work.local_batch * (states * values + work.members * shards),
        "buckets of DDP": masters * uses_ddp,
        "gradients of a pipeline": pipeline,
        # If a rank has two stages, torch keeps sent tensors until the end of the step.
        "messages of a pipeline": messages * work.stages_of_rank,
        "copies of weights": weights,
        "prediction": tokens * model.out_features * last,
    }
    # Gradients appear in the last backward pass, or are there from earlier ones.
    fresh = (work.reductions if work.uses_fsdp else work.passes) == 1
    earlier = masters * (not fresh)
    new_gradients = masters / number * (fresh and not uses_ddp and not work.reduces_last)

    # -- the loss: the gradient of the predictions, and in float32 the errors of one sample, twice; CRPS has
    # those of all members, and the sums of their distances, before and after one is added
    errors = 4 * work.members if work.members > 1 else 2
    predicted = work.rank_tokens * model.out_features
    loss = step | {
        "gradients": earlier,
        "gathered parameters": gathered_bytes(work, first, last, 1),
        "activations": stored + patches,
        "loss": (work.states_at_once * work.itemsize + errors * FLOAT32) * predicted * last,
    }
    # -- what a block's backward pass computes again. "selective": norms, the middle of the residual stream,
    # GELU, while the output of projection is no longer needed. "full" and "every_n_blocks": all that mode
    # "none" keeps of the blocks that are recomputed as one.
    recomputed = 0.0
    if work.ac_mode == "selective":
        gathered = work.degrees.cp * (work.shares_by == "all_gather")  # keys and values of so many ranks
        keys = (model.qkv_features / model.dim - 1) * gathered
        recomputed = s * (1 + tp + model.hidden_units + normed(work) + keys)
    elif work.ac_mode != "none":
        recomputed = work.segment * block_activations(work, "none") - s
    # -- the backward pass: gradients of activations of an MLP (of its output, by tensor parallelism before
    # and after it is gathered, and of GELU's) and that of the last product's weight. Uncompiled, float8 casts
    # the input of mlp.down in float32 twice, as scaled and as clamped.
    down = work.itemsize * model.mlp_dim * model.dim / tp
    casts = 1.4 + (2 * FLOAT32 / work.itemsize + 0.5) * model.mlp_dim / model.dim
    backward = loss | {
        "gathered parameters": gathered_bytes(work, first, last, 2),
        "loss": 0.0,
        "recomputed": recomputed,
        "gradients of activations": s * (tp + (tp > 1) + model.hidden_units),
        "gradients being reduced": down,
        "float8 casts": s * casts * (work.float8 and not work.compiled),
    }
    # FSDP reduces the gradients of a block, in a copy, while the next one computes; of a pipeline at the end.
    reducing = work.reduce_itemsize * padded(block, work.fsdp_ranks)
    reducing *= work.uses_fsdp and not work.reduces_last
    second = backward | {
        "gradients": earlier or new_gradients,
        "gathered parameters": gathered_bytes(work, first, last, 2 + work.reduces_last),
        "activations": stored * (1 - 1 / number) + patches,
        "gradients being reduced": down + reducing,
    }
    moments = {"loss": loss, "backward of the first block": backward, "backward of the second block": second}
    # The peak where blocks keep little, next to whole gradients: with "every_n_blocks".
    moments["backward of the last block"] = second | {
        "gradients": earlier or new_gradients * (number - 1),
        "gathered parameters": gathered_bytes(work, first, last, 1 + (number - 1) * work.reduces_last),
        "activations": stored / number + patches,
    }
    if reducing:  # the gradients of a block are whole, in the precision of matrices, and being reduced
        both = reducing * (1 + work.itemsize / work.reduce_itemsize)
        done = {"recomputed": 0.0, "gradients of activations": 0.0, "gradients being reduced": both}
        moments["reduction of the first block"] = second | done
    if work.rollout_steps > 1:  # a pipeline makes the forecasts of all micro-batches at once
        # In float32 the states as read, the windows so far, and of the last one the state in physical units
        # and as normalised, and the input before and after it is cut into patches.
        states = work.states_read * (1 + work.rolls)  # without windows
        of_member = (work.history * (work.rollout_steps - 1) + 2) * values + 2 * work.input_values
        moments["forecast of a rollout"] = always | {
            "gradients": masters * (work.accumulation > 1),
            "gathered parameters": loss["gathered parameters"],
            "copies of weights": weights,
            "fields": FLOAT32 * work.local_batch * (states * values + work.members * of_member),
            "activations": work.micro_batches * s * (3 + tp + 2 * model.hidden_units),
            "messages of a pipeline": messages,
        }
    used = {name: {k: v for k, v in alive.items() if v} for name, alive in moments.items()}
    saved = FLOAT32 + work.state_itemsize + FLOAT32 * work.ema
    return Memory(used, work.offload * (FLOAT32 + 2 * saved) * shard_parameters(work))


# -- what stays from step to step


def stage_shapes(work: Workload, first: bool, last: bool) -> list[tuple[Shapes, int]]:
    """(parameters, how many such units) of a stage after tensor parallelism, as FSDP wraps them."""
    rest = (work.model.first if first else {}) | (work.model.last if last else {})
    tp = work.degrees.tp
    return [(cut(work.model.block, tp), work.rank_layers), (cut(rest, tp), 1)]


def shard_parameters(work: Workload, first: bool = True, last: bool = True) -> int:
    """Parameters of this rank: FSDP pads the first dim of each to a multiple of its ranks."""
    units = stage_shapes(work, first, last)
    ranks = work.fsdp_ranks if work.uses_fsdp else 1
    return sum(number * padded(unit, ranks) // ranks for unit, number in units)


# -- parameters in use


def gathered_bytes(work: Workload, first: bool, last: bool, blocks: int) -> float:
    """Return the bytes gathered by FSDP: `blocks` blocks, and always the parameters outside blocks. "never"
    and pipelines keep all blocks.

    In the backward pass 2 blocks: one computes while the next is gathered. A pipeline keeps earlier ones.
    """
    if not work.uses_fsdp:
        return 0
    (block, number), (rest, _) = stage_shapes(work, first, last)
    alive = number if work.reshard == "never" or work.stays_gathered else min(blocks, number)
    return work.itemsize * (alive * padded(block, work.fsdp_ranks) + padded(rest, work.fsdp_ranks))


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
    hidden = model.hidden_units  # before the activation; again after it
    qkv = model.qkv_features / model.dim
    if mode in ("full", "every_n_blocks"):
        return s / work.segment
    of_attention = 4 * work.states_at_once * model.heads * work.rank_tokens  # log-sum-exp
    if work.attention == "math" and work.shares_by != "ring":  # T scores a token and head; a ring computes
        attended = statistics.mean(model.window_tokens or (model.tokens,))  # them again
        of_attention += s / model.head_dim * attended
    exchanged = 1.0 * bool(work.shares_by)  # attention's output before and after it went back
    if work.shares_by == "all_gather":  # keys and values of all ranks instead
        exchanged = (qkv - 1) * work.degrees.cp
    if mode == "selective":
        # Uncompiled, float8 keeps the output of the last product, too: its input is saved after it has run.
        hidden += work.float8 and not work.compiled
        return s * (1 + qkv + 1 + hidden) + s * tp + of_attention
    if model.rotary and not model.qk_norm:  # norms keep what they read
        # Queries are rotated, too; windows are copies of what was rotated, and of values.
        qkv *= 0 if work.shares_by == "all_gather" else 1 - model.copied_fraction
    units = 1 + qkv + normed(work) + 1 + model.copied_fraction + exchanged + 1 + 2 * hidden
    return s * units + 2 * s * tp + of_attention


def normed(work: Workload) -> int:
    """Queries, keys and values that are no parts of the qkv product's output, in units: normed or rotated."""
    if not work.model.qk_norm and (not work.model.rotary or work.shares_by == "ulysses"):
        return 0  # what came back is stored, not what was rotated
    return 2 if work.shares_by in ("ring", "all_gather") else 3  # values go to other ranks as they are
