"""Values reach the configuration from defaults, files and the command line, and come out again as TOML; bad
input ends in one line that names key, value and fix, before any rank starts; calls from another folder.
"""

import dataclasses
import gc
import math
import os
import resource
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import tomli

import config
from command_line import help_text, load_config, split_options, start, to_toml
from config import DEFAULT_CONFIG, PATHS, SECTIONS, Compile, Config, Parallelism, Range, in_project
from datasets.convert import SIMULATED_PATH
from errors import ConfigError, one_line_errors, without_secrets
from plan import OPTIONS as PLAN
from planning import start_checks
from tests.sample_archives import analyses, weatherbench
from tests.started_jobs import ROOT, run_program, write_config
from training.config_checks import check, load_checked
from training.run_folder import start_warnings

GOOD = """
[data]
path = "wb.zarr"
variables = ["geopotential", "2m_temperature"]
levels = [500, 850]
static_variables = ["land_sea_mask"]
forcings = ["sin_local_time"]
train_period = ["2019-12-31", "2019-12-31"]
validation_period = ["2020-01-01", "2020-01-01"]
[model]
patch_size = [2, 2]
[validation]
lead_hours = [6]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration, good.toml, that has no error, and its data: 5 dates of 6 x 8 points."""
    folder = tmp_path_factory.mktemp("config")
    weatherbench(folder, analyses())
    (folder / "good.toml").write_text(GOOD.replace("wb.zarr", str(folder / "wb.zarr")))  # else the project's
    (folder / "circle.toml").write_text('extends = "round.toml"')
    (folder / "round.toml").write_text('extends = "circle.toml"')
    (folder / "empty.toml").write_text("\n")
    (folder / "binary.toml").write_bytes(b"\x89HDF\r\n\x1a\n\x00\xff")
    (folder / "loop.toml").symlink_to("loop.toml")
    (folder / "empty.nc").touch()
    (folder / "text.nc").write_text("no data")
    (folder / "emptied").mkdir()
    return folder


@pytest.fixture(autouse=True)
def one_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths are relative to the folder above; what a launcher may have set is gone."""
    monkeypatch.chdir(folder)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK", "NGPU", "NNODES"):
        monkeypatch.delenv(name, raising=False)


def refusal(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which the check before the start of ranks ends. Nothing else is printed."""
    with pytest.raises(SystemExit) as end:
        with one_line_errors():
            load_checked(argv)  # as before the imports
        start_checks.main(argv)
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == ""
    assert err.startswith("rossby: ") and len(err.splitlines()) == 1, err
    return err


