"""Which settings: a run of train.py for every combination of values, and a table sorted by their scores.

    .venv/bin/python -m training.optimizers.sweep CONFIG --vary optimizer.lr=1e-3,2e-3 --vary model.dim=96,192
    .venv/bin/python -m training.optimizers.sweep CONFIG --vary optimizer.lr=1e-4:1e-2:log --trials 20

--vary    a key and its values, in all combinations; may be given again; low:high and low:high:log are ranges
--trials  so many combinations, drawn from training.seed; needed for ranges; default 0: all there are
--sampler random, or tpe: Optuna (an extra) proposes each by the scores of those before; default random
--seeds   runs of each combination, from training.seed on; default 1
--score   as metrics.jsonl calls it, the lower the better; default val/loss

Any --section.key value may follow. Runs lie in <job.dump_folder>-sweep, beside sweep.jsonl and sweep.png; the
same command again goes on, and what has ended is not run again. docs/batch_and_rate.md explains it. Exit
codes: 0 done, 1 no run has a score, 2 bad input, 75 stopped, start it again.
"""

import argparse
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

import torch

from command_line import own_options, parse_command_line, split_options, start
from config import PROJECT, SECTIONS, Config
from errors import RunFailed, UserError, end_when_interrupted, one_line_errors, print_message, refuse
from jobs.preemption import EXIT_SAVED, STOP_SIGNALS
from parallelisms.degrees import number_in_environment
from planning.start_checks import open_checked
from training.config_checks import check_score, load_checked
from training.optimizers.search_space import MOST, Varied, combinations, name_of, parse_varied, value_of
from training.optimizers.sweep_results import DONE, FAILED, STOPPED, WAITING, Results, Run, check_same
from training.run_folder import lock_folder

OPTIONS = own_options(vary=[], trials=0, sampler="random", seeds=1, score="val/loss")
OPTUNA = "optuna==5.0.0"  # as requirements-extras.txt has it
MOST_SEEDS = 1000
MANY = 20  # combinations, the best of which looks better on the dates that chose it than it is
# What is scored: scores of runs that differ in these cannot be compared.
SCORED = (
    "data.path",
    "data.select",
    "data.validation_period",
    "validation.lead_hours",
    "validation.enable",
    "validation.members",
    "training.members",  # as many a validation has, where it does not say
)
# What val/loss means; errors in physical units mean the same with each.
LOSS = (
    "training.loss",
    "training.huber_threshold",
    "training.variable_weights",
    "training.weight_by_change",
    "training.weight_by_pressure",
    "training.spectral_fraction",
    "training.conserve",
    "training.conserve_weight",
    "model.predict",
    "data.variables",
    "data.levels",
    "data.step_hours",
    "data.train_period",
    "data.statistics_dates",
)


# -- what is asked for


def check_varied(varied: list[Varied], overrides: dict, score: str) -> None:
    """ConfigError: a key that cannot be varied, or is given twice."""
    keys = [each.key for each in varied]
    for key in keys:
        section, _, name = key.partition(".")
        if keys.count(key) > 1 or name in overrides.get(section, {}):
            refuse("--vary", key, "is given twice; list all its values once")
        if key == "training.seed":
            refuse("--vary", key, "write --seeds and how many")
        if section == "job":
            refuse("--vary", key, "names the sweep itself; vary another key")
        if key in SCORED:
            refuse("--vary", key, "changes what is scored, so that scores cannot be compared; fix it")
        if key in LOSS and score == "val/loss":
            reason = 'changes what val/loss means; take --score "val/rmse/<variable>", in physical units'
            refuse("--vary", key, reason)


def check_base(base: Config, own: argparse.Namespace) -> None:
    """ConfigError, before the combinations are looked at."""
    if not 1 <= own.seeds <= MOST_SEEDS:
        refuse("--seeds", own.seeds, f"at least 1 and at most {MOST_SEEDS} expected")
    if not own.vary and own.seeds == 1:
        refuse("--vary", "", "nothing is varied; name a key and its values, or --seeds")
    if own.trials and not own.vary:
        refuse("--trials", own.trials, "nothing is varied to draw from; name a key with --vary")
    if "WORLD_SIZE" in os.environ or number_in_environment("NNODES") > 1:
        refuse("NNODES", os.environ.get("NNODES", ""), "a sweep starts the ranks of its runs, on one host")


def check_sampler(own: argparse.Namespace) -> None:
    """ConfigError: there is no such sampler, or nothing for it to do, or its package is not installed."""
    if own.sampler not in ("random", "tpe"):
        refuse("--sampler", own.sampler, "random or tpe expected")
    if own.sampler == "random":
        return
    if not (own.vary and 0 < own.trials <= MOST):
        refuse("--sampler", "tpe", f"proposes values of --vary: say how many with --trials, at most {MOST}")
    if importlib.util.find_spec("optuna") is None:
        fix = f"{sys.executable} -m pip install {OPTUNA}"
        refuse("--sampler", "tpe", f"needs optuna, which is not installed; {fix}")


