"""Three optimiser steps of a small ViT on any layout, by the functions that train.py is made of.

What comes back is layout-free: losses, gradient norms, full gradients of the first step, full weights after
the third. A layout is right when all of it is what one process gives.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from config import ActivationCheckpoint, Compile, Float8, Parallelism
from datasets.grid import area_weights
from datasets.loader import TrainSampler
from models.build import WeatherModel
from models.unet import UNet
from models.vit import VisionTransformer
from parallelisms.collectives import Collective, Recorder
from parallelisms.degrees import resolve_degrees
from parallelisms.layout_checks import degrees_asked
from parallelisms.parallelize import parallelize
from tests.distributed import shared_mesh
from training.ema import EMA
from training.gradients import LossScaler, clip, total_norm
from training.losses import mse_loss, mse_weights, relative_l2_loss, relative_l2_weights, sum_of_squares
from training.optimizers import build_optimizer, set_lr

GLOBAL_BATCH = 8
# Some gradients are zero but for rounding (a bias of all keys moves no softmax); with a small eps Adam
# would blow that rounding up to full steps.
EPS = 1e-4


@dataclass(frozen=True)
class Layout:
    """One row of the table."""

    ranks: int = 1
    parallelism: dict[str, Any] = field(default_factory=dict)
    activation_checkpoint: str = "none"
    compile: bool = False
    dtype: str = "float32"
    accumulation: int = 1
    grid: tuple[int, int] = (16, 32)
    model: tuple[tuple[str, Any], ...] = ()
    loss: str = "mse"
    float8: bool = False  # emulated
    float8_all_gather: bool = False
    unet: bool = False

    def tolerance(self, what: str) -> float:
        """Largest relative difference to one process; initial weights have to be the same bits."""
        if what == "initial weights":
            return 0.0
        scalar = what in ("loss", "gradient norm")
        if self.float8:  # a value at the border between two of float8's goes either way
            return 5e-3 if scalar else 0.2
        # Half precision rounds in another order: the size of its own rounding, which Adam follows by its
        # sign.
        tensors = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 1e-1}[self.dtype]
        return {"float32": 1e-5, "float16": 1e-3, "bfloat16": 5e-3}[self.dtype] if scalar else tensors

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
        relative = {k: max(abs(a / b - 1) for a, b in zip(*v, strict=True)) for k, v in scalars.items()}
        return relative | {
            "initial weights": difference(self.initial, reference.initial)[0],
            "gradients": difference(self.gradients, reference.gradients)[0],
            "weights": difference(self.weights, reference.weights)[0],
        }


def full(tensor: Tensor) -> np.ndarray:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().float().cpu().numpy().copy()


def samples(grid: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """16 samples: inputs (5 channels), targets (3 variables) and a mask with holes."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(16, 5, *grid, generator=generator)
    targets = inputs[:, :3].roll(2, dims=-1) + 0.1 * torch.randn(16, 3, *grid, generator=generator)
    return inputs, targets, torch.rand(16, 3, *grid, generator=generator) > 0.1


def build(layout: Layout) -> WeatherModel:
    with torch.device("meta"):
        if layout.unet:
            return UNet(5, 3, layout.grid, width=8, levels=2)
        return VisionTransformer(5, 3, layout.grid, (4, 4), 32, 4, 4, **dict(layout.model))


