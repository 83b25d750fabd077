"""The sweep over any keys: what it runs, what it reads back, what a kill leaves, what it refuses."""

import json
import math
import os
import re
import signal
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from checkpoints.files import complete_steps
from command_line import load_config, to_toml
from errors import ConfigError
from jobs.preemption import EXIT_SAVED
from tests.started_jobs import ROOT, last_step, records, write_config
from training.config_checks import load_checked
from training.optimizers.search_space import combinations, name_of, parse_varied, split_values
from training.optimizers.sweep import (
    OPTUNA,
    Runner,
    caution,
    last_line,
    main,
    parse,
    read_command,
    sweep_proposed,
)
from training.optimizers.sweep_results import DONE, FAILED, WAITING, Results, Run, check_same
from training.run_folder import lock_folder

STEPS = 150
RATES = ["--vary", "optimizer.lr=1e-3,1e30"]  # the second overflows
PERIODS = [
    '--data.train_period=["2020-01-01", "2020-01-07"]',
    '--data.validation_period=["2020-01-08", "2020-01-10"]',
]


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words of a sweep of a small model, but for what it varies."""
    for name, value in {"NGPU": "1", "OMP_NUM_THREADS": "1", "ROSSBY_STARTED": str(time.time())}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ROSSBY_PYTHON", sys.executable)
    keys = ["--validation.enable=true", "--validation.plots=false", "--training.max_skipped_steps=0"]
    keys += ["--checkpoint.async_mode=disabled"]
    keys += [f"--training.steps={STEPS}", f"--job.dump_folder={tmp_path / 'run'}", *PERIODS]
    return [str(write_config(tmp_path)), *keys]


def sweep_lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "sweep.jsonl").read_text().splitlines()]


def stop_after(folder: Path, step: int) -> None:
    """SIGTERM to this process, where a sweep listens, once a run has taken so many steps."""
    until = time.monotonic() + 120
    while last_step(folder) < step and time.monotonic() < until:
        time.sleep(0.02)
    if callable(signal.getsignal(signal.SIGTERM)):
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
def test_a_sweep_that_is_stopped_goes_on(tiny: list[str], tmp_path: Path, capsys) -> None:
    """Stopped in its first run, of which the second blows up; then nothing is left to be run but that."""
    folder = tmp_path / "run-sweep"
    first = folder / "optimizer.lr=0.001,seed=0"
    argv = [*tiny, *RATES]
    stopper = threading.Thread(target=stop_after, args=(first, 3))
    stopper.start()
    with pytest.raises(SystemExit) as end:
        main(argv)
    stopper.join()
    assert end.value.code == EXIT_SAVED
    assert "stopped with 0 of 2 runs; start it again" in capsys.readouterr().err
    (saved,) = complete_steps(first / "checkpoints")
    assert 3 <= saved < STEPS and sweep_lines(folder)[0]["runs"][0]["state"] == "stopped"

    main(argv)
    said = capsys.readouterr().out
    assert "resum" in (folder / f"{first.name}.log").read_text()
    expected = [r["val/loss"] for r in records(first) if "val/loss" in r][-1]
    assert [r["step"] for r in records(first) if "loss" in r] == list(range(1, STEPS + 1))
    good, bad = sweep_lines(folder)
    assert good["mean"] == good["lowest"] == good["highest"] == expected and bad["mean"] is None
    assert good["settings"] == {"optimizer.lr": 1e-3} and good["runs"][0]["state"] == "done"
    assert bad["runs"][0]["state"] == "failed" and "code 1" in bad["runs"][0]["reason"]
    rows = re.findall(r"^(0\.001|1e\+30) +(\S+)", said, re.MULTILINE)[-2:]
    assert rows[0] == ("0.001", f"{expected:.5g}") and rows[1][0] == "1e+30"
    assert (folder / "sweep.png").stat().st_size > 5000
    assert "lowest: --optimizer.lr=1e-3" in said

    # The finished run is not repeated; the failed one would be.
    before = {path: path.stat().st_mtime_ns for path in first.rglob("*")}
    main([*tiny, "--vary", "optimizer.lr=0.001"])
    assert "1 of 1 runs have ended before" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in first.rglob("*")} == before
    assert sweep_lines(folder)[0]["runs"] == good["runs"]
    with pytest.raises(SystemExit):
        main([*argv, "--optimizer.beta1=0.8"])
    said = capsys.readouterr().err
    assert "optimizer.beta1 = 0.8: " in said and "config.toml says 0.9; name another" in said
    assert said.count("\n") == 1


def test_a_run_that_outlives_its_sweep_keeps_others_out(tmp_path: Path, monkeypatch) -> None:
    """Killed with SIGKILL, a sweep passes nothing on; the next one must not start the run a second time."""
    monkeypatch.setattr("training.run_folder.PATIENCE", 0.1)
    monkeypatch.setattr("training.optimizers.sweep.PROJECT", tmp_path)
    script = tmp_path / "run_train.sh"
    script.write_text("#!/bin/sh\necho rossby: here I am\nexec sleep 60\n")
    script.chmod(0o755)
    lock = lock_folder(tmp_path)
    run = Run({}, 0, [], load_checked([]))
    with closing(Runner(tmp_path, lock)) as runner:
        thread = threading.Thread(target=runner.run, args=(run,))
        thread.start()
        while not (log := tmp_path / "seed=0.log").exists() or not log.stat().st_size:
            time.sleep(0.02)
        lock.close()
        with pytest.raises(ConfigError, match="another run writes there"):
            lock_folder(tmp_path)
        assert runner.process
        runner.process.kill()
        thread.join()
    lock_folder(tmp_path).close()
    assert last_line(log, 0) == "here I am"


def test_a_configuration_is_the_same_from_any_folder(tiny: list[str], tmp_path: Path, monkeypatch) -> None:
    words = ["--job.config_file", *tiny, "--checkpoint.initial_load_path=outputs/a"]
    config = load_config([*words, f"--job.dump_folder={tmp_path}"])
    monkeypatch.chdir(ROOT)
    (tmp_path / "config.toml").write_text(to_toml(config))
    monkeypatch.chdir(tmp_path)
    elsewhere = load_config([*words[:-1], f"--checkpoint.initial_load_path={ROOT}/outputs/a"])
    check_same(elsewhere)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--vary", "optimizer.lrr=1,2"], "optimizer.lrr: unknown key in the command line; did you mean"),
        (["--vary", "optimizer.lr=1e-3,x"], "optimizer.lr = 'x': number above 0 expected"),
        (["--vary", "model.num_heads=2,3"], "model.num_heads = 3: does not divide model.dim = 16"),
        (["--vary", "optimizer.lr=1e-3,0.001"], "0.001 is listed twice"),
        (["--vary", "optimizer.lr=1e-3:1e-2:log"], "say how many with --trials"),
        (["--vary", "optimizer.lr=1e-2:1e-3:log", "--trials=2"], "a lowest value above 0 and below the"),
        (["--vary", "optimizer.lr=1e-3,1e-2", "--trials=3"], "only 2 combinations differ"),
        (["--vary", "optimizer.lr"], "a key and its values expected"),
        (["--vary", "training.seed=1,2"], "write --seeds and how many"),
        (["--vary", "training.loss=mse,mae"], "changes what val/loss means"),
        (["--vary", "validation.lead_hours=[6],[12]"], "changes what is scored"),
        (["--vary", "optimizer.lr=1,2", "--optimizer.lr=3"], "is given twice"),
        (["--vary", "optimizer.lr=1,2", "--score=val/los"], "--score = 'val/los': no such score"),
        (["--vary", "optimizer.lr=1,2", "--validation.enable=false"], "a sweep needs scores"),
        (["--vary", "optimizer.lr=1,2", "--data.validation_period=[]"], "a sweep needs dates to score"),
        (["--vary", "optimizer.lr=1,2", "--seeds=0"], "--seeds = 0: at least 1"),
        ([], "nothing is varied"),
        (["--vary", "optimizer.lr=1,2", "--trials=2", "--sampler=cma"], "random or tpe expected"),
        (["--vary", "optimizer.lr=1:2", "--sampler=tpe"], "say how many with --trials"),
    ],
)
def test_what_is_refused_runs_nothing(words: list[str], said: str, tiny: list[str], tmp_path, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main([*tiny, *words])
    lines = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and len(lines) == 1 and said in lines[0]
    assert not (tmp_path / "run-sweep").exists()


def test_optuna_that_is_not_there_is_one_line(tiny: list[str], monkeypatch, capsys) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as end:
        main([*tiny, "--vary", "optimizer.lr=1:2", "--trials=2", "--sampler=tpe"])
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and "needs optuna, which is not installed" in line
    assert OPTUNA in line and OPTUNA in (ROOT / "requirements-extras.txt").read_text()


class Parabola:
    """A runner whose runs score (log10(lr) + 2)^2 + depth - 2, and fail beyond 0.5; it stops after some."""

    def __init__(self, stops_after: int = 1000) -> None:
        self.asked, self.left, self.taken = 0, stops_after, []

    def run(self, run: Run) -> tuple[int, str]:
        rate, depth = run.config.optimizer.lr, run.config.model.num_layers
        if not self.left:
            self.asked = signal.SIGTERM
            return EXIT_SAVED, "saved"
        self.left -= 1
        self.taken.append((rate, depth))
        if rate > 0.5:
            return 1, "diverged"
        record = {"step": STEPS, "val/loss": (math.log10(rate) + 2) ** 2 + depth - 2}
        run.config.dump_folder.mkdir(parents=True)
        (run.config.dump_folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        return 0, ""


def test_optuna_proposes_what_scores_were_good_for(tiny: list[str], tmp_path: Path, monkeypatch) -> None:
    """Stopped in its sixth trial, a sweep proposes what the undisturbed one does; later trials lie near the
    best value, 1e-2 with two layers, which no trial is told.
    """
    pytest.importorskip("optuna", reason="requirements-extras.txt")
    monkeypatch.setattr("training.optimizers.sweep.check_data", lambda runs: None)
    monkeypatch.setattr("training.optimizers.sweep_results.Results.write", lambda results: None)
    ranges = ["--vary", "optimizer.lr=1e-5:1:log", "--vary", "model.num_layers=2:5", "--sampler=tpe"]

    def swept(name: str, trials: int, runner: Parabola) -> tuple[Results, bool]:
        (tmp_path / f"{name}-sweep").mkdir(exist_ok=True)
        asked = read_command([*tiny, *ranges, f"--trials={trials}", f"--job.dump_folder={tmp_path / name}"])
        return sweep_proposed(asked, runner)  # type: ignore[arg-type]

    tiny = [word for word in tiny if "job.dump_folder" not in word]
    whole, first, rest = Parabola(), Parabola(5), Parabola()
    results, complete = swept("whole", 25, whole)
    assert complete and not swept("parts", 25, first)[1]
    again, complete = swept("parts", 25, rest)
    assert complete and first.taken + rest.taken == whole.taken
    assert [run.name for run in again.runs] == [run.name for run in results.runs]
    assert {run.state for run in again.runs} == {DONE, FAILED} == {run.state for run in results.runs}
    best = results.best()
    assert best and best.settings["model.num_layers"] == 2 and 3e-3 < best.settings["optimizer.lr"] < 3e-2
    good = [depth + abs(math.log10(rate) + 2) < 3.5 for rate, depth in whole.taken]
    assert sum(good[-12:]) > 1.2 * sum(good[:12])
    assert swept("parts", 27, more := Parabola())[1] and 1 <= len(more.taken) <= 2
    with pytest.raises(ConfigError, match="was begun with"):
        ranges[3] = "model.num_layers=2:6"
        swept("parts", 27, Parabola())


def test_errors_in_physical_units_compare_losses(tiny: list[str]) -> None:
    score = "val/rmse/10m_u_component_of_wind"
    results = parse([*tiny, "--vary", "training.loss=mse,mae", "--score", score, "--seeds", "2"])
    found = [(run.config.training.loss, run.config.training.seed) for run in results.runs]
    assert found == [("mse", 0), ("mae", 0), ("mse", 1), ("mae", 1)]
    assert results.runs[3].config.dump_folder.name == "training.loss=mae,seed=1"


def test_values_and_names() -> None:
    assert split_values("[1,2],[3]") == ["[1,2]", "[3]"]
    varied = [parse_varied("model.patch_size=[2,2],[4,4]"), parse_varied("optimizer.name=AdamW,Muon")]
    assert combinations(varied, 0, 0)[1] == {"model.patch_size": "[2,2]", "optimizer.name": "Muon"}
    assert name_of({"model.patch_size": (4, 4), "a.b": 1e-5}, 3) == "model.patch_size=4-4,a.b=1e-05,seed=3"
    long = [name_of({f"section.{'k' * 50}{i}": end for i in range(9)}, 0) for end in (1, 2)]
    assert long[0] != long[1] and max(map(len, long)) <= 160
    # A text with a colon is no range.
    assert parse_varied("checkpoint.keep_best=val/rmse/z:500").texts == ("val/rmse/z:500",)


def test_trials_are_drawn_from_a_seed() -> None:
    varied = [parse_varied("optimizer.lr=1e-4:1e-2:log"), parse_varied("model.num_layers=2:5")]
    twenty = combinations(varied, 200, 7)
    assert combinations(varied, 50, 7) == twenty[:50] and combinations(varied, 50, 8) != twenty[:50]
    rates = [float(each["optimizer.lr"]) for each in twenty]
    assert 1e-4 <= min(rates) < 1.3e-4 and 8e-3 < max(rates) <= 1e-2
    assert 70 < sum(rate < 1e-3 for rate in rates) < 130  # half of them in the lower decade
    layers = [each["model.num_layers"] for each in twenty]
    assert set(layers) == {"2", "3", "4", "5"} and all(layers.count(n) > 25 for n in set(layers))


def test_the_best_of_many_is_too_good(capsys) -> None:
    caution(20)
    assert not capsys.readouterr().err
    caution(21)
    (line,) = capsys.readouterr().err.splitlines()
    assert "the best of 21 combinations looks better" in line and "a third period" in line


def write_records(folder: Path, *found: dict) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in found))


def test_when_a_run_has_ended(tmp_path: Path) -> None:
    words = ["--checkpoint.enable", "--checkpoint.keep_best=val/loss", "--validation.interval=10"]
    words += ["--training.steps=50", f"--job.dump_folder={tmp_path}", "--validation.early_stop_patience=2"]
    run = Run({}, 0, words, load_checked(words))
    run.read("val/loss")
    assert run.state == WAITING
    (tmp_path / "best").mkdir()
    best = {"score": "val/loss", "value": 0.5, "step": 10}
    (tmp_path / "best" / "best.json").write_text(json.dumps(best))
    write_records(tmp_path, {"step": 10, "val/loss": 0.5}, {"step": 20, "val/loss": 0.6}, {"step": 50})
    run.read("val/loss")
    assert run.state == WAITING  # the last step is taken, not validated
    later = {"step": 30, "val/loss": 0.7}
    write_records(tmp_path, {"step": 10, "val/loss": 0.5}, {"step": 20, "val/loss": 0.6}, later)
    run.read("val/loss")
    assert (run.state, run.score) == (DONE, 0.7)  # two validations without a better one: it ended early
    run.state = WAITING
    write_records(tmp_path, {"step": 50, "val/loss": None})
    run.read("val/loss")
    assert (run.state, run.score, run.reason) == (FAILED, None, "val/loss is not finite")


def test_the_order_of_a_table(tmp_path: Path) -> None:
    """The mean over seeds decides; who failed with one seed comes last."""
    found = {1e-3: [0.5, 0.3], 1e-2: [0.1, None], 1e-4: [0.35, 0.35]}
    config = load_checked([])
    runs = [
        Run(
            {"optimizer.lr": rate},
            seed,
            [],
            config,
            DONE if score else FAILED,
            score,
            2.0,
            "" if score else "x",
        )
        for rate, scores in found.items()
        for seed, score in enumerate(scores)
    ]
    results = Results(tmp_path, "val/loss", runs)
    results.write()
    lines = sweep_lines(tmp_path)
    assert [line["settings"]["optimizer.lr"] for line in lines] == [1e-4, 1e-3, 1e-2]
    assert [line["mean"] for line in lines] == pytest.approx([0.35, 0.4, 0.1])
    assert (lines[1]["lowest"], lines[1]["highest"], lines[1]["seconds"]) == (0.3, 0.5, 4.0)
    row = results.table().splitlines()[2].split()
    assert row == ["0.001", "0.4", "0.3", "0.5", "4.0"]
    assert "1 of 2 failed: x" in results.table()
    best = results.best()
    assert best and best.settings == {"optimizer.lr": 1e-4} and (tmp_path / "sweep.png").exists()