ENSEMBLE = "--training.loss crps --training.members 3 --model.noise_dim 4"
LORA = "--lora.rank 4 --checkpoint.initial_load_path elsewhere"
BEST = "--validation.enable --checkpoint.keep_best val/rmse/2m_temperature@42h"
PART = "--data.region [80,0,-50,200]"
ADDRESSES = ("9400", ":9400", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:70000", "a:b")
COMMAND_LINES = [
    # -- names and syntax
    ("--trainning.steps 3", "trainning: unknown section in the command line; did you mean training?"),
    ("--training.stepz 3", "training.stepz: unknown key in the command line; did you mean training.steps?"),
    ("--lora.enable true", "lora.enable: unknown key in the command line; valid: rank, also_train"),
    ("--training. 3", "training.: unknown key"),
    ("--steps 3", "--steps: not an option; did you mean --training.steps?"),
    ("--", "--: not an option; options are --section.key value"),
    ("other.toml", "other.toml: not an option; options are --section.key value, such as --job.config_file"),
    ("'two\nlines'", "two lines: not an option"),
    ("--training.steps", "--training.steps: a value is missing (whole number at least 1 expected)"),
    ("--training.steps --training.seed 1", "--training.steps: a value is missing"),
    ("--job.dump_folder s3://bucket/run", "job.dump_folder = 's3://bucket/run': a run writes into a local"),
    # -- types
    ("--training.steps true", "training.steps = True: whole number at least 1 expected, not a boolean"),
    ("--training.steps '3\nseed = 1'", r"training.steps = '3\nseed = 1': whole number"),
    ("--model.position rotari", "model.position = 'rotari': did you mean rotary?"),
    ("--data.levels '[500, \"850\"]'", "data.levels[1] = '850': whole number at least 1 expected, not text"),
    ("--data.train_period '[2019-12-31, 2020-01-01]'", "train_period[0] = 2019-12-31: text expected, not a"),
    ("--model.patch_size [2]", "model.patch_size = [2]: a list of 2 expected, not of 1"),
    # -- ranges
    ("--training.steps 0", "training.steps = 0: must be at least 1"),
    ("--optimizer.lr 0", "optimizer.lr = 0.0: must be above 0"),
    (f"--optimizer.weight_decay 1{'0' * 400}", "number at least 0 expected, not a whole number"),
    ("--optimizer.betas [1.0,0.95]", "must be at least 0 and below 1"),
    # -- combinations
    ("--model.dim 100 --model.num_heads 7", "model.num_heads = 7: does not divide model.dim = 100; near"),
    ("--model.dim 36 --model.num_heads 6 --model.position rotary", "model.num_heads = 6: model.position"),
    ("--model.dim 100 --model.attention_backend flash", "model.num_heads = 4: flash needs a head size, dim"),
    ("--training.global_batch_size 0", "training.global_batch_size = 0: not a multiple"),
    ("--training.rollout_steps []", "training.rollout_steps = []: name how many"),
    ("--training.rollout_steps [5]", "data.train_period: none of its 3 dates has another 30 hours later"),
    ("--training.variable_weights [1,2]", "variable_weights = [1.0, 2.0]: 3 variables are predicted"),
    ("--training.variable_weights [0,0,0]", "variable_weights = [0.0, 0.0, 0.0]: one of them must be above"),
    ("--training.variable_weights [1e-46,1e-46,1e-46]", "variable_weights = [1e-46, 1e-46, 1e-46]: too"),
    ("--training.weight_by_change --training.loss relative_l2", "weight_by_change = True: training.loss ="),
    ("--training.variable_weights [1,2,1] --training.loss relative_l2", "variable_weights = [1.0, 2.0,"),
    ("--model.conserve '[\"dry_air\"]'", "model.conserve = 'dry_air': no such quantity; did you mean"),
    ("--model.conserve '[\"total_water\"]'", "model.conserve = 'total_water': needs specific_humidity on"),
    ("--model.conserve '[\"dry_mass\"]'", "model.conserve = 'dry_mass': needs surface_pressure, which"),
    ("--model.conserve '[\"2m_temperature\"]' --model.predict state", "model.conserve = ['2m_temperature']:"),
    ("--validation.lead_hours [6,9]", "validation.lead_hours = 9: not a multiple of data.step_hours = 6"),
    ("--validation.lead_hours [6,6]", "validation.lead_hours = [6, 6]: 6 is listed twice"),
    ("--validation.lead_hours []", "validation.lead_hours = []: name one lead time"),
    ("--model.name unet --parallelism.tensor_parallel_degree 2", "tensor_parallel_degree = 2: a U-Net"),
    ("--model.name unet --activation_checkpoint.mode selective", "'selective': for the blocks of a ViT"),
    ("--model.name unet --float8.enable", "float8.enable = True: multiplies the matrices of a ViT"),
    ("--model.name unet --model.levels 5", "model.levels = 5 on a grid of 6 x 8: 32 columns make one"),
    ("--training.augmentation roll --data.boundary_width 1", "augmentation = 'roll': an area with"),
    (f"{PART} --data.boundary_width 3", "data.boundary_width = 3"),
    (f"{PART} --data.boundary_width 1 --forecast.persist_forcings", "forecast.persist_forcings"),
    ("--data.boundary_width 1", "data.boundary_width = 1: "),
    ("--model.attention_windows [[2,0],[3,3]]", "model.attention_windows"),
    ("--model.attention_windows [[0,5]]", "model.attention_windows"),
    (f"{PART} --model.conserve '[\"2m_temperature\"]'", "not global"),
    ("--data.step_hours 3", "6 hours apart"),
    *((f"--metrics.prometheus {address}", "metrics.prometheus = ") for address in ADDRESSES),
    ("--data.diagnostic_variables '[\"2m_temperature\"]'", "'2m_temperature' is listed"),
    ("--training.members 4", "training.members = 4: "),
    ("--model.noise_dim 4", "model.noise_dim = 4: "),
    ("--validation.members 4", "validation.members = 4: "),
    ("--training.loss crps --model.noise_dim 4", "training.loss = 'crps': "),
    ("--training.loss crps --training.members 4", "training.loss = 'crps': "),
    (f"{ENSEMBLE} --validation.members 1", "validation.members = 1: no ensemble"),
    ("--forecast.num_members 2", "forecast.num_members = 2: "),
    ("--lora.rank 4", "lora.rank = 4: adapts a trained model; name its run in checkpoint."),
    (f"{LORA} --model.name unet", 'adapts the matrices of a ViT, and model.name = "unet" has none'),
    (f"{LORA} --float8.enable", "float8.enable = True: swaps the matrices that lora.rank adapts"),
    (f"{LORA} --parallelism.tensor_parallel_degree 2", "degree = 2: does not shard the adapters"),
    (f"{LORA} --model.dim 192 --lora.rank 192", "lora.rank = 192: must be smaller than model.dim"),
    (f"{BEST} --validation.interval 5", "did you mean"),
    (f"{BEST} --validation.interval 0", "a validation.interval above 0"),
    ("--training.max_wall_time 1:30", "training.max_wall_time = "),
    ("--training.max_wall_time 1:60:00", "training.max_wall_time = "),
    ("--data.grid_shape [6,0]", "data.grid_shape = [6, 0]: give both numbers"),
    # -- dates
    ('--data.train_period \'["2020-01-01", "2019-12-31"]\'', "the last date is before the first; exchange"),
    ('--data.train_period \'["2019-12-31", "soon"]\'', "data.train_period = 'soon': not a date; write"),
    ("--data.train_period '[\"2019-12-31\"]'", "data.train_period = ['2019-12-31']: two dates expected"),
    ('--data.validation_period \'["2019-12-31", "2020-01-01"]\'', "'2020-01-01']: overlaps"),
    ('--data.train_period \'["1979-01-01", "1980-01-01"]\'', "it has fewer than two dates in the data,"),
    ('--data.validation_period \'["2031-01-01", "2031-01-02"]\'', "data.validation_period = ['2031-01-01'"),
    ('--data.test_period \'["2019-12-31T12", "2020-01-01"]\'', "data.test_period"),  # ends with that day
    # -- what the data do not have
    ("--data.variables '[]'", "data.variables = []: name what is predicted"),
    ("--data.variables '[\"geopotential:0\"]'", "data.variables = ['geopotential:0']: variable"),
    ('--data.variables \'["2m_temperature", "2m_temperature"]\'', "variable '2m_temperature' is listed"),
    ("--data.variables '[\"2m_temprature\"]'", "has no variable '2m_temprature'; nearest: '2m_temperature'"),
    ("--data.static_variables '[\"land_see_mask\"]'", "'land_see_mask'; nearest: 'land_sea_mask'"),
    ("--data.static_variables '[\"2m_temperature\"]'", "data.static_variables = '2m_temperature'"),
    ("--data.static_path text.nc", "cannot read 'text.nc': it is neither Zarr, NetCDF, HDF5 nor GRIB"),
    ("--data.forcings '[\"sin_latitud\"]'", "data.forcings = 'sin_latitud': unknown; did you mean"),
    ("--model.patch_size [7,2]", "model.patch_size = [7, 2]: larger than the grid [6, 8]"),
    ("--data.grid_shape [32,64]", "data.grid_shape = [32, 64]: the data have [6, 8]; set that or [0, 0]"),
    # -- files
    ("--data.path=", "data.path = '': name a file, folder, glob or URL"),
    ("--data.path wc.zarr", "data.path = 'wc.zarr': there is no such file or folder"),
    ("--data.path empty.nc", "cannot read 'empty.nc': it is empty"),
    ("--data.path emptied", "cannot read 'emptied': the folder contains no Zarr"),
    ("--data.path nowhere://bucket/era5.zarr", "cannot read 'nowhere://bucket/era5.zarr'"),
    ("--job.config_file=", "job.config_file = '': the name of a TOML file expected"),
    ("--job.config_file god.toml", "job.config_file = god.toml: No such file or directory; did you mean"),
    ("--job.config_file emptied", "job.config_file = emptied: Is a directory"),
    ("--job.config_file empty.toml", "job.config_file = empty.toml: the file is empty"),
    ("--job.config_file /dev/full", "a device or a pipe"),
    ("--job.config_file binary.toml", "job.config_file = binary.toml: not UTF-8 text"),
    ("--job.config_file loop.toml", "job.config_file = loop.toml: Too many levels of symbolic links"),
    ("--job.config_file circle.toml", "a circle of extends: circle.toml -> round.toml -> circle.toml"),
    # -- the machine
    ("--job.dump_folder wb.zarr/run", "inside the store"),
    ("--job.dump_folder /proc/run", "job.dump_folder = '/proc/run'"),
    ("--job.dump_folder text.nc/run", "job.dump_folder = 'text.nc/run': text.nc is not a folder"),
    ("--model.attention_backend flash_attn", 'model.attention_backend = "flash_attn": needs'),
    ("--model.attention_backend cudnn", 'attention_backend = "cudnn": needs a CUDA device'),
    ("--data.storage_options \"['anon']\"", "data.storage_options = '...': write an option of the store"),
    ("--data.storage_options \"['secret=***']\"", "data.storage_options = 'secret=***': secrets are not"),
    ("--data.select \"['member']\"", "data.select = ['member']: name a dimension and one of its labels, for"),
    ("--data.select \"['a=0', 'a=1']\"", "data.select = ['a=0', 'a=1']: 'a' occurs twice"),
    ("--optimizer.name Muon --parallelism.cpu_offload true", "'Muon': "),
]


@pytest.mark.parametrize(("args", "expected"), COMMAND_LINES, ids=[args[:60] for args, _ in COMMAND_LINES])
def test_bad_command_line(args: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(args)
    own_file = any(word.startswith("--job.config_file") for word in words)
    assert expected in refusal(words if own_file else ["--job.config_file=good.toml", *words], capsys)


FILES = [
    ("[trainning]\nsteps = 3", "trainning: unknown section in case.toml; did you mean training?"),
    ('[training]\nsteps = "3"', "training.steps = '3': whole number at least 1 expected, not text"),
    ("[data.path]\nurl = 1", "data.path = {'url': 1}: text expected, not a table"),
    ("steps = 3", "steps = 3: is outside any section in case.toml; write it below [training]"),
    ("modle = 3", "modle = 3: is outside any section in case.toml; did you mean model?"),
    ("model = 3", "model = 3: a section in case.toml is a table; write [model] and its keys below"),
    ("[model\ndim = 3", "job.config_file = case.toml: not TOML: "),
    ("[model]\ndim = " + "9" * 5000, "job.config_file = case.toml: not TOML: "),
    ("[data]\nlevels = " + "[" * 5000, "job.config_file = case.toml: not TOML: "),
    ("extends = 3", "case.toml: extends = 3: the name of one TOML file expected"),
    ('extends = ""', "case.toml: extends = '': the name of a TOML file expected"),
    ('extends = "case.toml"', "a circle of extends: case.toml -> case.toml"),
    (r'extends = "a\u0000b"', "embedded null byte"),
    ('[job]\nconfig_file = "other.toml"', "job.config_file = 'other.toml': is in case.toml itself"),
]


@pytest.mark.parametrize(("text", "expected"), FILES, ids=[text[:40] for text, _ in FILES])
def test_bad_file(text: str, expected: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "case.toml").write_text(text)
    assert expected in refusal(["--job.config_file", "case.toml"], capsys)


REPLICATE = "--parallelism.data_parallel_replicate_degree"
SHARD = "--parallelism.data_parallel_shard_degree"
RING = "--parallelism.context_parallel_degree 2 --parallelism.context_parallel_method ring"
RANKS = [
    ({"NGPU": "0"}, "", "NGPU = '0': an environment variable that must be a whole number, at least 1"),
    ({"NNODES": "1.5"}, "", "NNODES = '1.5': an environment variable"),
    ({"WORLD_SIZE": ""}, f"{REPLICATE} 3", "the run has 1 rank(s)"),
    ({"NGPU": "4"}, f"{SHARD} 3", "shard_degree = 3: the run has 4 rank(s)"),
    ({"NGPU": "1000000"}, "", "NGPU = 1000000: processes on a machine of"),
    ({"NGPU": "5"}, "--parallelism.tensor_parallel_degree 5", "does not divide model.num_heads"),
    ({"WORLD_SIZE": "64"}, "--parallelism.tensor_parallel_degree 24", "degree = 1 or 2 or 4 with"),
    ({"NGPU": "2"}, f"--model.attention_windows [[1,0]] {RING}", "method = 'ring'"),
    ({"NGPU": "8"}, "--parallelism.context_parallel_degree 8", 'or context_parallel_method = "all_gather"'),
    ({"NGPU": "2", "NNODES": "2"}, f"{REPLICATE} 3", "the run has 4 rank(s)"),
    ({"WORLD_SIZE": "8", "NGPU": "2"}, f"{REPLICATE} 3", "the run has 8 rank(s)"),
    (
        {"NGPU": "4"},
        "--model.name unet --model.levels 3 --parallelism.context_parallel_degree 4",
        "context_parallel_degree = 4: so many ranks have no tiles of the 8 x 8 grid, in units of 8 x 8 cells",
    ),
    ({"WORLD_SIZE": "3"}, "--training.global_batch_size 100", "x data-parallel ranks = 48; try 96 or -1"),
]


@pytest.mark.parametrize(("environment", "args", "expected"), RANKS)
def test_bad_ranks(environment: dict[str, str], args: str, expected: str, capsys, monkeypatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert expected in refusal(["--job.config_file=good.toml", *shlex.split(args)], capsys)


def test_more_ranks_than_gpus(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setenv("NGPU", "2")
    assert "NGPU = 2: this machine has 1 GPU(s)" in refusal(["--job.config_file=good.toml"], capsys)


def test_one_rank_of_a_host_reports_without_a_launcher(capsys, monkeypatch, tmp_path: Path) -> None:
    """The first to find it: an error on rank 1 alone was reported nowhere."""
    monkeypatch.setenv("MASTER_PORT", str(os.getpid()))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as end:
            start_checks.main(["--training.stepz=3"])
        assert end.value.code == 2
    assert capsys.readouterr().err.count("rossby: ") == 1


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no shell replaces it: behind "=", and in a file."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.toml").write_text('[job]\ndump_folder = "~/in_file"\n[data]\npath = "~/era5.zarr"\n')
    config = load_config(["--job.config_file=~/a.toml"])
    assert (config.dump_folder, config.data.path) == (tmp_path / "in_file", f"{tmp_path}/era5.zarr")
    options = ["--job.config_file=~/a.toml", "--job.dump_folder=~/run"]
    assert load_config(options).dump_folder == tmp_path / "run"


def test_the_folder_of_a_run_is_its_configuration(tmp_path: Path, folder: Path) -> None:
    """forecast.py and evaluate.py took the default configuration, with the folder of another."""
    (tmp_path / "config.toml").write_text(f'extends = "{folder}/good.toml"\n[model]\ndim = 64\n')
    named = ["--job.dump_folder", str(tmp_path)]
    found = load_config([*named, "--model.num_heads=2"])
    assert (found.model.dim, found.model.num_heads, found.dump_folder) == (64, 2, tmp_path)
    assert load_config(["--job.config_file", str(folder / "good.toml"), *named]).model.dim != 64
    assert load_config(["--job.dump_folder", str(tmp_path / "new")]) != found


# Through the door: program, processes, arguments, what the line says.
STARTED = [
    ("./run_train.sh", 2, f"{REPLICATE} 3", "the run has 2 rank(s)"),
    ("train.py", 1, "--data.path /nowhere", "data.path = '/nowhere'"),
]


@pytest.mark.parametrize(("program", "ranks", "args", "expected"), STARTED)
def test_bad_start(program: str, ranks: int, args: str, expected: str, folder: Path, tmp_path: Path) -> None:
    """Exit code 2, one line, within 10 s of processor time, and neither a launcher nor a process group."""
    python, started = tmp_path / "python", tmp_path / "started"
    python.write_text(f'#!/bin/sh\necho "$@" >> {started}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    # A rank without MASTER_ADDR: joining a process group would end in a traceback.
    environment = {"ROSSBY_PYTHON": str(python), "NGPU": str(ranks), "RANK": "0"}
    command = [program] if program.startswith("./") else [str(python), program]
    words = ["--job.config_file", str(folder / "good.toml"), *args.split()]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run_program(*command, *words, **environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2, done.stderr
    assert done.stdout == "" and len(done.stderr.splitlines()) == 1, done.stderr
    assert expected in done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10
    assert "jobs.torchrun" not in started.read_text()


@pytest.mark.parametrize(
    ("version", "schedule", "compiled", "refused"),
    [
        ("2.11.0+cu130", "ZBVZeroBubble", False, True),
        ("2.11.0", "InterleavedZeroBubble", False, False),
        ("2.11.0", "InterleavedZeroBubble", True, True),
        ("2.11.0", "1F1B", True, False),
        ("2.13.0+cpu", "ZBVZeroBubble", True, False),
    ],
)
def test_schedules_that_an_older_torch_cannot_run(version, schedule, compiled, refused, monkeypatch) -> None:
    monkeypatch.setattr("torch.__version__", version)
    parallelism = Parallelism(pipeline_parallel_degree=2, pipeline_parallel_schedule=schedule)
    config = Config(parallelism=parallelism, compile=Compile(compiled))
    if not refused:
        start_checks.check_machine(config)
        return
    with pytest.raises(ValueError, match=f"pipeline_parallel_schedule = '{schedule}': .*torch 2.11.0"):
        start_checks.check_machine(config)


# -- values


def load(args: str) -> Config:
    return load_checked(["--job.config_file", "good.toml", *shlex.split(args)])


def test_precedence(folder: Path) -> None:
    """Default < extended file < file < command line; a file extends relative to itself."""
    (folder / "sub").mkdir()
    (folder / "sub/over.toml").write_text('extends = "../base.toml"\n[training]\nsteps = 20\nseed = 2\n')
    (folder / "base.toml").write_text(GOOD + "[training]\nsteps = 10\nseed = 1\nlocal_batch_size = 4\n")
    loaded = load_checked(["--job.config_file", "sub/over.toml", "--training.steps", "30"])
    training = loaded.training
    assert (training.steps, training.seed, training.local_batch_size) == (30, 2, 4)
    assert loaded.model.patch_size == (2, 2) and loaded.dump_folder == ROOT / "outputs/over"


def test_a_file_anywhere_extends_one_of_the_project(folder: Path) -> None:
    (folder / "mine.toml").write_text('extends = "train_configs/demo_unet.toml"')
    assert load_checked(["--job.config_file", "mine.toml"]).model.name == "unet"


@pytest.mark.parametrize(
    ("args", "key", "value"),
    [
        ("--training.steps 7", "training.steps", 7),
        ("--optimizer.lr 1", "optimizer.lr", 1.0),
        ("--optimizer.lr=1e-4", "optimizer.lr", 1e-4),
        ("--training.global_batch_size -1", "training.global_batch_size", -1),
        ("--checkpoint.enable", "checkpoint.enable", True),
        ("--checkpoint.enable --training.steps 3", "checkpoint.enable", True),
        ("--checkpoint.enable --training.steps 3", "training.steps", 3),
        ("--training.steps 3 --training.steps=4", "training.steps", 4),  # the later wins
        ("--checkpoint.enable --checkpoint.enable false", "checkpoint.enable", False),
        ("--model.qk_norm false --training.steps 3", "model.qk_norm", False),
        ("--model.qk_norm=FALSE", "model.qk_norm", False),
        ("--data.levels '[500,1000]'", "data.levels", (500, 1000)),
        ("--data.forcings []", "data.forcings", ()),
        ("--data.variables='[\"2m_temperature\"]'", "data.variables", ("2m_temperature",)),
        ("--data.path=a=b", "data.path", "a=b"),
        ("--job.dump_folder=--odd", "job.dump_folder", "--odd"),
        ("--model.position rotary", "model.position", "rotary"),
    ],
)
def test_values_on_the_command_line(args: str, key: str, value: Any) -> None:
    section, name = key.split(".")
    found = getattr(getattr(load(args), section), name)
    assert found == value and type(found) is type(value)


def test_help_names_every_key_with_type_default_and_meaning() -> None:
    lines = help_text(config.SECTIONS).splitlines()
    for section, cls in config.SECTIONS.items():
        for field in dataclasses.fields(cls):
            i = next(i for i, line in enumerate(lines) if line.startswith(f"  --{section}.{field.name}  ("))
            assert "; default " in lines[i]
            assert len(lines[i + 1].strip()) > 8, f"{section}.{field.name} has no help text"


def test_help_ends_with_0_whatever_else_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    lr, path = "--optimizer.lr  (number above 0; default 0.001)", "--forecast.path"
    for words, shown in (
        ("--help", {lr, path}),
        ("--training.stepz -h", {lr, path}),
        ("-h forecast", {path}),
    ):
        with pytest.raises(SystemExit) as end:
            start(words.split(), "", check)
        text = capsys.readouterr().out
        assert end.value.code == 0 and {each for each in (lr, path) if each in text} == shown


ANSWERS = [("train", "--help"), *((verb, "--training.stepz=3") for verb in ("plan", "forecast", "evaluate"))]


@pytest.mark.parametrize(("verb", "asked"), ANSWERS)
def test_verbs_answer_without_torch(verb: str, asked: str) -> None:
    """Under a second of processor time; it was four."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run_program(sys.executable, f"{verb}.py", asked)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == (2 if "stepz" in asked else 0), done.stderr
    assert "training.steps" in done.stderr if "stepz" in asked else "steps" in done.stdout
    assert after.ru_utime - before.ru_utime < 1.0


def test_verbs_collect_garbage_again_once_all_is_imported(folder: Path) -> None:
    """`answer_early` turns it off."""
    gc.disable()
    start(["--job.config_file=good.toml"], "", check)
    assert gc.isenabled()


def test_the_resolved_configuration_loads_again_to_the_same(folder: Path) -> None:
    """The resolved copy repeats the run, from any place and into the same folder."""
    args = ["--job.config_file=good.toml", "--optimizer.lr=3e-7"]
    args += ["--job.dump_folder", 'runs/a "b"', "--checkpoint.enable"]
    args += ["--training.variable_weights=[1,0.5,2]"]
    (folder / "resolved.toml").write_text(to_toml(load_checked(args)))
    first, again = load_checked(args), load_checked(["--job.config_file", "resolved.toml"])
    assert dataclasses.replace(again, job=first.job) == first
    assert again.dump_folder == folder / first.dump_folder
    assert to_toml(again) == to_toml(first)


def test_what_may_waste_a_run_is_a_warning() -> None:
    assert start_warnings(load("--training.steps 100 --lr_scheduler.warmup_steps 100")) == []
    options = "--parallelism.cpu_offload --training.mixed_precision_reduce bfloat16"
    (unused,) = start_warnings(load(options), False)
    assert "parallelism.cpu_offload, training.mixed_precision_reduce" in unused
    options = "--checkpoint.enable false --training.steps 100 --lr_scheduler.warmup_steps 101"
    kept, warmup = start_warnings(load(options))
    assert "checkpoint.enable" in kept and "lr_scheduler.warmup_steps" in warmup


# -- calls from another folder: paths on the command line are relative to it, others to the project


PERIOD = '--forecast.period ["2020-01-01","2020-01-02"]'


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with my.toml and era5.zarr, and with modules of its own that are named like ours."""
    write_config(tmp_path).rename(tmp_path / "my.toml")
    (tmp_path / "wb.zarr").rename(tmp_path / "era5.zarr")
    for name in ("config.py", "datasets.py", "train.py"):
        (tmp_path / name).write_text("raise ImportError('not the project')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_run_from_another_folder(elsewhere: Path) -> None:
    """Two ranks, so that the check, the launcher and the ranks all find the same."""
    files = ["--job.config_file", "my.toml", "--data.path", "era5.zarr", "--job.dump_folder", "run"]
    options = [*files, "--training.steps=2", "--checkpoint.enable=false"]
    done = run_program(ROOT / "run_train.sh", *options, cwd=elsewhere, NGPU="2")
    assert done.returncode == 0, done.stderr
    written = tomli.loads((elsewhere / "run/config.toml").read_text())
    assert written["data"]["path"] == str(elsewhere / "era5.zarr")
    assert written["job"]["dump_folder"] == str(elsewhere / "run")


def test_a_link_to_the_door_leads_to_the_project(elsewhere: Path) -> None:
    link = elsewhere / "rossby-train"
    link.symlink_to(ROOT / "run_train.sh")
    shown = run_program(link, "--training.stepz=3", cwd=elsewhere, NGPU="1")
    assert shown.returncode == 2 and "training.steps" in shown.stderr


@pytest.mark.parametrize(
    ("verb", "arguments", "said"),
    [
        ("forecast.py", f"--job.config_file my.toml --data.path era5.zarr {PERIOD}", f"{ROOT}/outputs/my"),
        ("plan.py", "--cluster here1 --clusters machines.toml", "machines.toml"),
    ],
)
def test_verbs_from_another_folder(elsewhere: Path, verb: str, arguments: str, said: str) -> None:
    done = run_program(sys.executable, ROOT / verb, *arguments.split(), cwd=elsewhere)
    # With torch 2.15 Triton's nanobind adds, as Python ends, what it takes for leaks.
    lines = done.stderr.partition("nanobind: leaked")[0].splitlines()
    assert done.returncode == 2 and len(lines) == 1, done.stderr
    assert said in done.stderr


def test_paths_of_a_file_begin_at_the_project(elsewhere: Path) -> None:
    """Written and read again they name the same place, from the project's folder too."""
    (elsewhere / "my.toml").write_text("""
[job]
dump_folder = "runs/a"
[data]
path = "../shared/era5.nc"
static_path = "gs://bucket/static.zarr"
variables = ["2m_temperature"]
""")
    argv = ["--job.config_file", "my.toml", "--forecast.checkpoint", "run"]
    config = load_checked(argv)
    assert config.data.path == f"{ROOT}/../shared/era5.nc"
    assert config.data.static_path == "gs://bucket/static.zarr"
    assert config.dump_folder == ROOT / "runs/a" and config.forecast.checkpoint == "run"
    (elsewhere / "again.toml").write_text(to_toml(config))
    os.chdir(ROOT)
    again = load_checked(["--job.config_file", str(elsewhere / "again.toml")])
    assert again.data.path == config.data.path and again.dump_folder == config.dump_folder
    assert again.forecast.checkpoint == str(elsewhere / "run")


def test_what_the_project_has_is_found_from_anywhere(elsewhere: Path) -> None:
    config = load_checked([])
    assert config.job.config_file == str(ROOT / DEFAULT_CONFIG) and config.data.path == "simulated"
    assert config.dump_folder == ROOT / "outputs/demo"
    assert in_project(SIMULATED_PATH) == str(ROOT / SIMULATED_PATH)
    os.chdir(ROOT)
    assert load_checked([]).dump_folder == Path("outputs/demo")


def test_every_key_that_is_a_path_is_known() -> None:
    """By its name: one that is added later has to be listed, or to be no path."""
    keys = [(section, key) for section, cls in vars(load_checked([])).items() for key in vars(cls)]
    endings = ("path", "paths", "folder", "checkpoint", "file")
    named = {pair for pair in keys if pair[1].split("_")[-1] in endings}
    assert named == {*PATHS, ("job", "config_file")}


# -- every key of the schema, with values that its type cannot mean


LONG = "[" + ",".join(["1"] * 20_000) + "]"
NUMBERS = ["1" + "0" * 18, "1" + "0" * 30, "-1" + "0" * 30]
FLOATS = ["nan", "inf", "-inf", "1e309", "1e300"]
TEXTS = ["x" * 300, "a\0b", "a\ud800b", "a\nb", "\x1b[31m"]
LISTS = ["[[1]]", '[["a"]]', LONG, "[", "{}", "[{a = 1}]", "1"]


def kinds() -> Iterator[tuple[str, Any, Range | None]]:
    for section, cls in SECTIONS.items():
        for field in dataclasses.fields(cls):
            kind, bounds = field.type, None
            assert not isinstance(kind, str)
            if hasattr(kind, "__metadata__"):
                kind, bounds = kind.__origin__, kind.__metadata__[0]
            yield f"{section}.{field.name}", kind, bounds


def bad_values() -> Iterator[tuple[str, str]]:
    for key, kind, bounds in kinds():
        if get_origin(kind) is tuple:
            values = [*LISTS]
            inner = get_args(kind)[0]
            if getattr(inner, "__origin__", inner) is not str:
                values = [*LISTS, *(f"[{number}]" for number in NUMBERS)]
            else:
                values = [*LISTS, f'["{"x" * 300}"]', '["a\\u0000b"]', '["a\\nb"]']
        elif kind is bool:
            values = ["yes", "1", "", "[true]"]
        elif kind is int:
            values = [*NUMBERS, "1.5", "inf", "nan", "", "one", "0x", LONG]
        elif kind is float:
            values = [*FLOATS, "", "one", "[1.0]"]
        elif get_origin(kind) is Literal:
            values = ["", "x" * 300, "a\0b", "a\nb", "[]"]
        else:
            values = [*TEXTS]
        ends = (bounds.low - 1, bounds.low, bounds.high, bounds.high + 1) if bounds else ()
        values += [str(kind(e)) for e in ends if math.isfinite(e) and bounds and not bounds.admits(kind(e))]
        yield from ((key, value) for value in values)


CASES = list(bad_values())


def test_the_schema_is_fuzzed_whole():
    assert len({key for key, _ in CASES}) > 100 and len(CASES) > 500


def test_every_bad_value_is_one_line_and_quick():
    """In one test: a thousand of them take seconds, a thousand tests a minute."""
    accepted, ugly = [], []
    for key, value in CASES:
        began = time.monotonic()
        try:
            load_checked([f"--{key}={value}"])
        except ConfigError as error:
            text = str(error)
            if key.partition(".")[2] not in text or len(text) > 1000 or "\n" in text:
                ugly.append((key, value[:40], text[:200]))
        else:
            accepted.append((key, value[:40]))
        assert time.monotonic() - began < 5, (key, value[:40])
    assert not accepted, accepted
    assert not ugly, ugly


@pytest.mark.parametrize(
    "text",
    [
        "https://user:pa55@example.org/era5.zarr",
        "s3://AKIA123:pa55@bucket/era5.zarr",
        "https://example.org/era5.zarr?X-Amz-Signature=pa55&sig=pa55",
        "az://container/x?sv=2020&sig=pa55",
    ],
)
def test_credentials_of_a_url_are_not_shown(text):
    hidden = without_secrets(f"data.path = '{text}': cannot be read")
    assert "pa55" not in hidden and "AKIA" not in hidden and "***" in hidden
    assert hidden.endswith("cannot be read")


def test_what_is_no_secret_stays():
    text = "gs://weatherbench2/datasets/era5/1959-2022-6h-1440x721.zarr?project=x and a@b"
    assert without_secrets(text) == text


def test_own_options_of_a_verb():
    for argv in (["--world_size", "1" + "0" * 30], ["--world_size", "x"], ["--world_size"]):
        with pytest.raises(ConfigError):
            split_options(argv, PLAN)
    with pytest.raises(ConfigError):
        split_options(["--export"], dict(export=""))
