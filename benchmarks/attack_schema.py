"""Command lines and configurations: every key with values that it cannot mean, each verb's own options, the
environment, files that are no configuration, paths that are no data.
"""

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.attack_case import ROOT, Case, either, refused, runs
from benchmarks.attack_stage import Stage
from config import SECTIONS
from tests.test_fuzz import bad_values

KIND, QUICK = "schema", 10.0  # seconds that a bad command line may take
RUN_TRAIN, PYTHON = str(ROOT / "run_train.sh"), sys.executable
PLAN = ["--cluster", "a100x8"]
OWN = {
    "plan": [
        ["--world_size", "0"],
        ["--world_size", "1000000000000000000000000000000"],
        ["--world_size", "x"],
        ["--world_size"],
        ["--cluster", ""],
        ["--cluster", "nonsense9"],
        ["--cluster", "a100x0"],
        ["--cluster", "a100x99999999999999"],
        ["--cluster", "a100x-1"],
        ["--clusters", "nowhere.toml", "--cluster", "a100x8"],
        ["--scenario", "nonsense"],
        [*PLAN, "--layout", "sideways"],
        [*PLAN, "--sweep", "gpus=a,b"],
        [*PLAN, "--sweep", "gpus=0,-8"],
        [*PLAN, "--sweep", "gpus="],
        [*PLAN, "--training.rollout_steps", "[0]"],
        [*PLAN, "--training.rollout_steps", "nan"],
        ["--dry_run", "--world_size", "100000"],
        ["--dry_run", "--rollout_steps", "4"],
        ["--dry_run", "--training.rollout_steps", "[]"],
        [*PLAN, "--slowest", "nan"],
        [*PLAN, "--slowest", "0.5"],
        [*PLAN, "--restart_minutes", "-1"],
        [*PLAN, "--restart_minutes", "inf"],
        [*PLAN, "--jsn"],
    ],
    "forecast": [
        ["--export"],
        ["--export", "model.onnx"],
        ["--export", "a\0b.pt2"],
        ["--export", "/proc/nowhere/model.pt2"],
        ["--forecast.checkpoint", "/nowhere"],
        ["--forecast.num_steps", "0"],
        ["--forecast.num_steps", "1" + "0" * 12],
        ["--forecast.num_members", "1" + "0" * 18],
        ["--forecast.path", "/proc/forecast.zarr"],
        ["--forecast.period", '["1820-01-01", "1820-02-01"]'],
        ["--forecast.period", '["2020-01-16", "2020-01-14"]'],
        ["--forecast.interval_hours", "5"],
        ["--rollout_steps", "3"],
        ["forecast.toml"],
    ],
    "evaluate": [
        ["--forecast", "nowhere.zarr"],
        ["--forecast"],
        ["--forecast", "a=", "--forecast", "b="],
        ["--forecast", "{data}", "--forecast", "{data}"],
        ["--truth", "nowhere.zarr"],
        ["--truth", "/dev/zero"],
        ["--truth", "{config}"],
        ["--climatology", "nowhere.zarr"],
        ["--climatology", "{data}"],
        ["--regions", "atlantis"],
        ["--regions", ""],
        ["--baselines", "nonsense"],
        ["--against", "nobody"],
        ["--gate", "nonsense"],
        ["--gate", "rmse/geopotential:500@6h<1"],
        ["--gate", "rmse/10m_u_component_of_wind@7h<1"],
        ["--gate", "rmse/10m_u_component_of_wind@6h<nan"],
        ["--output", "{config}"],
        ["--output", "/proc/here"],
        ["--output", "a\nb"],
        ["--data.variables", '["2m_temperature"]'],
        ["--rollout_steps", "4"],
    ],
    "train": [
        ["--rollout_steps", "4"],
        ["--world_size", "2"],
        ["--cluster", "a100x8"],
        ["--model.dim"],
        ["--model.dim", "8", "--model.dim", "8", "--nonsense"],
        ["--modl.dim", "8"],
        ["--model.dimm", "8"],
        ["--dim", "8"],
        ["-x"],
        ["="],
        ["--"],
        [""],
        ["tiny.toml"],
        ["--job.config_file", ""],
        ["--job.config_file", "/dev/null"],
        ["--job.config_file", "/dev/full"],
        ["--job.config_file", "/proc/self/mem"],
        ["--job.config_file", "."],
        ["--job.dump_folder", "/proc/run"],
        ["--job.dump_folder", "/sys/run"],
        ["--job.dump_folder", "/dev/null/run"],
        ["--job.dump_folder", "{config}"],
        ["--job.dump_folder", "a\0b"],
        ["--data.path", "/dev/zero"],
        ["--data.path", "{scratch}/fifo"],
        ["--data.path", "{scratch}/empty"],
        ["--data.path", "{config}"],
        ["--data.path", "{scratch}/nothing-*.nc"],
        ["--data.path", "http://127.0.0.1:9/era5.zarr"],
        ["--data.path", "nosuch://user:pa55@host/era5.zarr"],
        ["--data.static_path", "{scratch}/fifo", "--data.static_variables", '["land_sea_mask"]'],
        ["--data.static_variables", '["land_sea_mask"]'],
        ["--data.forcings", '["nonsense"]'],
        ["--data.select", '["member=0"]'],
        ["--data.select", '["member"]'],
        ["--checkpoint.initial_load_path", "/nowhere", "--job.dump_folder", "{scratch}/new"],
        ["--checkpoint.initial_load_path", "{data}", "--job.dump_folder", "{scratch}/newer"],
        ["--validation.plot_variables", '["2m_temperature"]'],
        ["--training.max_wall_time", "yesterday"],
        ["--training.max_wall_time", "0:0:0"],
    ],
}
TOMLS = {
    "broken": "[data\npath = 1",
    "unclosed text": '[data]\npath = "x',
    "binary": "\x7fELF\x00\x00",
    "a key twice": "[model]\ndim = 8\ndim = 16",
    "a section twice": "[model]\ndim = 8\n[model]\nnum_layers = 2",
    "a value outside": "dim = 8",
    "a section as text": 'model = "vit"',
    "a table too deep": "[model.dim]\nx = 1",
    "a list of tables": "[[model]]\ndim = 8",
    "extends nothing": 'extends = "nowhere.toml"',
    "extends itself": 'extends = "{name}"',
    "extends a number": "extends = 3",
    "a bare date": "[data]\ntrain_period = [2020-01-01, 2020-01-12]",
    "brackets without end": "[data]\nlevels = " + "[" * 5000,
    "endless digits": "[model]\ndim = " + "9" * 10_000,
    "names itself": '[job]\nconfig_file = "x.toml"',
}
ENVIRONMENTS = {
    "NGPU=x": {"NGPU": "x"},
    "NGPU=0": {"NGPU": "0"},
    "NGPU=-1": {"NGPU": "-1"},
    "NNODES=x": {"NNODES": "x"},
    "NNODES=0": {"NNODES": "0"},
    "NNODES=2 alone": {"NNODES": "2"},
    "RDZV_ENDPOINT without port": {"NNODES": "2", "NODE_RANK": "0", "RDZV_ENDPOINT": "node0"},
    "RDZV_ENDPOINT with a port too large": {
        "NNODES": "2",
        "NODE_RANK": "0",
        "RDZV_ENDPOINT": "127.0.0.1:99999",
    },
    "MAX_RESTARTS=x": {"MAX_RESTARTS": "x"},
    "ROSSBY_STARTED=abc": {"ROSSBY_STARTED": "abc"},
    "ROSSBY_STARTED=nan, two ranks": {"ROSSBY_STARTED": "nan", "NGPU": "2"},
    "LOCAL_WORLD_SIZE=x": {"LOCAL_WORLD_SIZE": "x"},
    "WORLD_SIZE=0": {"WORLD_SIZE": "0"},
}