class SmallRun:
    """A model on a layout with its optimiser and data, by the functions that train.py is made of."""

    def __init__(self, layout: Layout, seed: int = 0, ema_decay: float = 0.0) -> None:
        parallelism = Parallelism(**layout.parallelism)
        self.layout = layout
        self.degrees = degrees = resolve_degrees(dist.get_world_size(), **degrees_asked(parallelism))
        self.mesh = shared_mesh(degrees, parallelism.axis_order)
        dtype = getattr(torch, layout.dtype)
        self.plan = build(layout)
        checkpointing = ActivationCheckpoint(mode=layout.activation_checkpoint, every_n_blocks=2)  # type: ignore[arg-type]
        float8 = Float8(layout.float8, emulate=True, enable_fsdp_float8_all_gather=layout.float8_all_gather)
        options = (parallelism, checkpointing, Compile(layout.compile), dtype, torch.float32, float8)
        self.model = parallelize(self.plan, self.mesh, torch.device("cpu"), seed, *options)
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = build_optimizer(self.model.own_parameters(), (0.9, 0.95), EPS, 0.05, "fused")
        set_lr(self.optimizer, 1e-2)
        self.scaler = LossScaler(dtype == torch.float16)
        self.average = EMA(self.parameters, ema_decay) if ema_decay else None
        self.local = GLOBAL_BATCH // (degrees.dp * layout.accumulation)
        self.sampler = TrainSampler(16, 0, self.local, layout.accumulation, self.mesh.dp_rank, degrees.dp)
        self.data = samples(layout.grid)
        latitude = np.linspace(88, -88, layout.grid[0])
        self.area = torch.tensor(area_weights(latitude), dtype=torch.float32)
        self.gradients: dict[str, np.ndarray] = {}
        self.watch: AbstractContextManager = nullcontext()  # what forward and backward run in
        if self.model.pipeline:
            micro_batches = self.local // parallelism.pipeline_parallel_microbatch_size
            schedule = parallelism.pipeline_parallel_schedule
            self.model.pipeline.schedule(schedule, micro_batches, self.loss_of)

    def loss_of(self, output: Tensor, target: Tensor, weights: Tensor) -> Tensor:
        squares = sum_of_squares(output, target, weights)
        if self.layout.loss == "mse":
            return mse_loss(squares)
        return relative_l2_loss(squares, self.local, self.model.shards.sum_over_pieces)

    def micro_batches(self, step: int) -> Tensor:
        """This rank's share of the loss of a step, with gradients left in the parameters."""
        (inputs, targets, mask), plan, shards = self.data, self.plan, self.model.shards
        total = torch.zeros(())
        for micro in range(self.layout.accumulation):
            rows = self.sampler.local_batch(step * GLOBAL_BATCH, micro)
            if self.layout.loss == "mse":
                weights = mse_weights(mask[rows], self.area, torch.tensor([1.0, 2.0, 0.5]))
            else:
                weights = relative_l2_weights(mask[rows], targets[rows])
            total += self.model.forward_backward(
                shards.cut_input(plan.to_pieces(inputs[rows])),
                shards.cut_output(plan.to_pieces(targets[rows])),
                shards.cut_output(plan.to_pieces(weights, with_zeros=True)),
                self.loss_of,
                self.scaler.factor / self.layout.accumulation,
                micro == self.layout.accumulation - 1,
            )
        return total

    def step(self, step: int) -> tuple[float, float]:
        """Loss over all ranks and gradient norm of step `step`, counted from 0; gradients stay in
        `gradients`.
        """
        with self.watch:
            total = self.micro_batches(step)
        parameters = self.parameters.values()
        self.scaler.unscale(parameters)
        norm = total_norm(parameters, self.model.pipeline_group)
        if step == 0:
            self.gradients = {n: full(p.grad) for n, p in self.parameters.items() if p.grad is not None}
        clip(parameters, 0.5, norm)
        if self.scaler.good(norm):
            self.optimizer.step()
            self.model.after_update()
            if self.average:
                self.average.update(step + 1)
        self.model.zero_grad()
        dist.all_reduce(total)
        return total.item() / self.degrees.dp / self.layout.accumulation, norm.item()


def three_steps(layout: Layout) -> Outcome:
    """Runs on every rank of the layout; all return the same."""
    run = SmallRun(layout)
    initial = {name: full(p) for name, p in run.parameters.items()}
    losses, norms, record = [], [], Recorder(run.mesh)
    for step in range(3):
        record = Recorder(run.mesh)  # of the third step in the end: the first sets groups and shapes up
        run.watch = nullcontext() if layout.compile else record  # compile refuses a dispatch mode around it
        loss, norm = run.step(step)
        losses.append(loss)
        norms.append(norm)
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in run.parameters.values()]
    predicted = full(run.model.predict(run.data[0][:2]))
    group = run.model.pipeline_group
    gradients, initial = (gather_stages(tensors, group) for tensors in (run.gradients, initial))
    weights = gather_stages({name: full(p) for name, p in run.parameters.items()}, group)
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
    smallest, worst = 1e-3 * whole, (0.0, "")  # what is zero but for rounding is compared with the whole
    for name, value in expected.items():
        assert got[name].shape == value.shape, name
        error = float(np.linalg.norm(got[name] - value) / max(np.linalg.norm(value), smallest))
        worst = max(worst, (error, name))
    return worst


