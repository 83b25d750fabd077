"""How many ranks each axis of the mesh has. No torch here: a configuration is checked before anything
starts.
"""

import math
import os
from dataclasses import dataclass

from config import Parallelism
from errors import refuse

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
SMALLEST_PROCESS = 2**29  # bytes that a rank takes before it has a model: Python and torch


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
    def splits_model(self) -> bool:
        """Whether a sample takes more than one rank."""
        return self.pp * self.cp * self.tp > 1

    @property
    def uses_fsdp(self) -> bool:
        """Whenever something is sharded; pure replicas are DDP's."""
        return self.dp_shard * self.cp > 1 or (self.dp_replicate > 1 and self.splits_model)


def resolve_degrees(world: int, parallelism: Parallelism) -> Degrees:
    """The degrees of `world` ranks, `data_parallel_shard_degree = -1` filled in.

    ConfigError, with a layout that works, where they do not give `world`.
    """
    named = {
        "pipeline_parallel_degree": parallelism.pipeline_parallel_degree,
        "data_parallel_replicate_degree": parallelism.data_parallel_replicate_degree,
        "data_parallel_shard_degree": parallelism.data_parallel_shard_degree,
        # One of the two is 1: tokens are a ViT's, tiles a U-Net's.
        "context_parallel_degree": parallelism.context_parallel_degree
        * math.prod(parallelism.domain_parallel_tiles),
        "tensor_parallel_degree": parallelism.tensor_parallel_degree,
    }
    pp, dp_replicate, dp_shard, cp, tp = named.values()
    rest = pp * dp_replicate * cp * tp
    if dp_shard == -1 and world % rest == 0:
        return Degrees(pp, dp_replicate, world // rest, cp, tp)
    if dp_shard != -1 and rest * dp_shard == world:
        return Degrees(pp, dp_replicate, dp_shard, cp, tp)
    asked = {key: value for key, value in named.items() if value != 1} or {
        "data_parallel_shard_degree": dp_shard
    }
    key, value = max(asked.items(), key=lambda item: item[1])
    product = " x ".join(str(value) for value in named.values() if value != -1)
    reason = f"the run has {world} rank(s), the degrees make {product}; {_proposal(world, named, key)}"
    refuse(f"parallelism.{key}", value, reason)


def _proposal(world: int, named: dict[str, int], key: str) -> str:
    others = math.prod(value for name, value in named.items() if name != key and value != -1)
    if world % others:
        return "try data_parallel_shard_degree = -1 and all others 1"
    valid = [n for n in range(1, world // others + 1) if (world // others) % n == 0]
    exact = "" if key == "data_parallel_shard_degree" else " with data_parallel_shard_degree = -1"
    choices = [-1, world // others] if key == "data_parallel_shard_degree" else valid
    return f"valid: {key} = {' or '.join(map(str, choices))}{exact}"


def check_heads(num_heads: int, tp: int, cp: int, method: str) -> None:
    """ConfigError, naming valid degrees, where heads cannot be dealt out evenly."""
    if num_heads % tp:
        valid = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
        reason = f"does not divide model.num_heads = {num_heads}; valid: {valid}"
        refuse("parallelism.tensor_parallel_degree", tp, reason)
    if method == "ulysses" and (num_heads // tp) % cp:
        heads = num_heads // tp
        valid = [n for n in range(1, heads + 1) if heads % n == 0]
        other = 'or context_parallel_method = "all_gather" or "ring"'
        reason = f"ulysses deals out {heads} heads a rank; valid: {valid}, {other}"
        refuse("parallelism.context_parallel_degree", cp, reason)


def check_axis_order(order: tuple[str, ...]) -> None:
    """ConfigError where `order` is not each axis once."""
    if sorted(order) != sorted(AXES):
        refuse("parallelism.axis_order", list(order), f"name each of {list(AXES)} once, slowest first")


def num_stages(schedule: str, pp: int) -> int:
    """Stages of a pipeline: schedules that interleave or fold have two on each rank."""
    return pp if schedule in ("GPipe", "1F1B") else 2 * pp


def num_ranks() -> int:
    """Ranks of this run: torchrun's WORLD_SIZE, or what run_train.sh is about to start."""
    if "WORLD_SIZE" in os.environ:
        return number_in_environment("WORLD_SIZE")
    return number_in_environment("NGPU") * number_in_environment("NNODES")


def number_in_environment(name: str) -> int:
    """A number of processes, 1 where it is not set."""
    text = os.environ.get(name) or "1"
    if not text.isdecimal() or int(text) < 1:
        refuse(name, text, "an environment variable that must be a whole number, at least 1")
    return int(text)


def check_processes(name: str, number: int) -> None:
    """ConfigError: so many processes do not fit this machine, whatever they train."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if number * SMALLEST_PROCESS > memory:
        most = memory // SMALLEST_PROCESS
        refuse(name, number, f"processes on a machine of {memory / 2**30:.0f} GiB; at most {most} fit it")
