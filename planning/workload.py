"""Description of a job for the planner: architecture, layout and precisions."""

import dataclasses
import math
from dataclasses import dataclass

from config import Config
from datasets.channels import Channels
from errors import ConfigError
from models.registry import MODELS, registered
from parallelisms.degrees import Degrees, num_stages, resolve_degrees, segment_length
from planning.architecture import Architecture, architecture_of
from training.due import Rollouts

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Workload:
    """Everything that memory, time and communication of a step depend on."""

    model: Architecture
    degrees: Degrees
    local_batch: int  # samples of a micro-batch; of a batch, where a pipeline cuts it further
    global_batch: int
    dtype: str = "bfloat16"  # of matrices: training.mixed_precision_param
    reduce_itemsize: int = 4  # bytes of a gradient between ranks
    field_values: int = 0  # of the predicted fields of a sample: V H W
    input_values: int = 0  # the same of the input
    ac_mode: str = "none"
    compiled: bool = False
    float8: bool = False
    attention: str = "sdpa"
    reshard: str = "default"
    zero1: bool = False
    offload: bool = False
    method: str = "ulysses"
    schedule: str = "1F1B"
    pipeline_micro_batch: int = 1
    ema: bool = False
    optimizer: str = "AdamW"
    history: int = 1  # states that the model sees
    rollout_steps: int = 1  # steps of the model, each from the last one's output: of the longest rollout
    members: int = 1  # states per sample: members of an ensemble
    rolls: bool = False  # samples, of which there is then a copy
    copies_ahead: int = 0  # batches of the loader on their way to the device, or there already

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def state_itemsize(self) -> float:
        """Bytes of optimiser states a parameter, on average: two moments, or one momentum, which Muon has of
        blocks' matrices.
        """
        momentum, both, model = 4.0, 8.0, self.model
        if self.optimizer == "Muon":
            return both - (both - momentum) * model.layers * model.matrix_parameters / model.parameters
        return momentum if self.optimizer in ("SGD", "LARS") else both

    @property
    def accumulation(self) -> int:
        return max(self.global_batch // (self.local_batch * self.degrees.dp), 1)

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of a batch in a pipeline; 1 without a pipeline."""
        return max(self.local_batch // self.pipeline_micro_batch, 1) if self.degrees.pp > 1 else 1

    @property
    def passes(self) -> int:
        """Number of forward and backward passes of a step: micro-batches (accumulated or in a pipeline) times
        steps of the rollout.
        """
        return self.accumulation * self.micro_batches * self.rollout_steps

    @property
    def reductions(self) -> int:
        """Backward passes of a step after which FSDP reduces gradients; a pipeline adds its micro-batches."""
        return self.accumulation * self.rollout_steps

    @property
    def reduces_last(self) -> bool:
        """True if FSDP adds up unsharded gradients and reduces them after a batch's last micro-batch. torch's
        PipelineStage sets this, and also keeps the parameters that backward has gathered.
        """
        return self.uses_fsdp and self.degrees.pp > 1

    @property
    def stays_gathered(self) -> bool:
        """True if FSDP gathers the parameters of a stage once for all micro-batches of a batch."""
        return self.reduces_last and self.reshard != "always"

    @property
    def gathers_again(self) -> bool:
        """True if FSDP gathers a block's parameters again in its backward pass."""
        return not self.stays_gathered and self.reshard != "never"

    @property
    def forecasts(self) -> int:
        """Number of forward passes before these, which compute the initial states of a rollout's steps."""
        return self.accumulation * self.micro_batches * (self.rollout_steps - 1)

    @property
    def sample_flops(self) -> float:
        """Model FLOPs of a sample, forward and backward, in all steps of its rollout."""
        return self.members * 3 * self.rollout_steps * self.model.flops

    @property
    def states_read(self) -> int:
        """States of a sample: the window it starts from, and the truth of every step of its rollout."""
        return self.history + self.rollout_steps

    @property
    def micro_batch(self) -> int:
        """Number of samples in one forward pass."""
        return self.local_batch // self.micro_batches

    @property
    def states_at_once(self) -> int:
        """Number of states in one forward pass: all members of those samples."""
        return self.micro_batch * self.members

    @property
    def rank_tokens(self) -> int:
        """Tokens of a sample that a rank has between blocks: padded, then sharded over cp x tp."""
        return math.ceil(self.model.tokens / (self.degrees.cp * self.degrees.tp))

    @property
    def rank_layers(self) -> int:
        """Blocks of the rank with the most blocks."""
        return math.ceil(self.model.layers / self.degrees.pp)

    def in_flight(self, first: bool) -> float:
        """Micro-batches with activations in the first or the last rank of a pipeline at once, as torch 2.13
        schedules them; a stage's part of a micro-batch counts as that part.
        """
        pp, stages, number = self.degrees.pp, self.stages_of_rank, self.micro_batches
        if pp == 1 or self.schedule == "GPipe":
            return number
        if self.schedule == "ZBVZeroBubble":
            return min(pp, number)
        in_a_round = number // max(number // pp, 1)
        hops = (2 if self.schedule == "Interleaved1F1B" else 1) * (pp - 1) * first
        return min(stages * number, (stages - 1) * in_a_round + hops + 1) / stages

    @property
    def segment(self) -> int:
        """Number of blocks that are recomputed as one, where whole blocks are."""
        stages = self.stages_of_rank if self.degrees.pp > 1 else 1
        blocks = math.ceil(self.rank_layers / stages)
        return segment_length(blocks) if self.ac_mode == "every_n_blocks" else 1

    @property
    def stages_of_rank(self) -> int:
        return num_stages(self.schedule, self.degrees.pp) // self.degrees.pp

    @property
    def shares_by(self) -> str:
        """The method of context parallelism; "" without it."""
        return self.method if self.degrees.cp > 1 else ""

    @property
    def fsdp_ranks(self) -> int:
        return self.degrees.dp_shard * self.degrees.cp

    @property
    def uses_fsdp(self) -> bool:
        return self.degrees.uses_fsdp

    @property
    def uses_ddp(self) -> bool:
        """True if DDP reduces gradients, in buckets that are always there: gradients of one pass are parts of
        them, those of earlier passes are copied there in the last.
        """
        return self.degrees.dp_replicate > 1 and not self.uses_fsdp

    def replace(self, **changes: object) -> "Workload":
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def workload_of(config: Config, world: int, grid_shape: tuple[int, int], num_variables: int) -> Workload:
    """The workload of `config` on `world` ranks. ConfigError where closed forms are not here."""
    if not registered(config.model.name).planned:
        known = ", ".join(name for name, model in MODELS.items() if model.planned)
        raise ConfigError(
            f'model.name = "{config.model.name}": plan.py knows the {known}; for others use --dry_run'
        )
    training, parallelism = config.training, config.parallelism
    degrees, cells = resolve_degrees(world, parallelism), math.prod(grid_shape)
    channels = len(Channels.of(config.data, config.model.noise_dim).inputs)
    smallest = training.local_batch_size * degrees.dp
    return Workload(
        model=architecture_of(config.model, grid_shape, channels, num_variables),
        degrees=degrees,
        local_batch=training.local_batch_size,
        global_batch=smallest if training.global_batch_size < 0 else training.global_batch_size,
        dtype=training.mixed_precision_param,
        reduce_itemsize=ITEMSIZE[training.mixed_precision_reduce],
        field_values=num_variables * cells,
        input_values=channels * cells,
        ac_mode=config.activation_checkpoint.mode,
        compiled=config.compile.enable,
        float8=config.float8.enable,
        attention=config.model.attention_backend,
        reshard=parallelism.fsdp_reshard_after_forward,
        zero1=parallelism.data_parallel == "zero1",
        offload=parallelism.cpu_offload,
        method=parallelism.context_parallel_method,
        schedule=parallelism.pipeline_parallel_schedule,
        pipeline_micro_batch=parallelism.pipeline_parallel_microbatch_size,
        ema=training.ema_decay > 0,
        rolls=training.augmentation != "none",
        optimizer=config.optimizer.name,
        history=config.data.history,
        members=training.members,
        rollout_steps=Rollouts.of(training).longest,
    )