def reference_of(layout: Layout) -> Layout:
    """The same model, data and precision in one process, nothing recomputed, compiled or accumulated."""
    return replace(layout, **vars(Layout()) | {key: getattr(layout, key) for key in MODEL_KEYS})


MODEL_KEYS = ("dtype", "grid", "model", "loss", "float8", "unet")  # what a layout does not change
ODD = (12, 12)  # 9 tokens: neither 2 nor 4 divides them
OTHER = (("qk_norm", True), ("position", "sincos"), ("qkv_bias", False))


def tp(degree: int = 2, **more: Any) -> dict[str, Any]:
    return {"tensor_parallel_degree": degree, **more}


def cp(method: str = "ulysses", degree: int = 2, **more: Any) -> dict[str, Any]:
    return {"context_parallel_degree": degree, "context_parallel_method": method, **more}


def replicate(degree: int = 2, **more: Any) -> dict[str, Any]:
    return {"data_parallel_replicate_degree": degree, **more}


def pp(schedule: str = "1F1B", degree: int = 2, **more: Any) -> dict[str, Any]:
    return {"pipeline_parallel_degree": degree, "pipeline_parallel_schedule": schedule, **more}


TABLE: dict[str, Layout] = {
    "accumulation 4": Layout(1, accumulation=4),
    "ac full": Layout(1, activation_checkpoint="full"),
    "ac selective": Layout(1, activation_checkpoint="selective"),
    "ac every 2 blocks": Layout(1, activation_checkpoint="every_n_blocks"),
    "compile": Layout(1, compile=True),
    "ddp 2": Layout(2, replicate()),
    "ddp 2, accumulation 2": Layout(2, replicate(), accumulation=2),
    "zero-1 2": Layout(2, replicate(data_parallel="zero1")),
    "zero-1 2, accumulation 2": Layout(2, replicate(data_parallel="zero1"), accumulation=2),
    "fsdp 2": Layout(2),
    "fsdp 2, zero-2": Layout(2, {"fsdp_reshard_after_forward": "never"}),
    "fsdp 2, zero-3": Layout(2, {"fsdp_reshard_after_forward": "always"}),
    "fsdp 2, cpu offload": Layout(2, {"cpu_offload": True}),
    "fsdp 2, accumulation 2": Layout(2, accumulation=2),
    "fsdp 2, relative l2": Layout(2, loss="relative_l2"),
    "fsdp 2, ac full": Layout(2, activation_checkpoint="full"),
    "fsdp 2, ac selective": Layout(2, activation_checkpoint="selective"),
    "fsdp 2, ac every 2 blocks": Layout(2, activation_checkpoint="every_n_blocks"),
    "fsdp 2, compile": Layout(2, compile=True),
    "fsdp 2, bf16": Layout(2, dtype="bfloat16"),
    "fsdp 2, fp16": Layout(2, dtype="float16"),
    "fsdp 2, float8": Layout(2, float8=True),
    "tp 2, float8": Layout(2, tp(), float8=True),
    "u-net, ddp 2": Layout(2, replicate(), unet=True),
    "u-net, fsdp 2": Layout(2, unet=True),
    "u-net, tiles 2 x 1": Layout(2, {"domain_parallel_tiles": (2, 1)}, unet=True),
    "u-net, tiles 1 x 2": Layout(2, {"domain_parallel_tiles": (1, 2)}, unet=True, grid=(18, 30)),
    "u-net, tiles 2 x 2": Layout(4, {"domain_parallel_tiles": (2, 2)}, unet=True),
    "u-net, fsdp 2 x tiles 2 x 1": Layout(4, {"domain_parallel_tiles": (2, 1)}, unet=True, accumulation=2),
    "tp 2": Layout(2, tp()),
    "tp 2, odd tokens": Layout(2, tp(), grid=ODD),
    "tp 2, qk norm, sincos": Layout(2, tp(), model=OTHER),
    "tp 2, ac selective": Layout(2, tp(), activation_checkpoint="selective"),
    "tp 2, ac full": Layout(2, tp(), activation_checkpoint="full"),
    "tp 2, bf16": Layout(2, tp(), dtype="bfloat16"),
    "tp 2, relative l2": Layout(2, tp(), loss="relative_l2"),
    "ulysses 2": Layout(2, cp()),
    "ulysses 2, odd tokens, relative l2": Layout(2, cp(), grid=ODD, loss="relative_l2"),
    "ulysses 2, ac full": Layout(2, cp(), activation_checkpoint="full"),
    "all-gather 2": Layout(2, cp("all_gather")),
    "all-gather 2, odd tokens": Layout(2, cp("all_gather"), grid=ODD),
    "ring 2": Layout(2, cp("ring")),
    "ring 2, math, odd tokens": Layout(2, cp("ring"), grid=ODD, model=(("attention_backend", "math"),)),
    "ring 2, bf16": Layout(2, cp("ring"), dtype="bfloat16"),
    "pp 2, 1f1b": Layout(2, pp()),
    "pp 2, gpipe": Layout(2, pp("GPipe", pipeline_parallel_microbatch_size=2)),
    "pp 2, interleaved": Layout(2, pp("Interleaved1F1B")),
    "pp 2, interleaved zero-bubble": Layout(2, pp("InterleavedZeroBubble")),
    "pp 2, zbv zero-bubble": Layout(2, pp("ZBVZeroBubble")),
    "pp 2, named splits": Layout(2, pp(pipeline_parallel_splits=(1,))),
    "pp 2, relative l2": Layout(2, pp(), loss="relative_l2"),
    "pp 2, ac full": Layout(2, pp(), activation_checkpoint="full"),
    "pp 2, accumulation 2": Layout(2, pp(), accumulation=2),
    "pp 2 x fsdp 2": Layout(4, pp()),
    "pp 2 x tp 2": Layout(4, pp(**tp())),
    "pp 2 x ring 2": Layout(4, pp(**cp("ring"))),
    "hsdp 2 x 2": Layout(4, replicate()),
    "hsdp 2 x 2, accumulation 2": Layout(4, replicate(), accumulation=2),
    "fsdp 2 x tp 2": Layout(4, tp()),
    "fsdp 2 x tp 2, accumulation 2": Layout(4, tp(), accumulation=2),
    "replicate 2 x tp 2": Layout(4, tp(**replicate(data_parallel_shard_degree=1))),
    "fsdp 2 x ulysses 2": Layout(4, cp()),
    "fsdp 2 x all-gather 2": Layout(4, cp("all_gather")),
    "fsdp 2 x ring 2": Layout(4, cp("ring")),
    "ulysses 2 x tp 2": Layout(4, cp(**tp())),
    "ring 2 x tp 2, odd tokens": Layout(4, cp("ring", **tp()), grid=ODD),
    "ring 4, odd tokens": Layout(4, cp("ring", 4), grid=ODD),
    "fsdp 2 x tp 2, tp slowest": Layout(4, tp(axis_order=("tp", "cp", "dp_shard", "dp_replicate", "pp"))),
    "pp 2 x fsdp 2 x tp 2": Layout(8, pp(**tp())),
    "pp 2 x replicate 2 x ulysses 2": Layout(8, pp(**cp(**replicate(data_parallel_shard_degree=1)))),
    "replicate 2 x fsdp 2 x tp 2": Layout(8, tp(**replicate())),
    "fsdp 2 x ulysses 2 x tp 2": Layout(8, cp(**tp())),
    "replicate 2 x ring 2 x tp 2": Layout(8, cp("ring", **tp(**replicate(data_parallel_shard_degree=1)))),
}
FAST = [
    "accumulation 4",
    "ac full",
    "ac selective",
    "ac every 2 blocks",
    "ddp 2, accumulation 2",
    "zero-1 2",
    "fsdp 2",
    "fsdp 2, zero-2",
    "fsdp 2, accumulation 2",
    "fsdp 2, ac selective",
    "fsdp 2, bf16",
    "fsdp 2, fp16",
    "fsdp 2, float8",
    "u-net, fsdp 2 x tiles 2 x 1",
    "tp 2, odd tokens",
    "tp 2, qk norm, sincos",
    "tp 2, ac full",
    "ulysses 2, odd tokens, relative l2",
    "all-gather 2",
    "ring 2",
    "ring 2, math, odd tokens",
    "pp 2, 1f1b",
    "pp 2, interleaved",
    "pp 2, zbv zero-bubble",
    "pp 2 x fsdp 2",
    "hsdp 2 x 2",
    "fsdp 2 x tp 2",
    "fsdp 2 x ring 2",
    "ulysses 2 x tp 2",
]