def cases(stage: Stage, rng: random.Random) -> Iterator[Case]:
    """At least one a key, and all of the lists above."""
    os.mkfifo(stage.scratch / "fifo")
    (stage.scratch / "empty").mkdir()
    yield from keys(stage, rng)
    yield from own_options(stage)
    yield from files(stage)
    yield from environments(stage)
    yield from help_that_is_none(stage)


def keys(stage: Stage, rng: random.Random) -> Iterator[Case]:
    """Each key of the schema with one of its bad values, the verbs in turn."""
    values: dict[str, list[str]] = {}
    for key, value in bad_values():
        values.setdefault(key, []).append(value)
    assert len(values) == sum(len(cls.__dataclass_fields__) for cls in SECTIONS.values())
    for number, (key, bad) in enumerate(values.items()):
        verb, value = ("train", "forecast", "evaluate", "plan")[number % 4], rng.choice(bad)
        own = PLAN if verb == "plan" else []
        given = {"job.config_file", "job.dump_folder"} - {key}
        paths = {"job.config_file": stage.config, "job.dump_folder": stage.run}
        options = [f"--{name}={paths[name]}" for name in sorted(given)]
        command = [verb, *own, *options, f"--{key}={value}"]
        right = refused(key.partition(".")[2])
        yield Case(KIND, f"{verb} {key} = {value[:40]!r}", command, right, limit=QUICK, keeps=stage.run)


