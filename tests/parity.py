"""Three optimiser steps of a small model on any layout, by train.py's own assembly and step.

What comes back is layout-free: losses, gradient norms, full gradients of the first step, full weights after
the third. A layout is right when all of it is what one process gives.
"""

import re
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
        found, scale = (
            {name: p.grad for name, p in self.model.parameters.items()},
            float(self.state.scaler.factor),
        )
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
    """The same model, data and precision in one process, nothing recomputed, compiled or accumulated: what
    MODEL_KEYS name is not the layout's.
    """
    return replace(layout, **vars(Layout()) | {key: getattr(layout, key) for key in MODEL_KEYS})


MODEL_KEYS = (
    "dtype grid model loss float8 unet rollout history conserve roles boundary members lora roll".split()
)


def tp(degree: int = 2, **more: Any) -> dict[str, Any]:
    return {"tensor_parallel_degree": degree, **more}


def cp(method: str = "ulysses", degree: int = 2, **more: Any) -> dict[str, Any]:
    return {"context_parallel_degree": degree, "context_parallel_method": method, **more}


def replicate(degree: int = 2, **more: Any) -> dict[str, Any]:
    return {"data_parallel_replicate_degree": degree, **more}


def pp(schedule: str = "1F1B", degree: int = 2, **more: Any) -> dict[str, Any]:
    return {"pipeline_parallel_degree": degree, "pipeline_parallel_schedule": schedule, **more}


# Words of a row's name: by how much one multiplies the ranks, and its keys of [parallelism]; fields of
# Layout; keys of [model].
AXES: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp 2": (2, replicate()),
    "zero-1 1": (1, {"data_parallel": "zero1"}),
    "zero-1 2": (2, replicate(data_parallel="zero1")),
    "replicate 2": (2, replicate(data_parallel_shard_degree=1)),
    "hsdp 2 x 2": (4, replicate()),
    "fsdp 2": (2, {}),
    "fsdp 4": (4, {}),
    "zero-2": (1, {"fsdp_reshard_after_forward": "never"}),
    "zero-3": (1, {"fsdp_reshard_after_forward": "always"}),
    "cpu offload": (1, {"cpu_offload": True}),
    "tp 2": (2, tp()),
    "ulysses 2": (2, cp()),
    "all-gather 2": (2, cp("all_gather")),
    "ring 2": (2, cp("ring")),
    "ring 4": (4, cp("ring", 4)),
    "tiles 2 x 1": (2, cp()),
    "tiles 1 x 2": (2, cp()),
    "tiles 2 x 2": (4, cp(degree=4)),
    "pp 2": (2, pp()),
    "1f1b": (1, pp()),
    "gpipe": (1, pp("GPipe", pipeline_parallel_microbatch_size=2)),
    "interleaved": (1, pp("Interleaved1F1B")),
    "interleaved zero-bubble": (1, pp("InterleavedZeroBubble")),
    "zbv zero-bubble": (1, pp("ZBVZeroBubble")),
}
FIELDS: dict[str, dict[str, Any]] = {
    "ac full": {"activation_checkpoint": "full"},
    "ac selective": {"activation_checkpoint": "selective"},
    "ac every 2 blocks": {"activation_checkpoint": "every_n_blocks"},
    "compile": {"compile": "aot_eager"},  # without the C++ of inductor, which takes half a minute
    "inductor": {"compile": "inductor"},
    "bf16": {"dtype": "bfloat16"},
    "fp16": {"dtype": "float16"},
    "bf16 on the way": {"reduce": "bfloat16"},
    "float8 gathered": {"float8": True, "float8_all_gather": True},
    "relative l2": {"loss": "relative_l2"},
    "mae": {"loss": "mae"},
    "rmse": {"loss": "rmse"},
    "u-net": {"unet": True},
    "tiles 2 x 1": {"grid": (32, 16)},
    "odd tokens": {"grid": (12, 12)},  # 9: neither 2 nor 4 divides them
    "odd grid": {"grid": (11, 10)},
    "padded grid": {"grid": (18, 30)},
}
FIELDS |= {word: {word: True} for word in ("boundary", "conserve", "float8", "lora", "roles", "roll")}
NUMBERED = {"accumulation": "accumulation", "rollout": "rollout", "history": "history", "crps of": "members"}
FIELDS |= {f"{word} {n}": {key: n} for word, key in NUMBERED.items() for n in (2, 3, 4)}
MODEL: dict[str, tuple[tuple[str, Any], ...]] = {
    "math": (("attention_backend", "math"),),
    "qk norm": (("qk_norm", True),),
    "rotary": (("position", "rotary"),),
    "swiglu": (("mlp", "swiglu"),),
    "windows": (("attention_windows", ((2, 0), (0, 4), (0, 0))),),  # of 4 x 8 tokens
    "lines": (("attention_windows", ((1, 0), (0, 1))),),
    "drop": (("stochastic_depth", 0.5), ("num_layers", 4)),
}
WORDS = "|".join(map(re.escape, sorted({*AXES, *FIELDS, *MODEL}, key=len, reverse=True)))


