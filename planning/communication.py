"""Collectives of a training step of the ViT in closed form: how many, along which axis, of what size.

`size` is the larger buffer of a call in bytes, on one rank: what an all-gather gives, what a reduce-scatter
takes. benchmarks/layout_parity.py holds every number against what a recorder counts.
"""

import math
from collections import Counter
from dataclasses import dataclass

from models.vit import VisionTransformer
from parallelisms.collectives import Collective
from parallelisms.degrees import Degrees

COLUMN = ("attention.qkv.", "mlp.up.", "patch_embedding.")  # rows of weight and bias are dealt out
ROW = (
    "attention.projection.weight",
    "mlp.down.weight",
    "head.weight",
)  # columns are dealt out; biases are whole
FIRST_BUCKET = 2**20  # bytes, of DDP
Shapes = dict[str, tuple[int, ...]]
Calls = Counter[Collective]


@dataclass(frozen=True)
class Step:
    """What the collectives of a step depend on, beside the model."""

    degrees: Degrees
    local_batch: int  # samples of a micro-batch
    micro_batches: int = 1  # accumulated, or passed through a pipeline
    reshard: str = "default"
    method: str = "ulysses"
    loss: str = "mse"
    itemsize: int = 4  # bytes of gathered parameters and of activations


def step_collectives(model: VisionTransformer, step: Step, pipeline_rank: int = 0) -> Calls:
    """All collectives between the data of a step and its gradients, on one rank; `model` is the whole, on
    meta.

    Covers fsdp, hsdp, tensor and context parallelism together, or a pipeline of one stage a rank alone.
    """
    degrees = step.degrees
    if degrees.pp > 1:
        return pipeline_collectives(model, step, pipeline_rank)
    calls: Calls = Counter()
    if degrees.dp_shard * degrees.cp > 1 or (degrees.dp_replicate > 1 and degrees.splits_model):
        calls += fsdp_collectives(model, step)
        if degrees.tp > 1:
            calls += replicated_gradients(model, step)
    elif degrees.dp_replicate > 1:
        calls += ddp_collectives(model)
    if degrees.tp > 1:
        calls += tensor_collectives(model, step)
    if degrees.cp > 1:
        calls += context_collectives(model, step)
    if step.loss == "relative_l2":
        for axis in ("tp", "cp"):
            if getattr(degrees, axis) > 1:
                calls[Collective("all-reduce", axis, 4 * step.local_batch)] += step.micro_batches
    return calls


def units(model: VisionTransformer, tp: int) -> list[Shapes]:
    """Shapes of each block's parameters, then of the rest, after tensor parallelism."""
    result: list[Shapes] = [{} for _ in range(len(model.blocks) + 1)]
    for name, parameter in model.named_parameters():
        shape = list(parameter.shape)
        if any(layer in name for layer in COLUMN):
            shape[0] //= tp
        elif any(layer in name for layer in ROW):
            shape[1] //= tp
        index = int(name.split(".")[1]) if name.startswith("blocks.") else -1
        result[index][name] = tuple(shape)
    return result


