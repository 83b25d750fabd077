"""jobs.begin: what it finds, chooses and writes, that it trains, and what it refuses."""

import os
import pty
import subprocess
import sys
import tomllib
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import first_steps.data
from command_line import load_config
from datasets.selection import open_selection
from errors import ConfigError, DataError
from first_steps.choices import Situation, choose, config_of, look, patch_of, samples_each
from first_steps.data import choose_grid, choose_variables, find, is_whole_state
from first_steps.layout import lay_out
from first_steps.questions import ask_all
from jobs.begin import main, parse
from tests.sample_archives import EXACT, analyses, cds_old, file_a_year, weatherbench, west_first
from tests.started_jobs import ROOT, records
from tests.terminals import read_all
from tests.test_house import CONFIG_HEADER

NO_TERMINAL = ["--no_preflight"]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one rank; what begin sets for its children is taken back."""
    monkeypatch.setenv("NGPU", "1")


def weeks(number: int = 60) -> xr.Dataset:
    """The fields of analyses(), with as many dates, 6 hours apart, and none of their gaps."""
    rng, few = np.random.default_rng(1), analyses()
    times = np.datetime64("2020-01-01", "ns") + np.arange(number) * np.timedelta64(6, "h")
    fields = {
        name: (few[name].dims, rng.normal(size=(number, *few[name].shape[1:])).astype("f4"))
        for name in few.data_vars
        if name != "land_sea_mask"
    }
    coords = {name: few[name] for name in ("level", "latitude", "longitude")}
    return xr.Dataset(fields | {"land_sea_mask": few.land_sea_mask}, {"time": times, **coords})


def begun(tmp_path: Path, *options: str) -> Path:
    """The configuration that these options write."""
    output = tmp_path / "first.toml"
    assert main([*options, "--output", str(output), *NO_TERMINAL]) == 0
    return output


def options_of(*words: str) -> Namespace:
    return parse(list(words))


# -- what is written


@pytest.mark.parametrize("layout", EXACT, ids=lambda layout: layout.__name__)
def test_a_configuration_for_every_layout_is_accepted(layout: Callable, tmp_path: Path) -> None:
    """Of five dates, by the checks of a run."""
    (tmp_path / "in").mkdir()
    output = begun(tmp_path, "--data", layout(tmp_path / "in", analyses()))
    config = load_config(["--job.config_file", str(output)])
    leads = config.validation.lead_hours
    selection = open_selection(config.data, config.model.patch_size, leads)
    assert len(selection.train) >= 2 and leads == (6,)


def trained(config_file: Path, tmp_path: Path, *options: str) -> list[dict]:
    """What three steps with it log, by the program that anybody starts."""
    folder = tmp_path / "run"
    words = [
        str(ROOT / "run_train.sh"),
        "--job.config_file",
        str(config_file),
        "--job.dump_folder",
        str(folder),
    ]
    environment = {**os.environ, "ROSSBY_PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "NGPU": "1"}
    settings = ["--training.steps", "3", "--validation.plots", "false", *options]
    done = subprocess.run([*words, *settings], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return records(folder)


@pytest.mark.parametrize("layout", [weatherbench, cds_old, file_a_year], ids=lambda layout: layout.__name__)
def test_what_it_writes_trains(layout: Callable, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    output = begun(tmp_path, "--data", layout(tmp_path / "in", weeks()), "--goal", "baseline")
    logged = trained(output, tmp_path, "--metrics.log_freq", "1")
    assert [line["step"] for line in logged if "loss" in line] == [1, 2, 3]
    assert any("val/rmse/2m_temperature" in line for line in logged)


@pytest.mark.slow
def test_the_vit_of_many_dates_trains(tmp_path: Path) -> None:
    """That of demo.toml, on a CPU: small, and planned."""
    output = begun(tmp_path, "--data", west_first(tmp_path, weeks(6200)), "--variables", "t2m", "z500")
    assert 'name = "vit"' in output.read_text() and "by the planner" in output.read_text()
    logged = trained(output, tmp_path, "--data.validation_period", '["2024-01-01", "2024-01-10"]')
    assert [line["step"] for line in logged if "loss" in line] == [1, 2, 3]


def test_its_first_lines_and_reasons(tmp_path: Path) -> None:
    """Those of train_configs/, and a reason beside or above each key."""
    text = begun(tmp_path, "--data", weatherbench(tmp_path, weeks()), "--goal", "try").read_text()
    assert all(word in text.partition("\n\n")[0] for word in CONFIG_HEADER)
    assert "# Score:    not trained yet" in text
    lines = text.splitlines()
    for above, line in zip(lines, lines[1:], strict=False):
        if " = " in line and not line.startswith("#"):
            assert " # " in line or above.startswith("# "), line


def test_the_second_stage_starts_from_the_first(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    output = begun(tmp_path, "--data", weatherbench(tmp_path, weeks()), "--goal", "long")
    stage = load_config(["--job.config_file", str(tmp_path / "first_rollout.toml")])
    first = load_config(["--job.config_file", str(output)])
    assert stage.training.rollout_steps == (2, 4, 8) and stage.data == first.data
    assert stage.checkpoint.initial_load_path == "outputs/first" and stage.optimizer.lr < first.optimizer.lr
    last = capsys.readouterr().out.splitlines()[-2:]
    assert [line.rpartition("/")[2] for line in last] == ["first.toml", "first_rollout.toml"]


def test_a_coarser_grid_is_made_by_convert(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """By the command that it says; then the configuration is accepted."""
    from datasets.convert import main as convert

    output = begun(tmp_path, "--data", weatherbench(tmp_path, weeks()), "--resolution", "4x6")
    config = load_config(["--job.config_file", str(output)])
    with pytest.raises(DataError, match="cannot read"):
        open_selection(config.data, (1, 1), ())
    (command,) = [line for line in capsys.readouterr().out.splitlines() if "datasets.convert" in line]
    assert convert(command.partition("datasets.convert ")[2].split()) == 0
    assert open_selection(config.data, (1, 1), (6,)).archive.grid.shape == (4, 6)


# -- what is chosen


def situation(tmp_path: Path, number: int, *options: str) -> Situation:
    """As if the data had so many dates."""
    path = west_first(tmp_path, weeks(number))
    words = ["--data", path, "--output", str(tmp_path / "x.toml"), *options]
    return look(ask_all(options_of(*words), on_terminal=False))


def test_few_dates_are_a_unets(tmp_path: Path) -> None:
    """docs/recipe.md; with a history where wind is predicted without what drives it."""
    case = situation(tmp_path, 60, "--variables", "t2m")
    config = config_of(choose(case))
    assert config.model.name == "unet" and config.data.history == 2
    planned = lay_out(case, choose(case))
    assert planned.plan is None and planned.dry_bytes > 5e5 and "by a dry run" in planned.memory_line()


def test_many_dates_on_a_cluster(tmp_path: Path) -> None:
    """A ViT in bfloat16 on all devices, whose layout the planner has found to fit."""
    case = situation(tmp_path, 6200, "--hardware", "a100x16", "--goal", "baseline")
    planned = lay_out(case, choose(case))
    config, degrees = planned.config, planned.plan.work.degrees if planned.plan else None
    assert degrees and degrees.world == 16 and not degrees.splits_model
    assert config.model.name == "vit" and config.training.mixed_precision_param == "bfloat16"
    assert config.training.global_batch_size % (config.training.local_batch_size * degrees.dp) == 0
    assert "by the planner" in planned.time_line() and "on demand" in planned.tables()


def test_all_devices_have_samples() -> None:
    """As many each; a ViT's are those of demo.toml on one, and bounded by vit1b_adamw.toml's."""
    assert [n * samples_each(n, True) for n in (1, 3, 8)] == [4, 6, 8]
    assert [n * samples_each(n, False) for n in (1, 2, 8, 64, 100, 1024)] == [16, 16, 64, 512, 700, 1024]


def test_of_many_variables_the_usual_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the levels nearest to 300, 500 and 850 hPa, and at the surface."""
    monkeypatch.setattr(first_steps.data, "MANY", 3)
    found = find(weatherbench(tmp_path, analyses()))
    assert set(choose_variables(found, ["usual"])) == {
        "2m_temperature",
        *(f"{name}:{level}" for name in ("geopotential", "temperature") for level in (500, 850)),
    }