def build_runs(
    rest: list[str], base: Config, chosen: list[dict[str, str]], own: argparse.Namespace
) -> list[Run]:
    """Every combination once before any is repeated with another seed. Raises ConfigError."""
    folder, first = f"{base.dump_folder}-sweep", base.training.seed
    runs = []
    for seed in range(first, first + own.seeds):
        for texts in chosen:
            settings = {key: value_of(key, text) for key, text in texts.items()}
            words = [*rest, *(f"--{key}={text}" for key, text in texts.items()), f"--training.seed={seed}"]
            words.append(f"--job.dump_folder={folder}/{name_of(settings, seed)}")
            runs.append(Run(settings, seed, words, load_checked(words)))
    check_runs(runs, own.score)
    return runs


def check_runs(runs: list[Run], score: str) -> None:
    """ConfigError: a run has no such score, or another's folder, or one that lies there from before."""
    names = Counter(run.name for run in runs)
    for run in runs:
        if names[run.name] > 1:
            refuse("--vary", run.name, "is the folder's name of two combinations; take other values")
        if not run.config.validation.enable:
            refuse("validation.enable", False, "a sweep needs scores; set it to true")
        check_score("--score", score, run.config)
        check_same(run.config)


def check_data(runs: list[Run]) -> None:
    """ConfigError, DataError: what only the machine and the data can refuse, of each combination."""
    for run in runs:
        if run.seed == runs[0].seed and not len(open_checked(run.config).validation):
            refuse("data.validation_period", [], "a sweep needs dates to score; name a first and a last one")


@dataclass(frozen=True)
class Asked:
    """A command line, looked at."""

    own: argparse.Namespace
    rest: list[str]  # keys of all runs
    base: Config
    varied: list[Varied]

    @property
    def folder(self) -> Path:
        return Path(f"{self.base.dump_folder}-sweep")

    @property
    def seed(self) -> int:
        return self.base.training.seed

    def runs(self, chosen: list[dict[str, str]]) -> list[Run]:
        """Of these combinations. Raises ConfigError."""
        return build_runs(self.rest, self.base, chosen, self.own)

    def results(self) -> Results:
        """All runs; where they are proposed one by one the first values stand for all. Raises ConfigError."""
        if self.own.sampler == "random":
            chosen = combinations(self.varied, self.own.trials, self.seed)
        else:
            chosen = [{each.key: each.draw(0.0) for each in self.varied}]
        return Results(self.folder, self.own.score, self.runs(chosen))


# -- the runs


class Runner:
    """One run after the other. A signal to stop goes to the one that is going, which saves and leaves."""

    def __init__(self, folder: Path, lock: IO[str]) -> None:
        self.folder, self.lock = folder, lock
        self.process: subprocess.Popen | None = None
        self.asked = 0  # the signal
        self.previous = {number: signal.signal(number, self._hear) for number in STOP_SIGNALS}

    def close(self) -> None:
        """Signals mean again what they meant before."""
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        again = number == signal.SIGINT and self.asked
        self.asked = number
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT if again else signal.SIGTERM)  # twice: without a save

    def run(self, run: Run) -> tuple[int, str]:
        """Its exit code, and the last line that it said."""
        log = self.folder / f"{run.name}.log"
        with log.open("a") as output:
            begin = output.tell()
            self.process = subprocess.Popen(
                [str(PROJECT / "run_train.sh"), *run.words],
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C of a terminal is this process's to pass on. Who outlives it keeps the folder locked.
                start_new_session=True,
                pass_fds=(self.lock.fileno(),),
            )
            if self.asked:  # between the start and this line
                self.process.send_signal(signal.SIGTERM)
            code = self.process.wait()
        return code, last_line(log, begin)


def last_line(log: Path, begin: int) -> str:
    """What a run said of its end, after so many bytes of its log."""
    with log.open("rb") as file:
        file.seek(begin)
        lines = file.read().decode(errors="replace").replace("\r", "\n").splitlines()
    own = [line.partition("rossby: ")[2] for line in lines if "rossby: " in line]
    others = [line.strip() for line in lines if line.strip()]
    return (own or others or ["said nothing"])[-1]


def sweep(results: Results, runner: Runner) -> bool:
    """Whether all runs have ended, well or not."""
    waiting = [run for run in results.runs if run.state == WAITING]
    if found := len(results.runs) - len(waiting):
        print(f"{found} of {len(results.runs)} runs have ended before")
    return take_all(waiting, results, runner)


def take_all(waiting: list[Run], results: Results, runner: Runner) -> bool:
    """Whether they have all ended."""
    before = len(results.runs) - len(waiting)
    for number, run in enumerate(waiting, before + 1):
        if runner.asked:
            return False
        print(f"\nrun {number} of {len(results.runs)}: {run.name}", flush=True)
        take(run, runner, results.score)
        results.write()
        if run.state == STOPPED:
            return False
        if run is not waiting[-1]:
            print(results.table(), flush=True)
    return True