def own_options(stage: Stage) -> Iterator[Case]:
    """What is no option, or no value of one."""
    names = {"config": str(stage.config), "data": str(stage.data), "scratch": str(stage.scratch)}
    for verb, lists in OWN.items():
        for number, words in enumerate(lists):
            words = [word.format(**names) for word in words]
            given = {"--job.config_file", "--job.dump_folder"} & set(words)
            options = stage.options(stage.run)
            for option in given:
                del options[options.index(option) :][:2]
            options = [
                o
                for pair in zip(options[::2], options[1::2], strict=True)
                if pair[0] not in given
                for o in pair
            ]
            name = f"{verb} own option {number}: {' '.join(words)!r}"
            right = refused("--forecast.path" in words and "forecast" or "")
            # Every fifth as a process of its own, as the caller starts it.
            alone = number % 5 == 0 and all("\0" not in word for word in words)
            start = [PYTHON, f"{verb}.py"] if alone else [verb]
            limit = 30.0 if alone else QUICK
            yield Case(KIND, name, [*start, *options, *words], right, limit=limit, keeps=stage.run)


def files(stage: Stage) -> Iterator[Case]:
    """Configurations that are none, and one with a BOM, which is one."""
    for name, text in TOMLS.items():
        path = stage.scratch / f"{name.replace(' ', '-')}.toml"
        path.write_text(text.replace("{name}", path.name))
        command = ["train", "--job.config_file", str(path), "--job.dump_folder", str(stage.run)]
        yield Case(KIND, f"a TOML file, {name}", command, refused(), limit=QUICK, keeps=stage.run)
    path = stage.scratch / "bom.toml"
    path.write_text("\ufeff" + stage.config.read_text(), encoding="utf-8")
    command = ["checks", "--job.config_file", str(path), "--job.dump_folder", str(stage.fresh("bom"))]
    yield Case(KIND, "a TOML file with a BOM works", command, runs())


def environments(stage: Stage) -> Iterator[Case]:
    for name, environment in ENVIRONMENTS.items():
        command = [RUN_TRAIN, *stage.options(stage.run, "--training.steps", "12")]
        key = next(key for key in environment if key not in ("NNODES",)) if len(environment) > 1 else ""
        word = key if key != "NGPU" else ""
        yield Case(
            KIND, f"run_train.sh with {name}", command, refused(word), environment, 45.0, keeps=stage.run
        )


def help_that_is_none(stage: Stage) -> Iterator[Case]:
    """-h within a value is part of the value: two ranks train, or one line refuses."""
    folder = stage.fresh("y -h z")

    def check() -> str:
        made = Path(str(folder) + " -h z") / "metrics.jsonl"
        return "" if made.exists() else "nothing was trained"

    spaced = str(folder) + " -h z"
    command = [RUN_TRAIN, *stage.options(spaced, "--validation.enable=false", "--checkpoint.keep_best=")]
    yield Case(
        KIND, "a folder named 'y -h z', two ranks", command, either(runs(check), refused()), {"NGPU": "2"}
    )