def test_patches_fit_the_grid() -> None:
    assert patch_of((32, 64), 512) == (4, 128)  # demo.toml
    assert patch_of((721, 1440), 8192) == (16, 46 * 90)
    assert patch_of((6, 8), 512) == (1, 48)


def test_a_whole_state() -> None:
    assert is_whole_state(["geopotential:500", "u_component_of_wind:500"])
    assert not is_whole_state(["10m_u_component_of_wind", "10m_v_component_of_wind"])


def test_variables_by_their_names(tmp_path: Path) -> None:
    found = find(weatherbench(tmp_path, analyses()))
    assert choose_variables(found, ["z500", "temperature"]) == [
        "geopotential:500",
        *(f"temperature:{level}" for level in (500, 850, 1000)),
    ]
    assert "land_sea_mask" not in choose_variables(found, ["all"])
    assert choose_grid(found, "6x8") == (6, 8)


# -- questions


def test_six_questions_on_a_terminal(tmp_path: Path) -> None:
    """A wrong answer is said, and asked for again; Enter takes what stands in brackets."""
    path = weatherbench(tmp_path, weeks())
    typed = ["/nowhere.zarr", path, "z500, t2m", "", "", "", "chosen.toml"]
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "jobs.begin", *NO_TERMINAL]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    os.write(ours, "".join(f"{line}\n" for line in typed).encode())
    text = read_all(ours)
    assert process.wait() == 0, text
    assert all(f"{number}. W" in text for number in range(1, 7)), text
    assert "[6x8]:" in text and "[here]:" in text and "[try]:" in text and "rossby: cannot read" in text
    written = tomllib.loads((tmp_path / "chosen.toml").read_text())
    assert written["data"]["variables"] == ["geopotential:500", "2m_temperature"]