def sweep_proposed(asked: Asked, runner: Runner) -> tuple[Results, bool]:
    """Each combination when those before have ended, as Optuna proposes it; whether all have."""
    from training.optimizers.proposals import Study  # an extra

    own, results = asked.own, Results(asked.folder, asked.own.score, [])
    same = {"vary": own.vary, "seeds": own.seeds, "score": own.score, "training.seed": asked.seed}
    study = Study(asked.folder, asked.varied, asked.seed, same)
    for proposal in study.proposals(own.trials):
        print(f"\ntrial {proposal.number + 1} of {own.trials}: {proposal}", flush=True)
        runs = runs_of(asked, proposal.texts)
        results = results.joined_by(runs)
        waiting = [run for run in results.runs if run.state == WAITING]
        if proposal.scored:
            for run in waiting:
                run.state, run.reason = FAILED, "when it was tried"
        elif not take_all(waiting, results, runner):
            return results, False
        else:
            study.tell(proposal, results.mean_of(runs))
    if not results.runs:
        raise RunFailed("no combination that was proposed can be run; the lines above say why")
    return results, True


def runs_of(asked: Asked, texts: dict[str, str]) -> list[Run]:
    """Of a combination; none, and a line, where it is refused."""
    try:
        runs = asked.runs([texts])
        check_data(runs)
        return runs
    except UserError as error:
        print(f"is refused: {error}", flush=True)
        return []


def take(run: Run, runner: Runner, score: str) -> None:
    """Starts it, or lets it go on, and waits for its end."""
    started = time.monotonic()
    code, said = runner.run(run)
    before = run.seconds if run.config.checkpoint.enable else 0.0  # else it has begun anew
    run.seconds = round(before + time.monotonic() - started, 1)
    run.read(score)
    if run.state == WAITING:
        stopped = runner.asked or code == EXIT_SAVED
        run.state, run.reason = (STOPPED, said) if stopped else (FAILED, f"code {code}, {said}")
    print(f"ended with code {code} after {time.monotonic() - started:.0f} s", flush=True)


def conclude(results: Results, complete: bool) -> None:
    """The table, and what it says. RunFailed: nothing. SystemExit: to be started again."""
    results.write()
    print(f"\n{results.score}, the lowest first\n{results.table()}")
    files = [name for name in ("sweep.jsonl", "sweep.png") if (results.folder / name).exists()]
    print(f"\nwritten, in {results.folder}: {', '.join(files)}")
    if not complete:
        done = sum(run.state in (DONE, FAILED) for run in results.runs)
        print_message(
            f"stopped with {done} of {len(results.runs)} runs; start it again to go on (code {EXIT_SAVED})"
        )
        sys.exit(EXIT_SAVED)
    if not any(each.scores for each in results.combinations):
        raise RunFailed(f"no run has a score; {results.folder} has the log of each")
    if best := results.best():
        own = tuple(f"--{key}=" for key in best.settings)
        words = [word for word in best.runs[0].words if word.startswith(own)] if own else []
        print(f"lowest: {shlex.join(words)}")


# -- the command


def caution(number: int) -> None:
    """Of so many combinations."""
    if number > MANY:
        words = "looks better on data.validation_period than it is: score it on dates of a third period"
        print_message(f"the best of {number} combinations {words} (forecast.period, evaluate.py)")


def read_command(argv: list[str]) -> Asked:
    """Raises ConfigError."""
    own, rest = split_options(argv, OPTIONS)
    if rest and not rest[0].startswith("-"):
        rest = ["--job.config_file", *rest]
    base = start(rest, __doc__, None)
    check_base(base, own)
    check_sampler(own)
    varied = [parse_varied(text) for text in own.vary]
    check_varied(varied, parse_command_line(rest, SECTIONS), own.score)
    return Asked(own, rest, base, varied)


def parse(argv: list[str]) -> Results:
    """Of the combinations that are known before any has run. Raises ConfigError."""
    return read_command(argv).results()


def prepare_environment() -> None:
    """What runs inherit, and what their settings are checked against."""
    os.environ.setdefault("NGPU", str(max(torch.cuda.device_count(), 1)))
    os.environ.setdefault("ROSSBY_PYTHON", sys.executable)
    # training.max_wall_time is the sweep's: the job that it is a part of ends then.
    os.environ.setdefault("ROSSBY_STARTED", os.environ.get("SLURM_JOB_START_TIME") or str(time.time()))


def main(argv: list[str]) -> None:
    with one_line_errors():
        prepare_environment()
        asked = read_command(argv)
        results, proposed = asked.results(), asked.own.sampler == "tpe"
        check_data(results.runs)
        caution(asked.own.trials if proposed else len(results.combinations))
        with lock_folder(results.folder) as lock, closing(Runner(results.folder, lock)) as runner:
            if proposed:
                conclude(*sweep_proposed(asked, runner))
                return
            results.read()
            conclude(results, sweep(results, runner))


if __name__ == "__main__":
    end_when_interrupted()
    main(sys.argv[1:])
