"""A run's identity: whatever its weights would mean otherwise is refused, and nobody else writes into it."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zarr

from benchmarks.attack_case import Case, refused, runs, warned
from benchmarks.attack_stage import MORE, Stage
from tests.sample_archives import weatherbench
from tests.test_identity import NAMES, waves
from training.run_folder import lock_folder

KIND = "identity"
U, V = NAMES
MEANING = {
    "model.name": "unet",
    "model.patch_size": "[2, 4]",
    "model.dim": "32",
    "model.num_layers": "1",
    "model.num_heads": "4",
    "model.mlp_dim": "32",
    "model.position": "sincos",
    "model.qkv_bias": "false",
    "model.qk_norm": "true",
    "model.predict": "state",
    "data.variables": f'["{V}", "{U}"]',
    "data.static_variables": '["land_sea_mask"]',
    "data.forcings": '["sin_local_time"]',
    "data.step_hours": "12",
}
LEADS = ["--validation.lead_hours", "[12]"]  # that go with 12 hours too
MODELS = [key for key in MEANING if key.startswith("model.")]


def cases(stage: Stage, *_: Any) -> Iterator[Case]:
    yield from meanings(stage)
    yield from fine_tunings(stage)
    yield from other_data(stage)
    yield from what_may_change(stage)
    yield from second_starts(stage)


def meanings(stage: Stage) -> Iterator[Case]:
    """Every key that weights depend on, on resume and in a forecast."""
    for verb in ("train", "forecast"):
        for key, value in MEANING.items():
            more = ["--training.steps", str(MORE), *LEADS, f"--{key}", value]
            word = key if key != "data.static_variables" else "land_sea_mask"
            command = [verb, *stage.options(stage.run, *more)]
            yield Case(KIND, f"{verb} with {key} = {value}", command, refused(word), keeps=stage.run)


def fine_tunings(stage: Stage) -> Iterator[Case]:
    for key in MODELS:
        own = stage.fresh(f"fine-{key}")
        load = ["--checkpoint.initial_load_path", str(stage.run), f"--{key}", MEANING[key]]
        command = ["train", *stage.options(own, *load)]
        yield Case(KIND, f"fine-tuning with {key}", command, refused(key), keeps=stage.run)


def other_data(stage: Stage) -> Iterator[Case]:
    """Under the path and the dates that the run knows."""

    def stretch(path: Path) -> None:
        array: Any = zarr.open_group(str(path), mode="r+")[U]
        array[20:22] = array[20:22] + 3

    def units(path: Path) -> None:
        zarr.open_group(str(path), mode="r+")[V].attrs["units"] = "knots"
        zarr.consolidate_metadata(str(path), zarr_format=2)

    def swapped(path: Path) -> None:
        (path / U).rename(path / "between")
        (path / V).rename(path / U)
        (path / "between").rename(path / V)

    def replaced(ds: Any) -> Callable[[Path], object]:
        def replace(path: Path) -> None:
            shutil.rmtree(path)
            weatherbench(path.parent, ds)

        return replace

    shifted = waves().assign_coords(longitude=waves().longitude + 1)
    flipped = waves().isel(latitude=slice(None, 3))
    changes = {
        "a stretch of two dates": (stretch, "mean of", ""),
        "other units": (units, "std of", ""),  # converted: other numbers, and weather to start from
        "variables swapped": (swapped, "is", ""),
        "a shifted grid": (replaced(shifted), "grid", "grid"),
        "half a grid": (replaced(flipped), "grid", "grid"),
        "louder waves": (replaced(waves() * 1.5), "std of", ""),
    }
    for name, (change, trained, forecast) in changes.items():
        for verb, word in (("train", trained), ("forecast", forecast)):
            if not word:  # a forecast may start from other analyses
                continue
            path = stage.fresh(f"data {verb} {name}") / "wb.zarr"
            command = [verb, *stage.options(stage.run, "--training.steps", str(MORE))]
            yield Case(
                KIND,
                f"{verb}: {name}",
                [*command, "--data.path", str(path)],
                refused(word),
                prepare=lambda path=path, change=change: (shutil.copytree(stage.data, path), change(path)),
                keeps=stage.run,
            )


def what_may_change(stage: Stage) -> Iterator[Case]:
    """Said in one line, and done."""
    for key, value in (
        ("optimizer.lr", "1e-4"),
        ("training.seed", "3"),
        ("training.max_norm", "2"),
        ("data.validation_period", '["2020-01-15", "2020-01-17"]'),
    ):
        folder = stage.fresh(f"changed {key}")
        command = ["train", *stage.options(folder, "--training.steps", str(MORE), f"--{key}", value)]
        prepare = stage.copying(folder)
        yield Case(KIND, f"resume with {key}", command, warned(f"changed since .*{key} "), prepare=prepare)
    folder = stage.fresh("undisturbed")
    command = ["train", *stage.options(folder, "--training.steps", str(MORE))]
    prepare = stage.copying(folder)
    yield Case(KIND, "resume with nothing changed", command, runs(stage.goes_on(folder)), prepare=prepare)
    folder = stage.fresh("evaluated")
    command = ["evaluate", *stage.options(folder, "--data.variables", f'["{V}"]')]
    right = runs(lambda: stage.differs(folder))
    yield Case(KIND, "evaluate with other variables", command, right, prepare=stage.copying(folder))
    again = ["--forecast.num_steps", "3"]
    command = ["forecast", *stage.options(stage.run, *again)]
    yield Case(KIND, "another forecast in the store", command, refused("forecast.path"), keeps=stage.run)


def second_starts(stage: Stage) -> Iterator[Case]:
    """While another run holds the folder."""
    for name, more in (
        ("with checkpoints", []),
        ("without", ["--checkpoint.enable", "false", "--checkpoint.keep_best="]),
    ):
        folder, held = stage.fresh(f"held {name}"), []
        hold = stage.copying(folder, lambda path, held=held: held.append(lock_folder(path)))
        command = ["train", *stage.options(folder, "--training.steps", str(MORE), *more)]
        right = refused("another run writes there")
        yield Case(KIND, f"a second start {name}", command, right, prepare=hold, keeps=folder)