def fsdp_collectives(model: VisionTransformer, step: Step) -> Calls:
    """Gathers of parameters for each micro-batch, reductions of gradients once a step.

    Forward gathers every block and the rest. Backward gathers again what was freed: "always" all of it
    (ZeRO-3), "never" nothing (ZeRO-2), "default" every block but the last. HSDP all-reduces shards between
    its groups. The first dim of a parameter is padded to a multiple of the ranks.
    """
    degrees, calls = step.degrees, Counter()
    ranks, shapes = degrees.dp_shard * degrees.cp, units(model, degrees.tp)
    for index, unit in enumerate(shapes):
        block = index < len(shapes) - 1
        freed = step.reshard == "always" or (step.reshard == "default" and block and index < len(shapes) - 2)
        padded = (math.ceil(s[0] / ranks) * ranks * math.prod(s[1:]) for s in unit.values())
        size = sum(padded) * step.itemsize
        if ranks > 1:
            calls[Collective("all-gather", "fsdp", size)] += (1 + freed) * step.micro_batches
            calls[Collective("reduce-scatter", "fsdp", size)] += 1
        if degrees.dp_replicate > 1:
            calls[Collective("all-reduce", "dp_replicate", size // ranks)] += 1
    return calls


def ddp_collectives(model: VisionTransformer) -> Calls:
    """One all-reduce a step, of all gradients, where these fit into DDP's first bucket.

    ValueError where they do not: the next buckets are cut by the order of backward.
    """
    size = sum(4 * parameter.numel() for parameter in model.parameters())
    if size > FIRST_BUCKET:
        raise ValueError(
            f"{size} bytes of gradients: DDP's buckets have a closed form up to {FIRST_BUCKET} only"
        )
    return Counter({Collective("all-reduce", "dp_replicate", size): 1})


def tensor_collectives(model: VisionTransformer, step: Step) -> Calls:
    """Two gathers and two reduce-scatters a block, forward and backward alike; the ends exchange tokens for
    width.

    Where a backend has no all-to-all (gloo) that exchange is a gather of the whole, twice at either end.
    """
    tokens, depth = step.local_batch * tokens_of_rank(model, step) * step.degrees.tp, len(model.blocks)
    patch = model.out_channels * model.patch_size[0] * model.patch_size[1]
    block, end = tokens * model.dim * step.itemsize, tokens * patch * step.itemsize
    once = Counter(
        {
            Collective("all-gather", "tp", block): 4 * depth + 4,
            Collective("reduce-scatter", "tp", block): 4 * depth,
        }
    )
    once[Collective("all-gather", "tp", end)] += 1
    once[Collective("reduce-scatter", "tp", end)] += 1
    return times(once, step.micro_batches)


def replicated_gradients(model: VisionTransformer, step: Step) -> Calls:
    """What every tp rank holds whole sees its own tokens only: FSDP sums such gradients over tp first."""
    calls: Calls = Counter()
    for unit in units(model, step.degrees.tp):
        for name, shape in unit.items():
            if "norm" in name:
                calls[Collective("all-reduce", "tp", 4 * math.prod(shape))] += 1
            elif (
                name.startswith("position.") and step.degrees.cp == 1
            ):  # else it is sliced, and no gather is left
                calls[Collective("all-gather", "tp", 4 * math.prod(shape))] += 1
    return calls


def context_collectives(model: VisionTransformer, step: Step) -> Calls:
    """ulysses: two exchanges a block and pass; all_gather: one gather, one reduce-scatter; ring: sends.

    The ring's forward passes keys and values on cp - 1 times, its backward again, and their float32
    gradients cp times, home.
    """
    cp, tp, depth = step.degrees.cp, step.degrees.tp, len(model.blocks)
    chunk = step.local_batch * tokens_of_rank(model, step) * tp * model.dim // tp  # values of one of q, k, v
    once: Calls = Counter()
    if step.method == "ulysses":
        once[Collective("all-to-all", "cp", 3 * chunk * step.itemsize)] += 2 * depth
        once[Collective("all-to-all", "cp", chunk * step.itemsize)] += 2 * depth
    elif step.method == "all_gather":
        once[Collective("all-gather", "cp", 2 * cp * chunk * step.itemsize)] += depth
        once[Collective("reduce-scatter", "cp", 2 * cp * chunk * step.itemsize)] += depth
    else:
        once[Collective("send", "cp", 2 * chunk * step.itemsize)] += 2 * (cp - 1) * depth
        once[Collective("send", "cp", 2 * chunk * 4)] += cp * depth
    return times(once, step.micro_batches)


def pipeline_collectives(model: VisionTransformer, step: Step, rank: int) -> Calls:
    """Each micro-batch goes on to the next stage, its gradient back to the one before."""
    size = step.local_batch * tokens_of_rank(model, step) * model.dim * step.itemsize
    sends = step.micro_batches * ((rank < step.degrees.pp - 1) + (rank > 0))
    return Counter({Collective("send", "pp", size): sends})


def tokens_of_rank(model: VisionTransformer, step: Step) -> int:
    """Tokens a rank holds between blocks: padded to a multiple of cp x tp, then dealt out."""
    return -(-model.num_tokens // (step.degrees.cp * step.degrees.tp))


def times(calls: Calls, number: int) -> Calls:
    return Counter({call: count * number for call, count in calls.items()})
