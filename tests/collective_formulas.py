"""Collectives of a training step of the ViT in closed form: how many, along which axis, of what size.

What planning/network.py has of one micro-batch, and all others of a step: tests and benchmarks hold them
against what a recorder counts. `size` is the larger buffer of a call in bytes, on one rank: what an
all-gather gives, what a reduce-scatter takes.
"""

import math
from collections import Counter

from planning.memory import stage_shapes
from planning.network import Calls, Collective, rollout_collectives, sample_collectives
from planning.workload import Workload, cut, padded

FIRST_BUCKET = 2**20  # bytes, of DDP


def step_collectives(work: Workload, pipeline_rank: int = 0, loss: str = "mse") -> Calls:
    """All collectives between the data of a step and its gradients, on one rank.

    Covers fsdp, hsdp, tensor and context parallelism together, or a pipeline of one stage a rank, alone or
    with fsdp.
    """
    degrees = work.degrees
    if degrees.pp > 1:
        return pipeline_collectives(work, pipeline_rank)
    calls: Calls = Counter()
    if degrees.uses_fsdp:
        calls += fsdp_collectives(work)
        if degrees.tp > 1:
            calls += times(replicated_gradients(work), work.reductions)
    elif degrees.dp_replicate > 1:
        calls += ddp_collectives(work)
    calls += of_passes(work, sample_collectives(work)) + times(rollout_collectives(work), work.forecasts)
    roots = {"relative_l2": 1, "rmse": 3}.get(loss, 0)  # a sample: of all its errors, or of each variable
    if roots:
        for axis in ("tp", "cp"):
            if getattr(degrees, axis) > 1:
                calls[Collective("all-reduce", axis, 4 * roots * work.states_at_once)] += work.passes
    return calls


def fsdp_collectives(work: Workload) -> Calls:
    """Gathers of parameters and reductions of gradients for each micro-batch.

    Forward gathers every block and the rest. Backward gathers again what was freed: "always" all of it
    (ZeRO-3), "never" nothing (ZeRO-2), "default" every block but the last. HSDP all-reduces shards between
    its groups once a step. The first dim of a parameter is padded to a multiple of the ranks.
    """
    degrees, calls = work.degrees, Counter()
    ranks, last_block = degrees.dp_shard * degrees.cp, work.model.layers - 1
    rest = cut(work.model.first | work.model.last, degrees.tp)
    # (parameters, how many such units, whether "default" frees them after the forward pass)
    units = [
        (cut(work.model.block, degrees.tp), last_block, True),
        (cut(work.model.block, degrees.tp), 1, False),
    ]
    for unit, number, freed in [*units, (rest, 1, False)]:
        freed = work.reshard == "always" or (work.reshard == "default" and freed)
        gathered, reduced = (padded(unit, ranks) * n for n in (work.itemsize, work.reduce_itemsize))
        if ranks > 1:
            calls[Collective("all-gather", "fsdp", gathered)] += number * (1 + freed) * work.passes
            calls[Collective("reduce-scatter", "fsdp", reduced)] += number * work.reductions
        if degrees.dp_replicate > 1:
            calls[Collective("all-reduce", "dp_replicate", reduced // ranks)] += number
    return +calls


def ddp_collectives(work: Workload) -> Calls:
    """One all-reduce a step, of all gradients, where these fit into DDP's first bucket.

    ValueError where they do not: the next buckets are cut by the order of backward.
    """
    size = 4 * work.model.parameters
    if size > FIRST_BUCKET:
        raise ValueError(
            f"{size} bytes of gradients: DDP's buckets have a closed form up to {FIRST_BUCKET} only"
        )
    return Counter({Collective("all-reduce", "dp_replicate", size): 1})


def replicated_gradients(work: Workload) -> Calls:
    """What every tp rank holds whole sees its own tokens only: FSDP sums such gradients over tp first."""
    calls: Calls = Counter()
    for unit, number in (
        (work.model.block, work.model.layers),
        (work.model.first | work.model.last, 1),
    ):
        for name, shape in cut(unit, work.degrees.tp).items():
            if "norm" in name:
                calls[Collective("all-reduce", "tp", 4 * math.prod(shape))] += number
            elif name.startswith("position.") and work.degrees.cp == 1:
                # else it is sliced, and no gather is left
                calls[Collective("all-gather", "tp", 4 * math.prod(shape))] += number
    return calls


def pipeline_collectives(work: Workload, rank: int) -> Calls:
    """Each micro-batch goes on to the next stage, its gradient back to the one before.

    FSDP gathers a stage's parameters before the first of them, and reduces their gradients after the last.
    """
    size = work.states_at_once * work.rank_tokens * work.model.dim * work.itemsize
    stage = rank // (work.degrees.world // work.degrees.pp)
    first, last = stage == 0, stage == work.degrees.pp - 1
    calls = Counter({Collective("send", "pp", size): work.passes * (2 - first - last)})
    for unit, number in stage_shapes(work, first, last) if work.reduces_last else ():
        gathered, reduced = (padded(unit, work.fsdp_ranks) * n for n in (work.itemsize, work.reduce_itemsize))
        calls[Collective("all-gather", "fsdp", gathered)] += number * work.reductions
        calls[Collective("reduce-scatter", "fsdp", reduced)] += number * work.reductions
    return calls


def of_passes(work: Workload, calls: tuple[Calls, Calls]) -> Calls:
    """Those of a step, from those of a micro-batch forward and backward; rollouts begin with forecasts."""
    forward, backward = calls
    return times(forward, work.passes + work.forecasts) + times(backward, work.passes)


def times(calls: Calls, number: int) -> Calls:
    return Counter({call: count * number for call, count in calls.items()})
