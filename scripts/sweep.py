"""Sweep settings with Optuna. Copy this file, edit its first part, and start it in the project's folder:

    .venv/bin/python scripts/sweep.py train_configs/demo.toml --trials 20 --folder outputs/sweep --KEY VALUE

Each trial is a run of train.py in FOLDER/trial-NNNN, one after the other; further words are overrides for all
of them. The study is in FOLDER/optuna.db. The same command continues a sweep that was stopped or killed, with
its open trial first; a larger --trials adds trials. A folder belongs to one process at a time.
Plots: pip install optuna-dashboard; optuna-dashboard sqlite:///FOLDER/optuna.db
Exit codes: 0 done, 1 no trial has a score, 2 bad input, 75 stopped by SIGTERM: start it again.
"""

import argparse
import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

try:
    import optuna  # type: ignore[reportMissingImports]
    from optuna.trial import TrialState  # type: ignore[reportMissingImports]
except ImportError:
    print('scripts/sweep.py needs Optuna: pip install -e ".[sweep]"', file=sys.stderr)
    sys.exit(2)

SCORE = "val/loss"  # of metrics.jsonl, the lower the better; "val/rmse/<variable>" if the loss differs
TRAIN = [sys.executable, "train.py"]  # for several GPUs ["./run_train.sh"]
PRUNER = optuna.pruners.MedianPruner(n_startup_trials=5)  # stops runs above the median; NopPruner(): none


def draw(trial: optuna.Trial) -> dict[str, Any]:
    """Return the overrides of a trial. Lists are text: suggest_categorical(KEY, ["[2,2]", "[4,4]"])."""
    return {
        "optimizer.lr": trial.suggest_float("optimizer.lr", 1e-4, 1e-2, log=True),
        "optimizer.weight_decay": trial.suggest_categorical("optimizer.weight_decay", [0.0, 0.05, 0.1]),
    }


# Nothing below needs to be edited.
BAD_INPUT, SAVED = 2, 75  # exit codes of train.py
POLL_SECONDS = 0.5


def sweep(command: list[str], num_trials: int, folder: Path) -> int:
    """Run trials until `num_trials` have ended, and return the exit code."""
    storage = f"sqlite:///{folder / 'optuna.db'}"
    study = optuna.create_study(storage=storage, study_name="sweep", load_if_exists=True, pruner=PRUNER)
    while sum(trial.state.is_finished() for trial in study.trials) < num_trials:
        study.sampler = optuna.samplers.TPESampler(seed=len(study.trials))  # one seed would repeat its draws
        interrupted = study.get_trials(states=(TrialState.RUNNING,))
        trial = optuna.Trial(study, interrupted[0]._trial_id) if interrupted else study.ask()
        state, score = run(trial, command, folder / f"trial-{trial.number:04d}")
        study.tell(trial, score if state == TrialState.COMPLETE else None, state=state)
        print(f"trial {trial.number}: {state.name.lower()}, {SCORE} = {score}, {trial.params}", flush=True)
    if not study.get_trials(states=(TrialState.COMPLETE,)):
        print(f"no trial has a score; see {folder}/trial-*.log", file=sys.stderr)
        return 1
    print(f"best: trial {study.best_trial.number}, {SCORE} = {study.best_value}, {study.best_params}")
    return 0


def run(trial: optuna.Trial, command: list[str], folder: Path) -> tuple[TrialState, float]:
    """Train until the end or until the pruner stops it. Return the state and the last score."""
    drawn = draw(trial).items()
    words = [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in drawn]
    num_scores, pruned = 0, False
    with open(f"{folder}.log", "a") as log:
        process = subprocess.Popen([*command, *words, f"--job.dump_folder={folder}"], stdout=log, stderr=log)
        try:
            while process.poll() is None:
                time.sleep(POLL_SECONDS)
                for step, score in scores(folder)[num_scores:]:
                    trial.report(score, step)
                    num_scores, pruned = num_scores + 1, pruned or trial.should_prune()
                if pruned:
                    break
        finally:  # also on Ctrl-C and SIGTERM: the run saves, and the trial stays open
            process.terminate()
            code = process.wait()
    if not pruned and code in (BAD_INPUT, SAVED):
        print(Path(f"{folder}.log").read_text().splitlines()[-1], file=sys.stderr)
        sys.exit(code)
    score = scores(folder)[-1][1] if scores(folder) else math.nan
    ended = TrialState.COMPLETE if code == 0 and math.isfinite(score) else TrialState.FAIL
    return TrialState.PRUNED if pruned else ended, score


def scores(folder: Path) -> list[tuple[int, float]]:
    """Return (step, score) of each validation so far, NaN where that is not finite."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []  # the last may be half written
    records = [json.loads(line) for line in lines]
    found = [(each["step"], each[SCORE]) for each in records if SCORE in each]
    return [(step, math.nan if score is None else score) for step, score in found]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("config")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("outputs/sweep"))
    options, overrides = parser.parse_known_args()
    if options.trials < 1:
        parser.error("--trials: 1 or more")
    try:
        options.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--folder: {error}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(SAVED))
    sys.exit(sweep([*TRAIN, "--job.config_file", options.config, *overrides], options.trials, options.folder))


if __name__ == "__main__":
    main()
