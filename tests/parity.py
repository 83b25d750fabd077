"""Three optimiser steps of a small model on any layout, by train.py's own assembly and step.

What comes back is layout-free: losses, gradient norms, full gradients of the first step, full weights after
the third. A layout is right when all of it is what one process gives.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from config import (
    ActivationCheckpoint,
    Compile,
    Config,
    Data,
    Float8,
    Lora,
    LrScheduler,
    Model,
    Optimizer,
    Parallelism,
    Training,
)
from datasets.grid import area_weights, global_grid
from datasets.loader import TrainSampler, split_sample
from datasets.statistics import Statistics
from parallelisms.degrees import resolve_degrees
from planning.dry_run import Recorder
from planning.network import Collective
from tests.distributed import own_device, shared_mesh
from training.assembly import Fields, assemble
from training.batches import Batch
from training.objective import Objective, Shards
from training.state import build_state
from training.step import Run, accumulate_gradients, update_weights

GLOBAL_BATCH = 8
ADAPTER_STD = "models.initialization.adapter_std"  # with B = 0, as adapters start, A would have no gradient
# Some gradients are zero but for rounding (a bias of all keys moves no softmax); with a small eps Adam
# would blow that rounding up to full steps.
EPS = 1e-4
VARIABLES = ("surface_pressure", "total_column_water_vapour", "2m_temperature")


@dataclass(frozen=True)
class Layout:
    """One row of the table."""

    ranks: int = 1
    parallelism: dict[str, Any] = field(default_factory=dict)
    activation_checkpoint: str = "none"
    compile: str = ""  # the compiler's backend
    dtype: str = "float32"
    reduce: str = "float32"  # what gradients travel in
    accumulation: int = 1
    grid: tuple[int, int] = (16, 32)
    model: tuple[tuple[str, Any], ...] = ()
    loss: str = "mse"
    float8: bool = False
    float8_all_gather: bool = False
    unet: bool = False
    rollout: int = 1  # steps of the model
    history: int = 1  # states that it sees
    members: int = 1  # of each sample, with noise
    lora: bool = False
    conserve: bool = False  # dry mass
    roles: bool = False  # one variable of each
    boundary: bool = False  # of a limited area
    roll: bool = False  # samples by random numbers of columns, half of them mirrored

    @property
    def noise_dim(self) -> int:
        return 3 if self.members > 1 else 0

    def tolerance(self, what: str) -> float:
        """Largest relative difference to one process; initial weights have to be the same bits."""
        if what == "initial weights":
            return 0.0
        scalar = what in ("loss", "gradient norm")
        if self.float8:  # a value at the border between two of float8's goes either way
            return 5e-3 if scalar else 0.2
        # Half precision rounds in another order: the size of its own rounding, which Adam follows by its
        # sign.
        dtype = self.reduce if self.reduce != "float32" else self.dtype
        if self.lora and dtype != "float32" and scalar:
            return 2e-2  # the norm of a few thin matrices' gradients: less evens out
        tensors = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 1.5e-1}[dtype]
        return {"float32": 1e-5, "float16": 1e-3, "bfloat16": 5e-3}[dtype] if scalar else tensors

    def __hash__(self) -> int:
        return hash(repr(self))


@dataclass
class Outcome:
    losses: list[float]
    norms: list[float]
    gradients: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    initial: dict[str, np.ndarray]
    parameter_bytes: int
    collectives: dict[Collective, int]  # of the third step, from its data to its last update

    def errors(self, reference: "Outcome") -> dict[str, float]:
        """Relative differences to another outcome."""
        scalars = {"loss": (self.losses, reference.losses), "gradient norm": (self.norms, reference.norms)}
        relative = {k: float(np.abs(np.divide(*v) - 1).max()) for k, v in scalars.items()}  # or NaN
        return relative | {
            "initial weights": difference(self.initial, reference.initial)[0],
            "gradients": difference(self.gradients, reference.gradients)[0],
            "weights": difference(self.weights, reference.weights)[0],
        }


def full(tensor: Tensor) -> np.ndarray:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().float().cpu().numpy().copy()


def config_of(layout: Layout, seed: int, **settings: Any) -> Config:
    """`settings`: keys of [training] and [optimizer]."""
    model = {"name": "unet", "width": 8, "levels": 2} if layout.unet else dict(layout.model)
    training = {
        "seed": seed,
        "local_batch_size": GLOBAL_BATCH,  # that of one process; `SmallRun` divides it
        "mixed_precision_param": layout.dtype,
        "mixed_precision_reduce": layout.reduce,
        "loss": "crps" if layout.members > 1 else layout.loss,
        "members": layout.members,
        "augmentation": "roll_and_mirror" if layout.roll else "none",
        "rollout_steps": (layout.rollout,),
        "steps": 3,
        "variable_weights": (1.0, 2.0, 0.5)[: 3 - layout.roles],
        "max_norm": 0.5,
    }
    optimizer: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.05}
    training |= {key: value for key, value in settings.items() if hasattr(Training, key)}
    optimizer |= {key: value for key, value in settings.items() if hasattr(Optimizer, key)}
    names: dict[str, Any] = {"variables": VARIABLES}
    if layout.roles:
        keys = ("variables", "diagnostic_variables", "forcing_variables")
        names = {key: (name,) for key, name in zip(keys, VARIABLES, strict=True)}
    return Config(
        data=Data(
            static_variables=("one", "another"),
            history=layout.history,
            boundary_width=int(layout.boundary),
            forcings_of_target=layout.roles,
            **names,
        ),
        model=replace(
            Model(dim=32, noise_dim=layout.noise_dim, conserve=("dry_mass",) * layout.conserve), **model
        ),
        optimizer=Optimizer(**optimizer),
        lr_scheduler=LrScheduler(warmup_steps=0, decay_type="constant"),
        training=Training(**training),
        parallelism=Parallelism(**layout.parallelism),
        activation_checkpoint=ActivationCheckpoint(layout.activation_checkpoint),  # type: ignore[arg-type]
        compile=Compile(bool(layout.compile)),
        lora=Lora(rank=4 * layout.lora),
        float8=Float8(layout.float8, enable_fsdp_float8_all_gather=layout.float8_all_gather),
    )


def samples(grid: tuple[int, int], rollout: int = 1, history: int = 1, num: int = 3) -> Tensor:
    """16 windows and what follows them (16, h + R, V, H, W), all but the newest states with holes."""
    generator = torch.Generator().manual_seed(1)
    states, found = torch.randn(16, num, *grid, generator=generator), []
    for step in range(1, rollout + 1):
        targets = states.roll(2 * step, dims=-1) + 0.1 * torch.randn(16, num, *grid, generator=generator)
        holes = torch.rand(16, num, *grid, generator=generator) < 0.1
        found.append(targets.masked_fill(holes, torch.nan))
    older = torch.randn(16, history - 1, num, *grid, generator=generator)
    older = older.masked_fill(torch.rand(older.shape, generator=generator) < 0.1, torch.nan)
    return torch.cat([states[:, None], older, torch.stack(found, dim=1)], dim=1)


def fields_of(grid: tuple[int, int], variables: tuple[str, ...] = VARIABLES) -> Fields:
    """Variables of mean 0 and deviation 1, and two constant fields."""
    static = np.random.default_rng(2).normal(size=(2, *grid))
    num = len(variables)
    moments = (np.zeros(num), np.ones(num), np.ones(num), np.zeros((num, *grid), np.float32))
    nothing = np.zeros(0, "datetime64[s]")
    statistics = Statistics(*moments, dates=nothing, fingerprint="")
    return Fields(variables, global_grid(grid), list(static), statistics)


class SmallRun:
    """A run of train.py's parts on a layout. `settings`: keys of [training] and [optimizer]."""

    def __init__(self, layout: Layout, seed: int = 0, **settings: Any) -> None:
        config = config_of(layout, seed, **settings)
        self.layout, parallelism = layout, config.parallelism
        self.degrees = degrees = resolve_degrees(dist.get_world_size(), parallelism)
        self.mesh = shared_mesh(degrees)
        local = GLOBAL_BATCH // (layout.accumulation * degrees.dp)
        config = replace(config, training=replace(config.training, local_batch_size=local))
        fields = fields_of(layout.grid)
        self.device, area = own_device(), area_weights(fields.grid.latitude)
        with patch("parallelisms.compile.BACKEND", layout.compile), patch(ADAPTER_STD, lambda *_: 0.1):
            assembly = assemble(config, fields, self.mesh, self.device)
        with patch("training.optimizers.build.EPS", EPS):
            self.state = build_state(config, assembly)
        self.run = Run(config, assembly, self.state, area, GLOBAL_BATCH)
        self.model, self.objective = assembly.model, self.run.objective
        self.order = TrainSampler(16, 0, local, self.mesh.dp_rank, degrees.dp)
        self.data = samples(layout.grid, layout.rollout, layout.history)
        self.gradients: dict[str, np.ndarray] = {}  # of the last step, before it was clipped
        self.watch: AbstractContextManager = nullcontext()  # what forward and backward run in

    def batches(self, step: int) -> list[Batch]:
        """The micro-batches of step `step`, counted from 0."""
        rows = islice(self.order.at(step * GLOBAL_BATCH), self.layout.accumulation)
        taken = [Batch(self.data[chosen], 21_600 * torch.tensor(chosen)) for chosen in rows]
        return [Batch(fields.to(self.device), times.to(self.device)) for fields, times in taken]

    def step(self, step: int) -> tuple[float, float]:
        """Loss over all ranks and gradient norm of step `step`, counted from 0."""
        with self.watch:
            loss = accumulate_gradients(self.run, step + 1, self.batches(step))
        found, scale = {name: p.grad for name, p in self.model.parameters.items()}, self.state.scaler.factor
        self.gradients = {name: full(grad) / scale for name, grad in found.items() if grad is not None}
        norm = update_weights(self.run, step + 1, loss)
        self.model.zero_grad()
        dist.all_reduce(loss)
        self.state.progress.advance(GLOBAL_BATCH)
        return loss.item() / self.degrees.dp, norm.item()