@pytest.mark.parametrize(
    "options, said",
    [
        ([], "--data: name what data.path takes"),
        (["--data", "/nowhere.zarr"], "cannot read '/nowhere.zarr'"),
        (["--data", "HERE", "--variables", "geopotental:500"], "nearest: 'geopotential:500'"),
        (["--data", "HERE", "--hardware", "a10x64"], "no such machine; did you mean 'a100'"),
        (["--data", "HERE", "--resolution", "12x8"], "finer than the data"),
        (["--data", "HERE", "--resolution", "6by8"], "latitudes x longitudes expected"),
        (["--data", "HERE", "--goal", "best"], "--goal: invalid choice"),
        (["--data", "HERE", "--output", "THERE"], "is there already, and nothing is overwritten"),
        (["--data", "HERE", "--output", "gone/x.toml"], "there is no folder gone"),
    ],
)
def test_what_is_refused(options: list[str], said: str, tmp_path: Path) -> None:
    """In one line; nothing is written."""
    there = tmp_path / "there.toml"
    there.write_text("mine")
    path = weatherbench(tmp_path, analyses())
    words = [{"HERE": path, "THERE": str(there)}.get(word, word) for word in options]
    if "--output" not in words:
        words += ["--output", str(tmp_path / "new.toml")]
    with pytest.raises((ConfigError, DataError)) as error:
        ask_all(options_of(*words), on_terminal=False)
    assert said in str(error.value) and there.read_text() == "mine" and not (tmp_path / "new.toml").exists()


@pytest.mark.slow
def test_here_the_preflight_looks_at_this_machine(tmp_path: Path) -> None:
    """As anybody calls it, without a terminal: its table, and the command as the last line. A second time
    the file is in the way: one line, exit code 2.
    """
    path, output = weatherbench(tmp_path, weeks()), tmp_path / "x.toml"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "jobs.begin", "--data", path, "--output", str(output)]
    settings = {"cwd": ROOT, "env": environment, "stdin": subprocess.DEVNULL, "text": True}
    done = subprocess.run(command, capture_output=True, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pass  data, values" in done.stdout and " 0 fail; " in done.stdout
    assert done.stdout.splitlines()[-1] == f"  ./run_train.sh --job.config_file {output}"
    again = subprocess.run(command, capture_output=True, **settings)
    assert again.returncode == 2 and len(again.stderr.splitlines()) == 1
