"""Ranks along each axis of the mesh, and the layouts that cannot work.

No torch is imported here: a configuration is checked before anything starts.
"""

import math
import os
from dataclasses import dataclass

from config import Config, Parallelism
from errors import refuse
from jobs import machine
from models.registry import registered

# From the slowest to the fastest varying axis: consecutive ranks, which share a node, are on tp, then cp,
# which communicate most; a pipeline communicates least.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
# Names of the keys in [parallelism], without "_degree".
NAMES = ("pipeline_parallel", "data_parallel_replicate", "data_parallel_shard", "context_parallel")
NAMES += ("tensor_parallel",)
SHARD = "data_parallel_shard_degree"
SMALLEST_PROCESS = 2**29  # bytes of a rank without a model: Python and torch


@dataclass(frozen=True)
class Degrees:
    """Ranks along each axis; their product is the number of ranks."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def world(self) -> int:
        return math.prod(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def dp(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def uses_fsdp(self) -> bool:
        """True if anything is sharded; replicas without shards are DDP's."""
        splits_model = self.pp * self.cp * self.tp > 1
        return self.dp_shard * self.cp > 1 or (self.dp_replicate > 1 and splits_model)


def resolve_degrees(world: int, parallelism: Parallelism, num_heads: int = 0) -> Degrees:
    """Return the degrees for `world` ranks, `data_parallel_shard_degree = -1` filled in.

    Raises ConfigError, with a layout that works, if their product is not `world`. num_heads: which a tensor
    parallel degree that is proposed divides; 0: not known.
    """
    named = {f"{name}_degree": getattr(parallelism, f"{name}_degree") for name in NAMES}
    pp, dp_replicate, dp_shard, cp, tp = named.values()
    rest = pp * dp_replicate * cp * tp
    shards = dp_shard if dp_shard != -1 else max(world // rest, 1)
    if rest * shards == world:
        return Degrees(pp, dp_replicate, shards, cp, tp)
    # -- the product is another number: name the largest degree that was set, and values that work there
    key, value = max(named.items(), key=lambda item: (item[1] != 1, item[1], item[0] == SHARD))
    product = " x ".join(str(value) for value in named.values() if value != -1)
    others = math.prod(value for name, value in named.items() if name != key and value != -1)
    if world % others:
        fix = f"try {SHARD} = -1 and all others 1"
    elif key == SHARD:
        fix = f"valid: {key} = -1 or {world // others}"
    else:
        heads = num_heads if key == "tensor_parallel_degree" else 0
        choices = [n for n in divisors(world // others) if heads % n == 0]
        fix = f"valid: {key} = {' or '.join(map(str, choices))} with {SHARD} = -1"
    reason = f"the run has {world} rank(s), the degrees make {product}; {fix}"
    refuse(f"parallelism.{key}", value, reason)


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def num_stages(schedule: str, pp: int) -> int:
    """Return the number of stages of a pipeline; interleaved and V schedules have two on each rank."""
    return pp if schedule in ("GPipe", "1F1B") else 2 * pp


def segment_length(num_blocks: int) -> int:
    """Return how many of a model's or a stage's blocks activation checkpointing recomputes as one in mode
    "every_n_blocks": as many as there are inputs of them to keep (Chen et al. 2016).
    """
    return round(math.sqrt(num_blocks))


def num_ranks() -> int:
    """Return the number of ranks: torchrun's WORLD_SIZE, or the ranks that run_train.sh will start."""
    if "WORLD_SIZE" in os.environ:
        return number_in_environment("WORLD_SIZE")
    return number_in_environment("NGPU") * number_in_environment("NNODES")


def number_in_environment(name: str) -> int:
    """Return a number of processes, 1 if the variable is not set."""
    text = os.environ.get(name) or "1"
    if not text.isdecimal() or int(text) < 1:
        refuse(name, text, "an environment variable that must be a whole number, at least 1")
    return int(text)


def check_processes(name: str, number: int) -> None:
    """Raise ConfigError if so many processes do not fit this machine, with any model."""
    memory = machine.memory()
    if number * SMALLEST_PROCESS > memory:
        most = memory // SMALLEST_PROCESS
        refuse(name, number, f"processes on a machine of {memory / 2**30:.0f} GiB; at most {most} fit it")


# -- layouts that cannot work


def check_layout(config: Config) -> None:
    """Raise ConfigError for degrees, batches and options that do not work together."""
    parallelism, training, model = config.parallelism, config.training, config.model
    has_tokens, heads = registered(model.name).has_tokens, model.num_heads
    degrees = resolve_degrees(num_ranks(), parallelism, heads if has_tokens else 0)
    # -- heads, which tensor parallelism and ulysses share
    if has_tokens and heads % degrees.tp:
        reason = f"does not divide model.num_heads = {heads}; valid: {divisors(heads)}"
        refuse("parallelism.tensor_parallel_degree", degrees.tp, reason)
    of_rank = heads // degrees.tp
    if has_tokens and parallelism.context_parallel_method == "ulysses" and of_rank % degrees.cp:
        alternative = 'or context_parallel_method = "all_gather" or "ring"'
        reason = f"ulysses distributes {of_rank} heads a rank; valid: {divisors(of_rank)}, {alternative}"
        refuse("parallelism.context_parallel_degree", degrees.cp, reason)

    # -- a pipeline: whole micro-batches, one for each stage at least, and a block for each stage
    if degrees.pp > 1:
        size, local = parallelism.pipeline_parallel_microbatch_size, training.local_batch_size
        if local % size:
            reason = f"does not divide training.local_batch_size = {local}; try 1"
            refuse("parallelism.pipeline_parallel_microbatch_size", size, reason)
        stages = num_stages(parallelism.pipeline_parallel_schedule, degrees.pp)
        if local // size < stages and parallelism.pipeline_parallel_schedule != "GPipe":
            reason = f"makes {local // size} micro-batches for {stages} stages; set at least one a stage"
            refuse("training.local_batch_size", local, reason)
        if stages > model.num_layers:
            reason = f"makes {stages} stages of model.num_layers = {model.num_layers}; take fewer"
            refuse("parallelism.pipeline_parallel_degree", degrees.pp, reason)

    # -- what is sharded over replicas, and what they take of a batch
    if parallelism.data_parallel == "zero1" and degrees.dp_replicate != degrees.world:
        reason = f"works on replicas alone; set data_parallel_replicate_degree = {degrees.world}"
        refuse("parallelism.data_parallel", "zero1", reason)
    # One micro-batch over all ranks has `smallest` samples.
    batch, smallest = training.global_batch_size, training.local_batch_size * degrees.dp
    if batch != -1 and (batch < 1 or batch % smallest):
        near = max(round(batch / smallest), 1) * smallest
        reason = f"not a multiple of local_batch_size x data-parallel ranks = {smallest}; try {near} or -1"
        refuse("training.global_batch_size", batch, reason)