def cut(objective: Objective, fields: Tensor, times: Tensor, *noise: Tensor) -> Shards:
    """The shard of a micro-batch's first step, from physical fields (B, h + 1, V, H, W)."""
    window, truths = split_sample(fields, objective.normalizer.history)
    window = objective.repeat_members(objective.normalizer.normalize_window(window))
    return objective.cut(window, truths[:, 0], times, None, *noise)


def three_steps(layout: Layout) -> Outcome:
    """Runs on every rank of the layout; all return the same."""
    torch._dynamo.reset()  # compilations of other layouts count towards a block's limit
    run = SmallRun(layout)
    initial = {name: full(p) for name, p in run.model.parameters.items()}
    losses, norms, first, record = [], [], {}, Recorder(run.mesh)
    for step in range(3):
        record = Recorder(run.mesh)  # of the third step in the end: the first sets groups and shapes up
        run.watch = nullcontext() if layout.compile else record  # compile refuses a dispatch mode around it
        loss, norm = run.step(step)
        losses.append(loss)
        norms.append(norm)
        first = first or run.gradients
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in run.model.parameters.values()]
    window, _ = split_sample(run.data[:2].nan_to_num(), layout.history)
    window, keys = window.to(run.device), torch.arange(2, device=run.device)
    conditions, times = run.objective.conditions, 100_000 * keys
    window = run.objective.normalizer.with_known(window, None)
    inputs = conditions.append(window, times, *conditions.draw(keys, times))
    predicted = full(run.model.predict(inputs))
    group = run.model.pipeline_group
    gradients, initial = (gather_stages(tensors, group) for tensors in (first, initial))
    weights = gather_stages({name: full(p) for name, p in run.model.parameters.items()}, group)
    return Outcome(
        losses,
        norms,
        gradients,
        {**weights, "prediction": predicted},
        initial,
        sum(4 * p.numel() for p in parts),
        dict(record.calls),
    )


