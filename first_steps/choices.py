"""Model, rate, batch, steps and dates of a first run: what shipped configurations and docs/recipe.md found.

Shapes: H latitudes, W longitudes, V variables.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from config import SECTIONS, Config
from conversion.description import split_periods
from errors import DataError
from first_steps.data import is_whole_state
from first_steps.questions import Answers
from jobs.host_memory import host_memory
from parallelisms.degrees import num_ranks

Why = str
Choices = dict[str, dict[str, tuple[Any, Why]]]  # section -> key -> value, and the reason for it
FEW_SAMPLES = 5_000  # docs/recipe.md: with 79 and with 3,192 a U-Net is ahead of a ViT at equal FLOPs
MOST_STEPS = 70_000  # unet.toml
PASSES = 12  # through the training samples: gfs_winds.toml (12.7), unet.toml (10)
FEW_TOKENS = 128  # demo.toml
LEADS = (24, 72, 120)  # hours, beside the first step
ROLLOUTS = (2, 4, 8)  # steps: demo_rollout.toml, vit1b_rollout.toml
LARGE = 50e9  # bytes of a period's fields as float32, from which on statistics come from a part of the dates
CACHED = 0.25  # of the host's memory, for fields that are kept in it
STATISTICS_DATES = 1000  # vit1b.toml, unet.toml


@dataclass(frozen=True)
class Size:
    """Of a ViT."""

    dim: int
    layers: int
    heads: int
    as_in: str


DEMO = Size(192, 4, 4, "demo.toml")
TUTORIAL = Size(384, 12, 8, "tutorial_base.toml")
BASE = Size(768, 12, 12, "the ViT-Base, heads of 64")
LARGEST = Size(1536, 48, 24, "vit1b.toml")


@dataclass(frozen=True)
class Situation:
    """What the choices hang on."""

    answers: Answers
    samples: int  # of training
    leads: tuple[int, ...]  # hours that the validation period has
    periods: tuple[list[str], list[str]]
    rollouts: tuple[int, ...]  # steps, of which the training period has samples

    @property
    def on_gpu(self) -> bool:
        return self.answers.cluster is None or not self.answers.cluster.shared

    @property
    def devices(self) -> int:
        return self.answers.cluster.devices if self.answers.cluster else num_ranks()

    @property
    def tries(self) -> bool:
        return self.answers.goal == "try"

    @property
    def is_unet(self) -> bool:
        return self.samples < FEW_SAMPLES

    @property
    def whole_state(self) -> bool:
        return is_whole_state(self.answers.variables)

    @property
    def grid_text(self) -> str:
        return " x ".join(map(str, self.answers.shape))

    @property
    def field_bytes(self) -> float:
        """Of the predicted fields of all dates as float32."""
        return 4.0 * self.samples * len(self.answers.variables) * math.prod(self.answers.shape)

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.devices * samples_each(self.devices, self.is_unet)


def samples_each(devices: int, is_unet: bool) -> int:
    """Of a step, on a device: of a U-Net 4 in all, of a ViT 16 in all, or 8 each up to 768 in all."""
    if is_unet:
        return math.ceil(4 / devices)
    return min(max(8, math.ceil(16 / devices)), max(768 // devices, 1))


def look(answers: Answers) -> Situation:
    """DataError: there are no samples to train on."""
    archive, step = answers.found.archive, answers.found.step_hours
    times = archive.times[archive.has(answers.variables)]
    if len(times) < 3:
        raise DataError(
            f"--variables: of {len(archive.times)} dates {len(times)} have all of them; name others"
        )
    train, validation = split_periods(times)
    held_out = times >= np.datetime64(validation[0], "s")
    wanted = (step, *(hours for hours in LEADS if hours > step and hours % step == 0))
    leads = tuple(hours for hours in wanted if pairs(times[held_out], hours))
    samples = pairs(times[~held_out], step)
    if not samples:
        raise DataError(f"{answers.found.path!r}: no two dates of {train} lie {step} hours apart")
    rollouts = tuple(n for n in ROLLOUTS if pairs(times[~held_out], (n + 1) * step) > 0)
    if answers.goal == "long" and not rollouts:
        reason = "its training period is too short for rollouts; take --goal baseline"
        raise DataError(f"{answers.found.path!r}: {reason}")
    return Situation(answers, samples, leads, (train, validation), rollouts)


def pairs(times: np.ndarray, hours: int) -> int:
    """How many dates have another one so many hours later."""
    return int(np.isin(times + np.timedelta64(hours, "h"), times).sum())


def choose(case: Situation) -> Choices:
    """The configuration of one-step training. Its layout over ranks is planning's: first_steps/layout.py."""
    model, optimizer = (unet(case), unet_rate(case)) if case.is_unet else (vit(case), vit_rate(case))
    made = {"data": data(case), "model": model, **optimizer, "training": training(case)}
    made["training"] |= {"local_batch_size": (case.batch // case.devices, "samples of a rank at once")}
    made["compile"] = {"enable": (True, "kernels of a block are joined")} if case.on_gpu else {}
    made["checkpoint"], made["validation"] = saves(made["training"]["steps"][0]), scores(case)
    made["metrics"] = {"log_freq": (1, "a line a step")} if case.tries else {}
    return {section: keys for section, keys in made.items() if keys}


def data(case: Situation) -> dict[str, tuple[Any, Why]]:
    found, (train, validation) = case.answers.found, case.periods
    whole_year = validation[0].endswith("-01-01")
    held_out = "the last year" if whole_year else "the last 15 % of the dates"
    made_by = "what --data named" if not case.answers.is_coarser else "that datasets.convert makes"
    keys: dict[str, tuple[Any, Why]] = {
        "path": (case.answers.data_path, made_by),
        "variables": (case.answers.variables, f"{len(case.answers.variables)}, predicted"),
    }
    if found.archive.static_variables:
        keys["static_variables"] = (found.archive.static_variables, "constant fields of the data, input only")
    if not found.is_simulated:
        sun = ["toa_incident_solar_radiation", "sin_local_time", "cos_local_time"]
        keys["forcings"] = (sun, "the time of day and of the year as fields, computed; input only")
    if found.select and not case.answers.is_coarser:
        keys["select"] = (list(found.select), "what --select named")
    return keys | {
        "step_hours": (found.step_hours, "the distance between dates"),
        "history": history(case),
        "train_period": (train, f"{case.samples} samples"),
        "validation_period": (validation, f"{held_out}, which training never sees"),
        "grid_shape": (list(case.answers.shape), "anything else at data.path is refused"),
        **reading(case),
    }


def history(case: Situation) -> tuple[int, Why]:
    if case.whole_state:
        return 1, "mass and wind are there: a state says how it goes on; 2 may gain more (docs/recipe.md)"
    enough = case.samples > 2 * PASSES
    why = "not all of the state is predicted: the one before shows where it goes (docs/recipe.md)"
    return (2, why) if enough else (1, "too few dates for windows of two states")


def reading(case: Situation) -> dict[str, tuple[Any, Why]]:
    """Fields that fit are kept in memory, others are read ahead."""
    size = case.field_bytes * 1.25  # validation too
    known = case.answers.cluster
    memory = known.host_memory if known and not case.answers.is_here else host_memory()
    if size < CACHED * memory:
        return {"cache_gib": (float(max(1, math.ceil(size / 2**30))), "all fields are kept in memory")}
    keys: dict[str, tuple[Any, Why]] = {
        "cache_gib": (0.0, f"{size / 1e9:.0f} GB of fields are not kept in memory"),
        "num_workers": (8 if case.on_gpu else 1, "that read ahead, a rank"),
    }
    if size > LARGE:
        keys["statistics_dates"] = (STATISTICS_DATES, "means and deviations from so many; 0: from every date")
    return keys


# -- the model, and its rate


def unet(case: Situation) -> dict[str, tuple[Any, Why]]:
    width = 64 if case.on_gpu and not case.tries else 16 if case.tries else 32
    levels = min(max(round(math.log2(min(case.answers.shape))) - 2, 1), 4)
    return {
        "name": ("unet", f"{case.samples} samples: a U-Net learns from few (docs/recipe.md)"),
        "width": (width, {16: "demo_unet.toml", 32: "gfs_winds.toml", 64: "unet.toml"}[width]),
        "levels": (levels, "the coarsest has about 4 rows" if levels < 4 else "unet.toml"),
    }


def unet_rate(case: Situation) -> Choices:
    wide = unet(case)["width"][0] == 64
    rate = (5e-4, "unet.toml") if wide else (4e-3, "demo_unet.toml, gfs_winds.toml")
    warmup = {"warmup_steps": (20, "gfs_winds.toml")} if case.tries else fraction()
    return {"optimizer": {"lr": rate}, "lr_scheduler": warmup}


def fraction() -> dict[str, tuple[Any, Why]]:
    return {"warmup_fraction": (0.05, "of the steps: vit1b_muon.toml")}


def size_of(case: Situation) -> Size:
    """By hardware, and no larger than the data are for."""
    if not case.on_gpu:
        return DEMO
    if case.tries:
        return TUTORIAL
    return LARGEST if case.devices >= 32 and case.samples > 10 * FEW_SAMPLES else BASE


def vit(case: Situation) -> dict[str, tuple[Any, Why]]:
    size, (rows, columns) = size_of(case), case.answers.shape
    patch, tokens = patch_of(case.answers.shape, 8192 if case.on_gpu else 512)
    kernel = ("math", "fastest on few tokens") if tokens <= 512 else ("auto", "measured at the start")
    return {
        "name": ("vit", f"{case.samples} samples; below {FEW_SAMPLES} a U-Net (docs/recipe.md)"),
        "patch_size": ([patch, patch], f"{rows} x {columns} points: {tokens} tokens"),
        "dim": (size.dim, size.as_in),
        "num_layers": (size.layers, size.as_in),
        "num_heads": (size.heads, size.as_in),
        "attention_backend": kernel,
    }


def patch_of(shape: tuple[int, int], most: int) -> tuple[int, int]:
    """The smallest patch from 4 on (of a small grid, from 1 on) with at most so many tokens; their number."""
    cells = math.prod(shape)
    least = 4 if cells >= 16 * FEW_TOKENS else 2 if cells >= 4 * FEW_TOKENS else 1
    for patch in (least * 2**n for n in range(7)):
        tokens = math.ceil(shape[0] / patch) * math.ceil(shape[1] / patch)
        if tokens <= most:
            break
    return patch, tokens


def vit_rate(case: Situation) -> Choices:
    if not case.on_gpu:
        return {"optimizer": {"lr": (2e-3, "demo.toml")}, "lr_scheduler": {"warmup_steps": (50, "demo.toml")}}
    rate = {
        "lr": (5e-4, "tutorial_base.toml, at batch 16"),
        "lr_scaling": ("sqrt", "with the root of the batch"),
        "lr_reference_batch_size": (16, "for which lr is meant"),
        "lr_max": (1e-3, "vit1b_adamw.toml: beyond it AdamW begins to be at risk"),
    }
    return {"optimizer": rate, "lr_scheduler": fraction()}


# -- how long, what is kept, what is scored


def training(case: Situation) -> dict[str, tuple[Any, Why]]:
    few = (250, "gfs_winds.toml") if case.is_unet else (400, "demo.toml")
    many = min(PASSES * case.samples // case.batch, MOST_STEPS)
    is_short = case.tries or many < few[0]
    steps = few if is_short else (many, f"{PASSES} passes, as gfs_winds.toml has, up to {MOST_STEPS:,} steps")
    keys: dict[str, tuple[Any, Why]] = {
        "steps": steps,
        "global_batch_size": (case.batch, f"{case.batch * steps[0] / case.samples:.1f} passes in all"),
    }
    if len(case.answers.variables) > 2:
        keys["weight_by_change"] = (True, "fast variables do not drown slow ones: era5_64x32.toml, unet.toml")
    if case.on_gpu:
        keys["mixed_precision_param"] = ("bfloat16", "matrices multiply in it; weights stay float32")
    return keys


def saves(steps: int) -> dict[str, tuple[Any, Why]]:
    return {
        "enable": (True, "the same command goes on where it was stopped"),
        "interval": (min(max(steps // 8, 1), 1000), "steps between saves"),
        "keep_latest_k": (2, "the last two"),
    }


def scores(case: Situation) -> dict[str, tuple[Any, Why]]:
    """Beside persistence, damped persistence and climatology, over every date of the validation period."""
    if not case.leads:
        return {"enable": (False, "the validation period has no two dates a step apart")}
    steps = training(case)["steps"][0]
    often = {} if case.tries else {"interval": (max(steps // 4, 1), "four times, to see it learn")}
    batch = {"local_batch_size": (case.batch // case.devices, "initial dates of a rank at once")}
    return {"lead_hours": (list(case.leads), "that the validation period has dates for"), **batch, **often}


# -- the stage of rollouts


def rollout_stage(case: Situation, first: Config, folder: str) -> Choices:
    """Keys over the first stage's: docs/rollout.md, demo_rollout.toml, vit1b_rollout.toml."""
    lengths, training = list(case.rollouts), first.training
    few = first.optimizer.lr >= 1e-3  # small models: those of demo_rollout.toml
    rate = (first.optimizer.lr / 4, "a quarter: demo_rollout.toml") if few else (1e-5, "vit1b_rollout.toml")
    steps = max(training.steps // 20, len(lengths))
    none = {"warmup_fraction": (0.0, "warmup_steps")} if first.lr_scheduler.warmup_fraction else {}
    stage: Choices = {
        "optimizer": {"lr": rate},
        "lr_scheduler": {"warmup_steps": (max(steps // 6, 1), "a sixth"), **none},
        "training": {
            "steps": (steps, "a twentieth of the first stage: demo_rollout.toml"),
            "rollout_steps": (lengths, "forecasts of so many steps, in stages"),
        },
        "checkpoint": {
            "initial_load_path": (folder, "the first stage's weights"),
            "interval": (max(steps // 3, 1), "steps between saves"),
        },
    }
    if first.optimizer.lr_reference_batch_size:
        stage["optimizer"]["lr_reference_batch_size"] = (0, "lr as it stands")
    if first.validation.interval:
        stage["validation"] = {"interval": (max(steps // 2, 1), "twice")}
    if not few:
        stage["comm"] = {"train_timeout_seconds": (600, "a step has many passes: vit1b_rollout.toml")}
    return stage


# -- as a configuration


def config_of(choices: Choices, base: Mapping[str, Any] | None = None) -> Config:
    """Unchecked; over the sections of `base`."""
    made = {}
    for section, cls in SECTIONS.items():
        values = {key: frozen(value) for key, (value, _) in choices.get(section, {}).items()}
        made[section] = dataclasses.replace(base[section] if base else cls(), **values)
    return Config(**made)


def frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
