"""Layouts that cannot work, said before any rank starts: degrees, batches, and what needs all gradients."""

import math

from config import Config, Parallelism
from errors import refuse
from models.registry import MODELS
from parallelisms.degrees import check_axis_order, check_heads, num_ranks, num_stages, resolve_degrees


def check_layout(config: Config) -> None:
    _check_ranks(config)
    if config.compile.cuda_graphs:
        _check_cuda_graphs(config)


def _check_ranks(config: Config) -> None:
    parallelism, heads = config.parallelism, config.model.num_heads
    check_axis_order(parallelism.axis_order)
    _check_tiles(parallelism, config.model.name)
    tp, cp = parallelism.tensor_parallel_degree, parallelism.context_parallel_degree
    check_heads(heads, tp, cp, parallelism.context_parallel_method)
    degrees = resolve_degrees(num_ranks(), parallelism)
    _check_pipeline(config)
    if parallelism.data_parallel == "zero1" and degrees.dp_replicate != degrees.world:
        reason = f"works on replicas alone; set data_parallel_replicate_degree = {degrees.world}"
        refuse("parallelism.data_parallel", "zero1", reason)
    batch, smallest = config.training.global_batch_size, config.training.local_batch_size * degrees.dp
    reason = f"not a multiple of local_batch_size x data-parallel ranks = {smallest}; try"
    if batch != -1 and (batch < 1 or batch % smallest):
        near = max(round(batch / smallest), 1) * smallest
        refuse("training.global_batch_size", batch, f"{reason} {near} or -1")


def _check_tiles(parallelism: Parallelism, model: str) -> None:
    """Tiles and ranks; tiles and the grid come together where the data are open (`check_model`)."""
    key, tiles = "parallelism.domain_parallel_tiles", parallelism.domain_parallel_tiles
    if math.prod(tiles) == 1:
        return
    if "tiles" not in MODELS[model].splits:
        tiled = " or ".join(known.label for known in MODELS.values() if "tiles" in known.splits)
        reason = f'only {tiled} is split by its grid; model.name = "{model}" by its tokens: set '
        refuse(key, list(tiles), f"{reason}[1, 1] and parallelism.context_parallel_degree")
    shard, ranks = parallelism.data_parallel_shard_degree, num_ranks()
    others = parallelism.data_parallel_replicate_degree * max(shard, 1)
    if ranks % (math.prod(tiles) * others) or (shard != -1 and ranks != math.prod(tiles) * others):
        reason = f"{math.prod(tiles)} ranks a sample x {others} data-parallel"
        fitting = [n for n in range(1, ranks + 1) if ranks % (n * others) == 0]
        fitting = fitting if shard == -1 else [n for n in fitting if n * others == ranks]
        valid = f"rows x columns may be {fitting}" if fitting else "lower the data-parallel degrees"
        refuse(key, list(tiles), f"{reason} do not make the run's {ranks} rank(s); {valid}")


def _check_pipeline(config: Config) -> None:
    parallelism, local = config.parallelism, config.training.local_batch_size
    if parallelism.pipeline_parallel_degree == 1:
        return
    size = parallelism.pipeline_parallel_microbatch_size
    if local % size:
        reason = f"does not divide training.local_batch_size = {local}; try 1"
        refuse("parallelism.pipeline_parallel_microbatch_size", size, reason)
    if config.float8.enable and config.float8.recipe == "auto":
        reason = 'measures whole batches, which a pipeline cuts up; name "tensorwise" or "rowwise"'
        refuse("float8.recipe", "auto", reason)
    stages = num_stages(parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_degree)
    if local // size < stages and parallelism.pipeline_parallel_schedule != "GPipe":
        reason = (
            f"makes {local // size} micro-batches of a batch for {stages} stages: take one a stage at least"
        )
        refuse("training.local_batch_size", local, reason)
    if stages > config.model.num_layers:
        reason = f"makes {stages} stages of model.num_layers = {config.model.num_layers}; take fewer"
        refuse("parallelism.pipeline_parallel_degree", parallelism.pipeline_parallel_degree, reason)
    rollout = config.training.rollout_steps
    if max(rollout) > 1 and config.model.stochastic_depth:
        reason = "a pipeline draws stochastic depth a micro-batch at a time, and cannot again for the whole "
        refuse("training.rollout_steps", list(rollout), f"{reason}batch; set model.stochastic_depth to 0")
    splits, last = list(parallelism.pipeline_parallel_splits), config.model.num_layers - 1
    if splits and (len(splits) != stages - 1 or splits != sorted(set(splits)) or splits[-1] > last):
        reason = f"name the first block of stages 2 to {stages}, ascending, between 1 and {last}"
        refuse("parallelism.pipeline_parallel_splits", splits, reason)


def _check_cuda_graphs(config: Config) -> None:
    """A graph starts kernels on memory that stays where it is: weights and gradients have to."""
    if not config.compile.enable:
        refuse("compile.cuda_graphs", True, "records what was compiled; set compile.enable to true")
    degrees = resolve_degrees(num_ranks(), config.parallelism)
    if degrees.dp_replicate != degrees.world:
        reason = (
            f"works on replicas alone; set data_parallel_replicate_degree = {degrees.world}, or this to false"
        )
        refuse("compile.cuda_graphs", True, reason)