def gather_stages(tensors: dict[str, np.ndarray], group: dist.ProcessGroup | None) -> dict[str, np.ndarray]:
    """The tensors of all stages of a pipeline."""
    if group is None:
        return tensors
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, tensors, group=group)
    return {name: value for part in parts for name, value in part.items()}


def difference(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> tuple[float, str]:
    """The largest |got - expected| / |expected| over tensors, and where."""
    assert got.keys() == expected.keys(), got.keys() ^ expected.keys()
    whole = np.sqrt(sum(float(np.square(value).sum()) for value in expected.values()))
    smallest, errors = 1e-3 * whole, {}  # what is zero but for rounding is compared with the whole
    for name, value in expected.items():
        assert got[name].shape == value.shape, name
        errors[name] = float(np.linalg.norm(got[name] - value) / max(np.linalg.norm(value), smallest))
    worst = max(errors, key=lambda name: np.nan_to_num(errors[name], nan=np.inf))  # NaN is larger than all
    return errors[worst], worst


def reference_of(layout: Layout) -> Layout:
    """The same model, data and precision in one process, nothing recomputed, compiled or accumulated."""
    return replace(layout, **vars(Layout()) | {key: getattr(layout, key) for key in MODEL_KEYS})


MODEL_KEYS = (
    "dtype",
    "grid",
    "model",
    "loss",
    "float8",
    "unet",
    "rollout",
    "history",
    "conserve",
    "roles",
    "boundary",
    "members",
    "lora",
    "roll",
)  # what a layout does not change
ODD = (12, 12)  # 9 tokens: neither 2 nor 4 divides them
ROTARY = (("position", "rotary"),)
WINDOWS = (("attention_windows", ((2, 0), (0, 4), (0, 0))),)  # of 4 x 8 tokens
LINES = (("attention_windows", ((1, 0), (0, 1))),)
SWIGLU = (("mlp", "swiglu"),)
OTHER = (("qk_norm", True), ("position", "rotary"))


def tp(degree: int = 2, **more: Any) -> dict[str, Any]:
    return {"tensor_parallel_degree": degree, **more}


def cp(method: str = "ulysses", degree: int = 2, **more: Any) -> dict[str, Any]:
    return {"context_parallel_degree": degree, "context_parallel_method": method, **more}


def replicate(degree: int = 2, **more: Any) -> dict[str, Any]:
    return {"data_parallel_replicate_degree": degree, **more}


def pp(schedule: str = "1F1B", degree: int = 2, **more: Any) -> dict[str, Any]:
    return {"pipeline_parallel_degree": degree, "pipeline_parallel_schedule": schedule, **more}


BASIC: dict[str, Layout] = {
    "accumulation 4": Layout(1, accumulation=4),
    "ac full": Layout(1, activation_checkpoint="full"),
    "ac selective": Layout(1, activation_checkpoint="selective"),
    "ac every 2 blocks": Layout(1, activation_checkpoint="every_n_blocks"),
    "compile": Layout(1, compile="inductor"),
    "ddp 2": Layout(2, replicate()),
    "ddp 2, accumulation 2": Layout(2, replicate(), accumulation=2),
    "zero-1 1": Layout(1, {"data_parallel": "zero1"}),
    "zero-1 2": Layout(2, replicate(data_parallel="zero1")),
    "zero-1 2, accumulation 2": Layout(2, replicate(data_parallel="zero1"), accumulation=2),
    "fsdp 2": Layout(2),
    "fsdp 2, zero-2": Layout(2, {"fsdp_reshard_after_forward": "never"}),
    "fsdp 2, zero-3": Layout(2, {"fsdp_reshard_after_forward": "always"}),
    "fsdp 2, cpu offload": Layout(2, {"cpu_offload": True}),
    "fsdp 2, accumulation 2": Layout(2, accumulation=2),
    "fsdp 2, relative l2": Layout(2, loss="relative_l2"),
    "fsdp 2, mae": Layout(2, loss="mae"),
    "fsdp 2, ac full": Layout(2, activation_checkpoint="full"),
    "fsdp 2, ac selective": Layout(2, activation_checkpoint="selective"),
    "fsdp 2, ac every 2 blocks": Layout(2, activation_checkpoint="every_n_blocks"),
    "fsdp 2, compile": Layout(2, compile="inductor"),
    "fsdp 2, bf16": Layout(2, dtype="bfloat16"),
    "fsdp 2, fp16": Layout(2, dtype="float16"),
    "fsdp 2, float8": Layout(2, float8=True),
    "tp 2, float8": Layout(2, tp(), float8=True),
    "u-net, ddp 2": Layout(2, replicate(), unet=True),
    "u-net, fsdp 2": Layout(2, unet=True),
    "u-net, tiles 2 x 1": Layout(2, cp(), unet=True, grid=(32, 16)),
    "u-net, tiles 1 x 2": Layout(2, cp(), unet=True, grid=(18, 30)),
    "u-net, tiles 1 x 2, ac full": Layout(2, cp(), "full", unet=True, grid=(18, 30)),
    "u-net, tiles 2 x 2": Layout(4, cp(degree=4), unet=True, grid=ODD),
    "u-net, replicate 2 x tiles 2 x 1": Layout(
        4, cp(**replicate(data_parallel_shard_degree=1)), unet=True, grid=(32, 16)
    ),
    "u-net, fsdp 2 x tiles 2 x 1": Layout(4, cp(), unet=True, grid=(32, 16), accumulation=2),
    "tp 2": Layout(2, tp()),
    "tp 2, odd tokens": Layout(2, tp(), grid=ODD),
    "tp 2, qk norm, rotary": Layout(2, tp(), model=OTHER),
    "tp 2, ac selective": Layout(2, tp(), activation_checkpoint="selective"),
    "tp 2, ac full": Layout(2, tp(), activation_checkpoint="full"),
    "tp 2, bf16": Layout(2, tp(), dtype="bfloat16"),
    "tp 2, relative l2": Layout(2, tp(), loss="relative_l2"),
    "tp 2, mae": Layout(2, tp(), loss="mae"),
    "ulysses 2": Layout(2, cp()),
    "ulysses 2, odd tokens, relative l2": Layout(2, cp(), grid=ODD, loss="relative_l2"),
    "ulysses 2, ac full": Layout(2, cp(), activation_checkpoint="full"),
    "all-gather 2": Layout(2, cp("all_gather")),
    "all-gather 2, odd tokens": Layout(2, cp("all_gather"), grid=ODD),
    "ring 2": Layout(2, cp("ring")),
    "ring 2, math, odd tokens": Layout(2, cp("ring"), grid=ODD, model=(("attention_backend", "math"),)),
    "ring 2, bf16": Layout(2, cp("ring"), dtype="bfloat16"),
    "ring 2, bf16 on the way": Layout(2, cp("ring"), reduce="bfloat16"),
    "ring 2, ac selective": Layout(2, cp("ring"), activation_checkpoint="selective"),
    "pp 2, 1f1b": Layout(2, pp()),
    "pp 2, gpipe": Layout(2, pp("GPipe", pipeline_parallel_microbatch_size=2)),
    "pp 2, interleaved": Layout(2, pp("Interleaved1F1B")),
    "pp 2, interleaved zero-bubble": Layout(2, pp("InterleavedZeroBubble")),
    "pp 2, zbv zero-bubble": Layout(2, pp("ZBVZeroBubble")),
    "pp 2, mae": Layout(2, pp(), loss="mae"),
    "pp 2, relative l2": Layout(2, pp(), loss="relative_l2"),
    "pp 2, ac full": Layout(2, pp(), activation_checkpoint="full"),
    "pp 2, accumulation 2": Layout(2, pp(), accumulation=2),
    "pp 2 x fsdp 2": Layout(4, pp()),
    "pp 2 x tp 2": Layout(4, pp(**tp())),
    "pp 2 x ring 2": Layout(4, pp(**cp("ring"))),
    "pp 2 x ulysses 2": Layout(4, pp(**cp())),
    "pp 2 x all-gather 2": Layout(4, pp(**cp("all_gather"))),
    "pp 2 x replicate 2": Layout(4, pp(**replicate(data_parallel_shard_degree=1))),
    "hsdp 2 x 2": Layout(4, replicate()),
    "hsdp 2 x 2, accumulation 2": Layout(4, replicate(), accumulation=2),
    "fsdp 2 x tp 2": Layout(4, tp()),
    "fsdp 2 x tp 2, accumulation 2": Layout(4, tp(), accumulation=2),
    "replicate 2 x tp 2": Layout(4, tp(**replicate(data_parallel_shard_degree=1))),
    "fsdp 2 x ulysses 2": Layout(4, cp()),
    "fsdp 2 x all-gather 2": Layout(4, cp("all_gather")),
    "fsdp 2 x ring 2": Layout(4, cp("ring")),
    "replicate 2 x ring 2": Layout(4, cp("ring", **replicate(data_parallel_shard_degree=1))),
    "ulysses 2 x tp 2": Layout(4, cp(**tp())),
    "all-gather 2 x tp 2": Layout(4, cp("all_gather", **tp())),
    "ring 2 x tp 2, odd tokens": Layout(4, cp("ring", **tp()), grid=ODD),
    "ring 4, odd tokens": Layout(4, cp("ring", 4), grid=ODD),
    "pp 2 x fsdp 2 x tp 2": Layout(8, pp(**tp())),
    "pp 2 x replicate 2 x ulysses 2": Layout(8, pp(**cp(**replicate(data_parallel_shard_degree=1)))),
    "replicate 2 x fsdp 2 x tp 2": Layout(8, tp(**replicate())),
    "vit1b_h100x8: fsdp 4 x ulysses 2, float8, ac selective": Layout(
        8, cp(), activation_checkpoint="selective", float8=True, float8_all_gather=True, dtype="bfloat16"
    ),
    "fsdp 2 x ulysses 2 x tp 2": Layout(8, cp(**tp())),
    "replicate 2 x ring 2 x tp 2": Layout(8, cp("ring", **tp(**replicate(data_parallel_shard_degree=1)))),
}
ROLLOUT = {
    "rollout 4, ac full": Layout(1, activation_checkpoint="full", rollout=4),
    "rollout 4, accumulation 2": Layout(1, accumulation=2, rollout=4),
    "rollout 4, ddp 2, accumulation 2": Layout(2, replicate(), accumulation=2, rollout=4),
    "rollout 4, zero-1 2": Layout(2, replicate(data_parallel="zero1"), rollout=4),
    "rollout 4, fsdp 2": Layout(2, rollout=4),
    "rollout 4, fsdp 2, zero-3": Layout(2, {"fsdp_reshard_after_forward": "always"}, rollout=4),
    "rollout 4, fsdp 2, cpu offload": Layout(2, {"cpu_offload": True}, rollout=4),
    "rollout 2, fsdp 2, fp16": Layout(2, dtype="float16", rollout=2),
    "rollout 4, tp 2, odd grid": Layout(2, tp(), grid=(11, 10), rollout=4),
    "rollout 4, ulysses 2": Layout(2, cp(), rollout=4),
    "rollout 4, all-gather 2, odd grid": Layout(2, cp("all_gather"), grid=(11, 10), rollout=4),
    "rollout 4, ring 2, relative l2": Layout(2, cp("ring"), loss="relative_l2", rollout=4),
    "rollout 4, pp 2, 1f1b": Layout(2, pp(), rollout=4),
    "rollout 4, pp 2, accumulation 2": Layout(2, pp(), accumulation=2, rollout=4),
    "rollout 4, pp 2, gpipe": Layout(2, pp("GPipe", pipeline_parallel_microbatch_size=2), rollout=4),
    "rollout 4, pp 2, interleaved": Layout(2, pp("Interleaved1F1B"), rollout=4),
    "rollout 4, pp 2, interleaved zero-bubble": Layout(2, pp("InterleavedZeroBubble"), rollout=4),
    "rollout 4, pp 2, zbv zero-bubble": Layout(2, pp("ZBVZeroBubble"), rollout=4),
    "rollout 4, u-net, tiles 2 x 1": Layout(2, cp(), unet=True, grid=(32, 16), rollout=4),
    "rollout 4, fsdp 2 x tp 2": Layout(4, tp(), rollout=4),
    "rollout 4, pp 2 x fsdp 2": Layout(4, pp(), rollout=4),
    "rollout 4, pp 2 x tp 2": Layout(4, pp(**tp()), rollout=4),
    "rollout 4, pp 2 x ring 2": Layout(4, pp(**cp("ring")), rollout=4),
    "rollout 4, ulysses 2 x tp 2": Layout(4, cp(**tp()), rollout=4),
}
HISTORY = {
    "history 2, accumulation 2": Layout(1, accumulation=2, history=2),
    "history 2, tp 2, odd grid": Layout(2, tp(), grid=(11, 10), history=2),
    "history 2, ulysses 2": Layout(2, cp(), history=2),
    "history 2, pp 2, 1f1b": Layout(2, pp(), history=2),
    "history 2, fsdp 2 x tp 2": Layout(4, tp(), history=2),
    "history 2, rollout 2, zero-1 2": Layout(2, replicate(data_parallel="zero1"), rollout=2, history=2),
    "history 3, rollout 4, all-gather 2, odd grid": Layout(
        2, cp("all_gather"), grid=(11, 10), rollout=4, history=3
    ),
    "history 2, rollout 2, ring 2": Layout(2, cp("ring"), rollout=2, history=2),
    "history 2, rollout 2, pp 2, 1f1b": Layout(2, pp(), rollout=2, history=2),
    "history 2, rollout 2, u-net, tiles 2 x 1": Layout(
        2, cp(), unet=True, grid=(32, 16), rollout=2, history=2
    ),
    "history 3, rollout 4, fsdp 2 x tp 2": Layout(4, tp(), rollout=4, history=3),
}
ROLES = {
    "boundary, fsdp 2 x tp 2": Layout(4, tp(), boundary=True),
    "boundary, history 2, rollout 2, ulysses 2": Layout(2, cp(), rollout=2, history=2, boundary=True),
    "boundary, roles, rollout 2, pp 2, 1f1b": Layout(2, pp(), rollout=2, roles=True, boundary=True),
    "boundary, u-net, tiles 2 x 1": Layout(2, cp(), unet=True, grid=(32, 16), rollout=2, boundary=True),
    "roles, accumulation 2": Layout(1, accumulation=2, roles=True),
    "roles, fsdp 2 x tp 2": Layout(4, tp(), roles=True),
    "roles, fsdp 2 x ulysses 2": Layout(4, cp(), roles=True),
    "roles, history 2, rollout 2, pp 2, 1f1b": Layout(2, pp(), rollout=2, history=2, roles=True),
    "roles, history 2, rollout 2, tp 2": Layout(2, tp(), rollout=2, history=2, roles=True),
    "roles, crps, rollout 2, ring 2": Layout(2, cp("ring"), rollout=2, members=3, roles=True),
    "roles, u-net, tiles 2 x 1": Layout(2, cp(), unet=True, grid=(32, 16), rollout=2, roles=True),
}
TURNED = {
    "rotary, accumulation 2": Layout(1, accumulation=2, model=ROTARY),
    "rotary, qk norm, tp 2, odd tokens": Layout(2, tp(), grid=ODD, model=(*ROTARY, ("qk_norm", True))),
    "rotary, ulysses 2, odd tokens": Layout(2, cp(), grid=ODD, model=ROTARY),
    "rotary, all-gather 2": Layout(2, cp("all_gather"), model=ROTARY),
    "rotary, ring 2, odd tokens": Layout(2, cp("ring"), grid=ODD, model=ROTARY),
    "rotary, pp 2, 1f1b": Layout(2, pp(), model=ROTARY),
    "rotary, fsdp 2, ac selective": Layout(2, activation_checkpoint="selective", model=ROTARY),
    "rotary, tp 2, float8": Layout(2, tp(), float8=True, model=ROTARY),
    "rotary, tp 2, bf16": Layout(2, tp(), dtype="bfloat16", model=ROTARY),
    "rotary, ulysses 2 x tp 2": Layout(4, cp(**tp()), model=ROTARY),
    "rotary, pp 2 x ring 2": Layout(4, pp(**cp("ring")), model=ROTARY),
}
GATED = {
    "swiglu, fsdp 2": Layout(2, model=SWIGLU),
    "swiglu, fsdp 2, compile": Layout(2, compile="inductor", model=SWIGLU),
    "swiglu, tp 2": Layout(2, tp(), model=SWIGLU),
    "swiglu, tp 2, float8": Layout(2, tp(), float8=True, model=SWIGLU),
    "swiglu, tp 2, ac selective": Layout(2, tp(), activation_checkpoint="selective", model=SWIGLU),
    "swiglu, lora, fsdp 2": Layout(2, lora=True, model=SWIGLU),
    "swiglu, rmse, pp 2": Layout(2, pp(), loss="rmse", model=SWIGLU),
    "swiglu, rmse, fsdp 2 x tp 2, accumulation 2": Layout(4, tp(), accumulation=2, loss="rmse", model=SWIGLU),
    "rmse, tp 2, odd tokens": Layout(2, tp(), grid=ODD, loss="rmse"),
    "rmse, ulysses 2, odd tokens": Layout(2, cp(), grid=ODD, loss="rmse"),
    "rmse, rollout 4, ring 2": Layout(2, cp("ring"), loss="rmse", rollout=4),
    "rmse, u-net, tiles 2 x 1": Layout(2, cp(), unet=True, grid=(32, 16), loss="rmse"),
}
WINDOWED = {
    "windows, accumulation 2": Layout(1, accumulation=2, model=WINDOWS),
    "windows, ac selective": Layout(1, activation_checkpoint="selective", model=WINDOWS),
    "windows, ac full": Layout(1, activation_checkpoint="full", model=WINDOWS),
    "windows, fsdp 2": Layout(2, model=WINDOWS),
    "windows, fsdp 2, compile": Layout(2, compile="inductor", model=WINDOWS),
    "windows, fsdp 2, bf16": Layout(2, dtype="bfloat16", model=WINDOWS),
    "windows, fsdp 2, float8": Layout(2, float8=True, model=WINDOWS),
    "windows, tp 2": Layout(2, tp(), model=WINDOWS),
    "windows, tp 2, odd tokens": Layout(2, tp(), grid=ODD, model=LINES),
    "windows, ulysses 2": Layout(2, cp(), model=WINDOWS),
    "windows, rotary, ulysses 2, odd tokens": Layout(2, cp(), grid=ODD, model=(*ROTARY, *LINES)),
    "windows, pp 2, 1f1b": Layout(2, pp(), model=WINDOWS),
    "windows, pp 2, zbv zero-bubble": Layout(2, pp("ZBVZeroBubble"), model=WINDOWS),
    "windows, rollout 4, fsdp 2": Layout(2, rollout=4, model=WINDOWS),
    "windows, rollout 2, crps, tp 2": Layout(2, tp(), rollout=2, members=3, model=WINDOWS),
    "windows, lora, fsdp 2": Layout(2, lora=True, model=WINDOWS),
    "windows, fsdp 2 x tp 2": Layout(4, tp(), model=WINDOWS),
    "windows, ulysses 2 x tp 2, math": Layout(4, cp(**tp()), model=(*WINDOWS, ("attention_backend", "math"))),
    "windows, pp 2 x ulysses 2": Layout(4, pp(**cp()), model=WINDOWS),
}
ENSEMBLES = {
    "crps, accumulation 2": Layout(1, accumulation=2, members=4),
    "crps, ac full": Layout(1, activation_checkpoint="full", members=4),
    "crps, ddp 2": Layout(2, replicate(), members=4),
    "crps, fsdp 2, bf16": Layout(2, dtype="bfloat16", members=4),
    "crps, tp 2, odd grid": Layout(2, tp(), grid=(11, 10), members=3),
    "crps, ulysses 2": Layout(2, cp(), members=4),
    "crps, ring 2, odd grid": Layout(2, cp("ring"), grid=(11, 10), members=3),
    "crps, pp 2, 1f1b": Layout(2, pp(), members=4),
    "crps, pp 2, gpipe": Layout(2, pp("GPipe", pipeline_parallel_microbatch_size=2), members=2),
    "crps, pp 2, zbv zero-bubble": Layout(2, pp("ZBVZeroBubble"), members=2),
    "crps, u-net, tiles 1 x 2": Layout(2, cp(), unet=True, members=3),
    "crps, fsdp 2 x tp 2": Layout(4, tp(), members=4),
    "crps, pp 2 x tp 2": Layout(4, pp(**tp()), members=2),
    "crps, rollout 2, accumulation 2": Layout(1, accumulation=2, rollout=2, members=4),
    "crps, rollout 2, tp 2": Layout(2, tp(), rollout=2, members=3),
    "crps, rollout 2, ring 2": Layout(2, cp("ring"), rollout=2, members=3),
    "crps, rollout 2, pp 2": Layout(2, pp(), rollout=2, members=3),
    "crps, rollout 2, fsdp 2 x tp 2": Layout(4, tp(), rollout=2, members=3),
    "crps, history 2, rollout 2, tp 2": Layout(2, tp(), rollout=2, history=2, members=3),
}
CONSERVING = {
    "conserve, accumulation 2": Layout(1, accumulation=2, conserve=True),
    "conserve, fsdp 2, bf16": Layout(2, dtype="bfloat16", conserve=True),
    "conserve, tp 2, odd grid": Layout(2, tp(), grid=(11, 10), conserve=True),
    "conserve, ring 2, odd grid": Layout(2, cp("ring"), grid=(11, 10), conserve=True),
    "conserve, pp 2, 1f1b": Layout(2, pp(), conserve=True),
    "conserve, pp 2, zbv zero-bubble": Layout(2, pp("ZBVZeroBubble"), conserve=True),
    "conserve, u-net, tiles 2 x 1": Layout(2, cp(), unet=True, grid=(32, 16), conserve=True, rollout=2),
    "conserve, crps, rollout 2, tp 2": Layout(2, tp(), rollout=2, members=3, conserve=True),
    "conserve, rollout 2, fsdp 2 x ulysses 2": Layout(4, cp(), rollout=2, conserve=True),
    "conserve, rollout 2, fsdp 2 x ulysses 2, crps": Layout(4, cp(), rollout=2, members=3, conserve=True),
    "conserve, rollout 2, pp 2 x tp 2": Layout(4, pp(**tp()), rollout=2, conserve=True),
}
DROPPED = (("stochastic_depth", 0.5), ("num_layers", 4))
DROPPING = {
    "drop, accumulation 4": Layout(1, accumulation=4, model=DROPPED),
    "drop, ac every 2 blocks": Layout(1, activation_checkpoint="every_n_blocks", model=DROPPED),
    "drop, ddp 2": Layout(2, replicate(), model=DROPPED),
    "drop, fsdp 2, ac selective": Layout(2, activation_checkpoint="selective", model=DROPPED),
    "drop, fsdp 2, bf16": Layout(2, dtype="bfloat16", model=DROPPED),
    "drop, ring 2, odd tokens": Layout(2, cp("ring"), grid=ODD, model=DROPPED),
    "drop, pp 2, 1f1b": Layout(2, pp(), model=DROPPED),
    "drop, rollout 4, pp 2, interleaved": Layout(2, pp("Interleaved1F1B"), rollout=4, model=DROPPED),
    "drop, crps, rollout 2, fsdp 2 x tp 2": Layout(4, tp(), rollout=2, members=3, model=DROPPED),
}
ADAPTED = {
    "lora, accumulation 2": Layout(1, accumulation=2, lora=True),
    "lora, ac full": Layout(1, activation_checkpoint="full", lora=True),
    "lora, ac selective": Layout(1, activation_checkpoint="selective", lora=True),
    "lora, ddp 2": Layout(2, replicate(), lora=True),
    "lora, zero-1 2": Layout(2, replicate(data_parallel="zero1"), lora=True),
    "lora, fsdp 2": Layout(2, lora=True),
    "lora, fsdp 2, bf16": Layout(2, dtype="bfloat16", lora=True),
    "lora, fsdp 2, zero-3": Layout(2, {"fsdp_reshard_after_forward": "always"}, lora=True),
    "lora, fsdp 2, cpu offload": Layout(2, {"cpu_offload": True}, lora=True),
    "lora, ulysses 2": Layout(2, cp(), lora=True),
    "lora, ring 2": Layout(2, cp("ring"), lora=True),
    "lora, pp 2, 1f1b": Layout(2, pp(), lora=True),
    "lora, pp 2, gpipe": Layout(2, pp("GPipe", pipeline_parallel_microbatch_size=2), lora=True),
    "lora, pp 2, interleaved": Layout(2, pp("Interleaved1F1B"), lora=True),
    "lora, pp 2, interleaved zero-bubble": Layout(2, pp("InterleavedZeroBubble"), lora=True),
    "lora, pp 2, zbv zero-bubble": Layout(2, pp("ZBVZeroBubble"), lora=True),
    "lora, hsdp 2 x 2": Layout(4, replicate(), lora=True),
    "lora, rollout 2, fsdp 2": Layout(2, rollout=2, lora=True),
    "lora, crps, fsdp 2": Layout(2, members=3, lora=True),
}
ROLLED = {
    "roll, accumulation 2": Layout(1, accumulation=2, roll=True),
    "roll, ddp 2": Layout(2, replicate(), roll=True),
    "roll, fsdp 2, compile": Layout(2, compile="inductor", roll=True),
    "roll, tp 2, odd grid": Layout(2, tp(), grid=(11, 10), roll=True),
    "roll, ulysses 2": Layout(2, cp(), roll=True),
    "roll, all-gather 2, odd grid": Layout(2, cp("all_gather"), grid=(11, 10), roll=True),
    "roll, ring 2, odd tokens": Layout(2, cp("ring"), grid=ODD, roll=True),
    "roll, u-net, tiles 1 x 2": Layout(2, cp(), unet=True, roll=True),
    "roll, pp 2, 1f1b": Layout(2, pp(), roll=True),
    "roll, lora, fsdp 2": Layout(2, lora=True, roll=True),
    "roll, windows, drop, fsdp 2": Layout(2, model=(*WINDOWS, *DROPPED), roll=True),
    "roll, history 2, rollout 4, fsdp 2 x tp 2": Layout(4, tp(), rollout=4, history=2, roll=True),
    "roll, crps, rollout 2, ring 2": Layout(2, cp("ring"), rollout=2, members=3, roll=True),
    "roll, roles, rollout 2, pp 2, 1f1b": Layout(2, pp(), rollout=2, roles=True, roll=True),
    "roll, conserve, rollout 2, u-net, tiles 2 x 1": Layout(
        2, cp(), unet=True, grid=(32, 16), conserve=True, rollout=2, roll=True
    ),
}
TABLE = (
    BASIC
    | ROLLOUT
    | HISTORY
    | ROLES
    | TURNED
    | GATED
    | WINDOWED
    | ENSEMBLES
    | CONSERVING
    | DROPPING
    | ADAPTED
    | ROLLED
)
# Every technique and every pair of them compiled too: without the C++ of inductor, which takes half a minute.
# Of these the parts are compiled in others.
NOT_COMPILED = [
    "ddp 2",
    "zero-1 1",
    "zero-1 2, accumulation 2",
    "fsdp 2",
    "fsdp 2, accumulation 2",
    "fsdp 2, relative l2",
    "fsdp 2, mae",
    "u-net, tiles 2 x 1",
    "u-net, tiles 1 x 2, ac full",
    "u-net, tiles 2 x 2",
    "u-net, replicate 2 x tiles 2 x 1",
    "tp 2",
    "tp 2, relative l2",
    "ulysses 2",
    "all-gather 2",
    "ring 2, bf16 on the way",
    "pp 2, mae",
    "pp 2, relative l2",
    "pp 2, accumulation 2",
    "hsdp 2 x 2, accumulation 2",
    "fsdp 2 x tp 2, accumulation 2",
    "ring 4, odd tokens",
]
COMPILED = [name for name, layout in BASIC.items() if layout.ranks < 8 and name not in NOT_COMPILED]
COMPILED += [*ROLLOUT, *HISTORY, *TURNED, *WINDOWED, *ENSEMBLES, *CONSERVING, *DROPPING, *ADAPTED, *ROLLED]
TABLE |= {
    f"{name}, compile": replace(TABLE[name], compile="aot_eager")
    for name in COMPILED
    if not TABLE[name].compile
}
FAST = [
    "drop, ddp 2",
    "drop, rollout 4, pp 2, interleaved",
    "accumulation 4",
    "ddp 2, accumulation 2",
    "zero-1 2",
    "fsdp 2",
    "fsdp 2, zero-2",
    "fsdp 2, ac selective",
    "fsdp 2, bf16",
    "fsdp 2, fp16",
    "fsdp 2, float8",
    "u-net, tiles 1 x 2, ac full",
    "u-net, replicate 2 x tiles 2 x 1",
    "u-net, fsdp 2 x tiles 2 x 1",
    "tp 2, odd tokens",
    "tp 2, qk norm, rotary",
    "tp 2, ac full",
    "ulysses 2, odd tokens, relative l2",
    "all-gather 2",
    "ring 2, math, odd tokens",
    "ring 2, bf16 on the way",
    "ring 2, compile",
    "windows, tp 2, odd tokens",
    "windows, rotary, ulysses 2, odd tokens",
    "pp 2, 1f1b",
    "pp 2, zbv zero-bubble, compile",
    "pp 2 x fsdp 2",
    "hsdp 2 x 2, accumulation 2",
    "fsdp 2 x tp 2, accumulation 2",
    "fsdp 2 x ring 2",
    "ulysses 2 x tp 2",
    "rollout 4, accumulation 2",
    "rollout 4, all-gather 2, odd grid",
    "rollout 4, pp 2, 1f1b",
    "rollout 4, fsdp 2 x tp 2",
    "history 2, rollout 2, u-net, tiles 2 x 1",
    "rotary, ring 2, odd tokens",
    "crps, accumulation 2",
    "crps, tp 2, odd grid",
    "crps, ulysses 2, compile",
    "crps, u-net, tiles 1 x 2",
    "crps, rollout 2, pp 2",
    "conserve, pp 2, 1f1b",
    "conserve, u-net, tiles 2 x 1",
    "conserve, rollout 2, fsdp 2 x ulysses 2, crps",
    "lora, fsdp 2",
    "lora, pp 2, zbv zero-bubble",
    "roll, ring 2, odd tokens",
    "roll, history 2, rollout 4, fsdp 2 x tp 2",
    "roll, crps, rollout 2, ring 2",
]
SLOW = [
    "zero-1 1",
    "ac full",
    "ac selective",
    "ac every 2 blocks",
    "fsdp 2, accumulation 2",
    "tp 2, mae",
    "ring 2",
    "windows, rotary, ulysses 2, odd tokens, compile",
    "windows, pp 2, 1f1b",
    "pp 2, interleaved",
    "pp 2, zbv zero-bubble",
    "hsdp 2 x 2",
    "fsdp 2 x tp 2",
    "rotary, qk norm, tp 2, odd tokens",
    "rotary, pp 2, 1f1b",
    "crps, ulysses 2",
    "crps, pp 2, 1f1b",
    "crps, fsdp 2 x tp 2",
    "crps, rollout 2, fsdp 2 x tp 2",
    "crps, history 2, rollout 2, tp 2",
    "lora, ac selective",
    "roll, crps, rollout 2, ring 2, compile",
]