def layout_of(name: str) -> Layout:
    """The layout that the words of a name describe, such as "rotary, pp 2 x ring 2"."""
    assert not re.sub(rf"({WORDS})(, | x |$)", "", name), f"{name}: a word is not known"
    ranks, parallelism, fields, model = 1, {}, {}, ()
    for word in re.findall(WORDS, name):
        factor, keys = AXES.get(word, (1, {}))
        ranks *= factor
        parallelism |= keys
        fields |= FIELDS.get(word, {})
        model += MODEL.get(word, ())
    return Layout(ranks, parallelism, model=model, **fields)


# Names of rows by the sign that follows: * is run by the tests, + by the slow ones, - is not compiled too, as
# its parts are compiled in others.
MARKED: dict[str, list[str]] = {"*": [], "+": [], "-": []}


def rows(names: str) -> dict[str, Layout]:
    """Rows of the table, whose names are separated by semicolons."""
    found = {}
    for text in names.split(";"):
        name = " ".join(text.split()).rstrip("*+-")
        found[name] = layout_of(name)
        for sign in text.strip()[len(name) :]:
            MARKED[sign].append(name)
    return found


BASIC = rows("""
accumulation 4*; ac full+; ac selective+; ac every 2 blocks+; inductor; ddp 2-; ddp 2, accumulation 2*;
zero-1 1+-; zero-1 2*; zero-1 2, accumulation 2-; fsdp 2*-; fsdp 2, zero-2*; fsdp 2, zero-3;
fsdp 2, cpu offload; fsdp 2, accumulation 2+-; fsdp 2, relative l2-; fsdp 2, mae-; fsdp 2, ac full;
fsdp 2, ac selective*; fsdp 2, ac every 2 blocks; fsdp 2, inductor+; fsdp 2, bf16*; fsdp 2, fp16*;
fsdp 2, float8*; tp 2, float8; u-net, ddp 2; u-net, fsdp 2; u-net, tiles 2 x 1-;
u-net, tiles 1 x 2, padded grid; u-net, tiles 1 x 2, padded grid, ac full*-;
u-net, tiles 2 x 2, odd tokens-; u-net, replicate 2 x tiles 2 x 1*-;
u-net, fsdp 2 x tiles 2 x 1, accumulation 2*; tp 2-; tp 2, odd tokens*; tp 2, qk norm, rotary*;
tp 2, ac selective; tp 2, ac full*; tp 2, bf16; tp 2, relative l2-; tp 2, mae+; ulysses 2-;
ulysses 2, odd tokens, relative l2*; ulysses 2, ac full; all-gather 2*-; all-gather 2, odd tokens; ring 2+;
ring 2, math, odd tokens*; ring 2, bf16; ring 2, bf16 on the way*-; ring 2, ac selective; pp 2, 1f1b*;
pp 2, gpipe; pp 2, interleaved+; pp 2, interleaved zero-bubble; pp 2, zbv zero-bubble+; pp 2, mae-;
pp 2, relative l2-; pp 2, ac full; pp 2, accumulation 2-; pp 2 x fsdp 2*; pp 2 x tp 2; pp 2 x ring 2;
pp 2 x ulysses 2; pp 2 x all-gather 2; pp 2 x replicate 2; hsdp 2 x 2+; hsdp 2 x 2, accumulation 2*-;
fsdp 2 x tp 2+; fsdp 2 x tp 2, accumulation 2*-; replicate 2 x tp 2; fsdp 2 x ulysses 2;
fsdp 2 x all-gather 2; fsdp 2 x ring 2*; replicate 2 x ring 2; ulysses 2 x tp 2*; all-gather 2 x tp 2;
ring 2 x tp 2, odd tokens; ring 4, odd tokens-; pp 2 x fsdp 2 x tp 2; pp 2 x replicate 2 x ulysses 2;
hsdp 2 x 2 x tp 2; fsdp 4 x ulysses 2, float8 gathered, bf16, ac selective; fsdp 2 x ulysses 2 x tp 2;
replicate 2 x ring 2 x tp 2
""")
ROLLOUT = rows("""
rollout 4, ac full; rollout 4, accumulation 2*; rollout 4, ddp 2, accumulation 2; rollout 4, zero-1 2;
rollout 4, fsdp 2; rollout 4, fsdp 2, zero-3; rollout 4, fsdp 2, cpu offload; rollout 2, fsdp 2, fp16;
rollout 4, tp 2, odd grid; rollout 4, ulysses 2; rollout 4, all-gather 2, odd grid*; rollout 4, ring 2,
relative l2; rollout 4, pp 2, 1f1b*; rollout 4, pp 2, accumulation 2; rollout 4, pp 2, gpipe; rollout 4, pp
2, interleaved; rollout 4, pp 2, interleaved zero-bubble; rollout 4, pp 2, zbv zero-bubble; rollout 4,
u-net, tiles 2 x 1; rollout 4, fsdp 2 x tp 2*; rollout 4, pp 2 x fsdp 2; rollout 4, pp 2 x tp 2; rollout 4,
pp 2 x ring 2; rollout 4, ulysses 2 x tp 2
""")
HISTORY = rows("""
history 2, accumulation 2; history 2, tp 2, odd grid; history 2, ulysses 2; history 2, pp 2, 1f1b;
history 2, fsdp 2 x tp 2; history 2, rollout 2, zero-1 2; history 3, rollout 4, all-gather 2, odd grid;
history 2, rollout 2, ring 2; history 2, rollout 2, pp 2, 1f1b; history 2, rollout 2, u-net, tiles 2 x 1*;
history 3, rollout 4, fsdp 2 x tp 2
""")
ROLES = rows("""
boundary, fsdp 2 x tp 2; boundary, history 2, rollout 2, ulysses 2; boundary, roles, rollout 2, pp 2, 1f1b;
boundary, rollout 2, u-net, tiles 2 x 1; roles, accumulation 2; roles, fsdp 2 x tp 2; roles, fsdp 2 x
ulysses 2; roles, history 2, rollout 2, pp 2, 1f1b; roles, history 2, rollout 2, tp 2; roles, crps of 3,
rollout 2, ring 2; roles, rollout 2, u-net, tiles 2 x 1
""")
TURNED = rows("""
rotary, accumulation 2; rotary, qk norm, tp 2, odd tokens+; rotary, ulysses 2, odd tokens;
rotary, all-gather 2; rotary, ring 2, odd tokens*; rotary, pp 2, 1f1b+; rotary, fsdp 2, ac selective;
rotary, tp 2, float8; rotary, tp 2, bf16; rotary, ulysses 2 x tp 2; rotary, pp 2 x ring 2
""")
GATED = rows("""
swiglu, fsdp 2; swiglu, fsdp 2, inductor; swiglu, tp 2; swiglu, tp 2, float8; swiglu, tp 2, ac selective;
swiglu, lora, fsdp 2; swiglu, rmse, pp 2; swiglu, rmse, fsdp 2 x tp 2, accumulation 2; rmse, tp 2, odd
tokens; rmse, ulysses 2, odd tokens; rmse, rollout 4, ring 2; rmse, u-net, tiles 2 x 1
""")
WINDOWED = rows("""
windows, accumulation 2; windows, ac selective; windows, ac full; windows, fsdp 2; windows, fsdp 2, bf16;
windows, fsdp 2, float8; windows, tp 2; lines, tp 2, odd tokens*; windows, ulysses 2;
lines, rotary, ulysses 2, odd tokens*; windows, pp 2, 1f1b+; windows, pp 2, zbv zero-bubble;
windows, rollout 4, fsdp 2; windows, rollout 2, crps of 3, tp 2; windows, lora, fsdp 2;
windows, fsdp 2 x tp 2; windows, ulysses 2 x tp 2, math; windows, pp 2 x ulysses 2
""")
ENSEMBLES = rows("""
crps of 4, accumulation 2*; crps of 4, ac full; crps of 4, ddp 2; crps of 4, fsdp 2, bf16; crps of 3, tp 2,
odd grid*; crps of 4, ulysses 2+; crps of 3, ring 2, odd grid; crps of 4, pp 2, 1f1b+; crps of 2, pp 2,
gpipe; crps of 2, pp 2, zbv zero-bubble; crps of 3, u-net, tiles 1 x 2*; crps of 4, fsdp 2 x tp 2+; crps of
2, pp 2 x tp 2; crps of 4, rollout 2, accumulation 2; crps of 3, rollout 2, tp 2; crps of 3, rollout 2, ring
2; crps of 3, rollout 2, pp 2*; crps of 3, rollout 2, fsdp 2 x tp 2+; crps of 3, history 2, rollout 2, tp 2+
""")
CONSERVING = rows("""
conserve, accumulation 2; conserve, fsdp 2, bf16; conserve, tp 2, odd grid; conserve, ring 2, odd grid;
conserve, pp 2, 1f1b*; conserve, pp 2, zbv zero-bubble; conserve, rollout 2, u-net, tiles 2 x 1*;
conserve, crps of 3, rollout 2, tp 2; conserve, rollout 2, fsdp 2 x ulysses 2;
conserve, rollout 2, fsdp 2 x ulysses 2, crps of 3*; conserve, rollout 2, pp 2 x tp 2
""")
DROPPING = rows("""
drop, accumulation 4; drop, ac every 2 blocks; drop, ddp 2*; drop, fsdp 2, ac selective; drop, fsdp 2, bf16;
drop, ring 2, odd tokens; drop, pp 2, 1f1b; drop, rollout 4, pp 2, interleaved*; drop, crps of 3, rollout 2,
fsdp 2 x tp 2
""")
ADAPTED = rows("""
lora, accumulation 2; lora, ac full; lora, ac selective+; lora, ddp 2; lora, zero-1 2; lora, fsdp 2*;
lora, fsdp 2, bf16; lora, fsdp 2, zero-3; lora, fsdp 2, cpu offload; lora, ulysses 2; lora, ring 2;
lora, pp 2, 1f1b; lora, pp 2, gpipe; lora, pp 2, interleaved; lora, pp 2, interleaved zero-bubble;
lora, pp 2, zbv zero-bubble*; lora, hsdp 2 x 2; lora, rollout 2, fsdp 2; lora, crps of 3, fsdp 2
""")
ROLLED = rows("""
roll, accumulation 2; roll, ddp 2; roll, fsdp 2, inductor; roll, tp 2, odd grid; roll, ulysses 2; roll,
all-gather 2, odd grid; roll, ring 2, odd tokens*; roll, u-net, tiles 1 x 2; roll, pp 2, 1f1b; roll, lora,
fsdp 2; roll, windows, drop, fsdp 2; roll, history 2, rollout 4, fsdp 2 x tp 2*; roll, crps of 3, rollout 2,
ring 2*; roll, roles, rollout 2, pp 2, 1f1b; roll, conserve, rollout 2, u-net, tiles 2 x 1
""")
TABLE = BASIC | ROLLOUT | HISTORY | ROLES | TURNED | GATED | WINDOWED | ENSEMBLES | CONSERVING
TABLE |= DROPPING | ADAPTED | ROLLED
# Every technique and every pair of them compiled too: without the C++ of inductor, which takes half a minute.
COMPILED = [name for name, layout in BASIC.items() if layout.ranks < 8 and name not in MARKED["-"]]
COMPILED += [*ROLLOUT, *HISTORY, *TURNED, *WINDOWED, *ENSEMBLES, *CONSERVING, *DROPPING, *ADAPTED, *ROLLED]
TABLE |= rows(";".join(f"{name}, compile" for name in COMPILED if not TABLE[name].compile))
FAST = [*MARKED["*"], "ring 2, compile", "pp 2, zbv zero-bubble, compile", "crps of 4, ulysses 2, compile"]
SLOW = [*MARKED["+"], "lines, rotary, ulysses 2, odd tokens, compile"]
SLOW += ["roll, crps of 3, rollout 2, ring 2, compile"]
