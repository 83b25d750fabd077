"""Description of a job for the planner: shapes of its transformer, layout and precisions.

The shapes are read from the model in models/vit.py on meta tensors: T tokens of a sample, D width, M hidden
width of the MLP.
"""

import dataclasses
import math
import statistics
from dataclasses import dataclass, field
from operator import attrgetter

from config import Config, Model
from datasets.channels import Channels
from errors import ConfigError
from models.registry import MODELS, build_model, registered
from parallelisms.degrees import Degrees, num_stages, resolve_degrees, segment_length

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
Shapes = dict[str, tuple[int, ...]]

COLUMN = ("attention.qkv.", "mlp.up.", "mlp.gate.", "patch_embedding.")  # rows are sharded over tp
ROW = ("attention.projection.weight", "mlp.down.weight", "head.weight")  # columns are; biases are whole


@dataclass(frozen=True)
class Architecture:
    """A transformer of `layers` equal blocks."""

    tokens: int  # T
    dim: int  # D
    layers: int
    heads: int
    in_features: int  # values of a token that the patch embedding takes
    out_features: int  # values of a token that the head gives
    flops: float  # of a sample's forward pass; a training step has three times as many
    block: Shapes = field(hash=False)  # parameters of one block
    first: Shapes = field(hash=False)  # parameters before the first block
    last: Shapes = field(hash=False)  # parameters after the last block
    qk_norm: bool = False
    rotary: bool = False  # queries and keys are rotated by row and column: models/embeddings.py
    window_tokens: tuple[int, ...] = ()  # tokens of a window, of each block that has windows
    copied_fraction: float = 0.0  # fraction of blocks with windows that cut rows and have to be copied

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def mlp_dim(self) -> int:
        return self.block["mlp.up.weight"][0]

    @property
    def hidden_units(self) -> float:
        """Outputs of the products before the activation of the MLP over D; SwiGLU has two."""
        return self.mlp_dim / self.dim * (2 if "mlp.gate.weight" in self.block else 1)

    @property
    def qkv_features(self) -> int:
        return self.block["attention.qkv.weight"][0]

    @property
    def matrix_parameters(self) -> int:
        """Parameters in the matrices of all blocks."""
        return self.layers * sum(math.prod(shape) for shape in self.block.values() if len(shape) == 2)

    @property
    def parameters(self) -> int:
        return self.layers * count(self.block) + count(self.first) + count(self.last)


def count(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes.values()))


def cut(shapes: Shapes, tp: int) -> Shapes:
    """Return the parameters of one of `tp` tensor-parallel ranks."""
    result = {}
    for name, shape in shapes.items():
        part = list(shape)
        if any(layer in name for layer in COLUMN):
            part[0] = -(-part[0] // tp)
        elif any(layer in name for layer in ROW):
            part[1] = -(-part[1] // tp)
        result[name] = tuple(part)
    return result


def padded(shapes: Shapes, ranks: int) -> int:
    """Values that FSDP gathers: the first dim of each parameter is padded to a multiple of the ranks."""
    return sum(math.ceil(s[0] / ranks) * ranks * math.prod(s[1:]) for s in shapes.values())


def architecture_of(
    model: Model, grid_shape: tuple[int, int], in_channels: int, out_channels: int
) -> Architecture:
    """Return the shapes of the configured ViT on a grid."""
    from models.vit import VisionTransformer  # imported here: torch takes seconds

    built = build_model(model, out_channels, in_channels - out_channels, grid_shape, True)
    assert isinstance(built, VisionTransformer)
    shapes = {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}
    windows = built.windows if model.attention_windows else []
    return Architecture(
        tokens=built.num_tokens,
        dim=built.dim,
        layers=len(built.blocks),
        heads=model.num_heads,
        in_features=built.patch_embedding.in_features,
        out_features=built.head.out_features,
        flops=built.flops(),
        block={name: tuple(parameter.shape) for name, parameter in built.blocks["0"].named_parameters()},
        first={name: s for name, s in shapes.items() if name.startswith(("patch_embedding.", "position."))},
        last={name: s for name, s in shapes.items() if name.startswith(("norm.", "head."))},
        qk_norm=model.qk_norm,
        rotary=model.position == "rotary",
        window_tokens=tuple(map(math.prod, windows)),
        copied_fraction=statistics.mean([columns < built.token_shape[1] for _, columns in windows] or [0]),
    )


# -- layout and precisions

# Fields of a workload that have the value of a key, in the order in which options are printed.
SETTINGS = {
    "reshard": "parallelism.fsdp_reshard_after_forward",
    "offload": "parallelism.cpu_offload",
    "local_batch": "training.local_batch_size",
    "dtype": "training.mixed_precision_param",
    "float8": "float8.enable",
    "ac_mode": "activation_checkpoint.mode",
    "compiled": "compile.enable",
    "schedule": "parallelism.pipeline_parallel_schedule",
    "pipeline_micro_batch": "parallelism.pipeline_parallel_microbatch_size",
    "method": "parallelism.context_parallel_method",
    "attention": "model.attention_backend",
    "optimizer": "optimizer.name",
    "history": "data.history",
    "members": "training.members",
}


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
    def kind(self) -> str:
        """The kind of the layout, named by its technique with the least accurate plans."""
        axes = {"pipeline": self.degrees.pp, "context parallel": self.degrees.cp}
        axes["tensor parallel"] = self.degrees.tp
        return next((kind for kind, ranks in axes.items() if ranks > 1), "data parallel")

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
            return both - (both - momentum) * model.matrix_parameters / model.parameters
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
        global_batch=smallest if training.global_batch_size < 0 else training.global_batch_size,
        reduce_itemsize=ITEMSIZE[training.mixed_precision_reduce],
        field_values=num_variables * cells,
        input_values=channels * cells,
        zero1=parallelism.data_parallel == "zero1",
        ema=training.ema_decay > 0,
        rolls=training.augmentation != "none",
        rollout_steps=max(training.rollout_steps),
        **{name: attrgetter(key)(config) for name, key in SETTINGS.items()},
    )
