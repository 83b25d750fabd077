"""Values reach the configuration from defaults, files and the command line, and come out again as TOML."""

import dataclasses
import gc
import resource
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import config
from command_line import help_text, start, to_toml
from tests.test_config import GOOD, ROOT
from training.config_checks import check, load_checked
from training.run_folder import start_warnings


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder but for good.toml, in which the test runs; one process, whatever launched it."""
    (tmp_path / "good.toml").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "NGPU", "NNODES"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def load(args: str) -> config.Config:
    return load_checked(["--job.config_file", "good.toml", *shlex.split(args)])


def test_precedence(folder: Path) -> None:
    """Default < extended file < file < command line; a file extends relative to itself."""
    (folder / "sub").mkdir(exist_ok=True)
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
    done = subprocess.run([sys.executable, f"{verb}.py", asked], cwd=ROOT, capture_output=True, text=True)
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


def test_sections_are_frozen() -> None:
    for cls in (config.Config, *config.SECTIONS.values()):
        assert vars(cls)["__dataclass_params__"].frozen, cls.__name__


def test_what_may_waste_a_run_is_a_warning() -> None:
    assert start_warnings(load("--training.steps 100 --lr_scheduler.warmup_steps 100")) == []
    options = "--parallelism.cpu_offload --training.mixed_precision_reduce bfloat16"
    (unused,) = start_warnings(load(options), False)
    assert "parallelism.cpu_offload, training.mixed_precision_reduce" in unused
    kept, warmup = start_warnings(
        load("--checkpoint.enable false --training.steps 100 --lr_scheduler.warmup_steps 101")
    )
    assert "checkpoint.enable" in kept and "lr_scheduler.warmup_steps" in warmup
