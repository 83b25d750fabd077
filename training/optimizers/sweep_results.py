"""What a sweep has found so far, by the runs' folders: a table, lines of JSON, a picture."""

import json
import math
import statistics
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import tomli

from checkpoints.identity import with_defaults
from command_line import text_table, to_toml
from config import PATHS, Config, in_one_place
from errors import refuse
from jobs.durable_files import write_durably
from training.best import history
from training.journal import read_records
from training.optimizers.search_space import name_of, shown_value
from verification.plots import build_panels, save

SPREAD = 10  # times the lowest value, from which on an axis is logarithmic
LONGEST_REASON = 90  # characters of a table's last column
WAITING, DONE, FAILED, STOPPED = "waiting", "done", "failed", "stopped"


@dataclass
class Run:
    """One run of train.py and what came of it. settings: of the keys that are varied, but for the seed."""

    settings: dict[str, Any]
    seed: int
    words: list[str]  # of its command line
    config: Config
    state: str = WAITING
    score: float | None = None
    seconds: float = 0.0  # of its processes so far, as far as a sweep has seen them end
    reason: str = ""  # why it failed

    @property
    def name(self) -> str:
        return name_of(self.settings, self.seed)

    def read(self, score: str) -> None:
        """Whether it has ended, and with which score, by its folder."""
        record = last_validation(self.config, score)
        if record is not None:
            self.score, self.state = record[score], DONE
            if self.score is None:
                self.state, self.reason = FAILED, f"{score} is not finite"


def last_validation(config: Config, score: str) -> dict[str, Any] | None:
    """The object of metrics.jsonl that a run ended with; None: it has not ended, or not begun."""
    metrics, name = config.dump_folder / "metrics.jsonl", config.checkpoint.keep_best
    records = [record for record in read_records(metrics) if score in record]
    if not records:
        return None
    patience, exhausted = config.validation.early_stop_patience, False
    if patience:
        later = history(config.dump_folder / "best" / "best.json", metrics, name)[2]
        exhausted = len(later) >= patience
    return records[-1] if records[-1]["step"] == config.training.steps or exhausted else None


def check_same(config: Config) -> None:
    """ConfigError: what lies in a run's folder was made with another configuration."""
    path = config.dump_folder / "config.toml"
    if not path.exists():
        return
    there = _in_one_place(with_defaults(tomli.loads(path.read_text())))
    asked = _in_one_place(with_defaults(tomli.loads(to_toml(config))))
    for section, key in ((s, k) for s in asked if s != "job" for k in asked[s]):
        if asked[section][key] != there[section][key]:
            reason = f"{path} says {there[section][key]!r}; name another job.dump_folder, or remove that run"
            refuse(f"{section}.{key}", asked[section][key], reason)


def _in_one_place(values: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Paths are relative to the project's folder where they were written from there, and else absolute."""
    placed = {section: dict(keys) for section, keys in values.items()}
    for section, key in PATHS:
        placed[section][key] = in_one_place(placed[section][key])
    return placed


# -- combinations, each of one run a seed


@dataclass
class Combination:
    """Runs that differ by their seed alone."""

    settings: dict[str, Any]
    runs: list[Run] = field(default_factory=list)

    @property
    def scores(self) -> list[float]:
        return [run.score for run in self.runs if run.state == DONE and run.score is not None]

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.scores) if self.scores else None

    @property
    def failed(self) -> list[Run]:
        return [run for run in self.runs if run.state == FAILED]

    @property
    def rank(self) -> tuple[bool, float]:
        """The lowest first; one of which a run failed is no winner, whatever its others reach."""
        return bool(self.failed), math.inf if self.mean is None else self.mean

    @property
    def note(self) -> str:
        """What is to be said beside its score."""
        if self.failed:
            count = f"{len(self.failed)} of {len(self.runs)} " if len(self.runs) > 1 else ""
            return f"{count}failed: {self.failed[0].reason}"[:LONGEST_REASON]
        open_runs = [run for run in self.runs if run.state != DONE]
        if not open_runs:
            return ""
        count = f"{len(open_runs)} of {len(self.runs)} " if len(self.runs) > 1 else ""
        return count + " or ".join(sorted({run.state for run in open_runs}))


@dataclass
class Results:
    """Of all runs of a sweep. score: its name in metrics.jsonl; the lower the better."""

    folder: Path
    score: str
    runs: list[Run]

    @cached_property
    def combinations(self) -> list[Combination]:
        found: dict[str, Combination] = {}
        for run in self.runs:
            name = name_of(run.settings, 0)
            found.setdefault(name, Combination(run.settings)).runs.append(run)
        return list(found.values())

    def joined_by(self, runs: list[Run]) -> "Results":
        """With what lies in the folders of these runs; one that is there already comes no second time."""
        names = {run.name for run in self.runs}
        joined = Results(self.folder, self.score, [*self.runs, *(r for r in runs if r.name not in names)])
        joined.read()
        return joined

    def mean_of(self, runs: list[Run]) -> float | None:
        """Of one combination; None: there is none, or a run of it has failed."""
        found = [c for c in self.combinations if runs and c.settings == runs[0].settings]
        return found[0].mean if found and not found[0].failed else None

    def sorted(self) -> list[Combination]:
        return sorted(self.combinations, key=lambda each: each.rank)

    def table(self) -> str:
        """Heads, then a row a combination."""
        keys = list(self.runs[0].settings)
        rows = [
            (*map(shown_value, c.settings.values()), c.mean, *_ends(c.scores), _seconds(c), c.note)
            for c in self.sorted()
        ]
        widths = [max(len(str(row[i])) for row in [*rows, keys]) + 2 for i in range(len(keys))]
        formats = " ".join([*(f"<{width}" for width in widths), ">12.5g >12.5g >12.5g >9.1f", "<2"])
        head = (*keys, "mean", "lowest", "highest", "seconds", "")
        return text_table(formats, [head, *((*row[:-1], f"  {row[-1]}") for row in rows)])

    def best(self) -> Combination | None:
        """The first row, where all its runs are done."""
        first = self.sorted()[0]
        return first if len(first.scores) == len(first.runs) else None

    def write(self) -> None:
        """sweep.jsonl, in the order of the table, and sweep.png."""
        lines = [json.dumps(self._line(each)) + "\n" for each in self.sorted()]
        write_durably(self.folder / "sweep.jsonl", "".join(lines))
        if self.runs[0].settings and any(each.scores and not each.failed for each in self.combinations):
            draw(self, self.folder / "sweep.png")

    def _line(self, each: Combination) -> dict[str, Any]:
        lowest, highest = _ends(each.scores)
        numbers = {"score": self.score, "mean": each.mean, "lowest": lowest, "highest": highest}
        runs = [
            {"folder": run.name, "seed": run.seed, "state": run.state, "score": run.score}
            | {"seconds": run.seconds, "reason": run.reason}
            for run in each.runs
        ]
        return {"settings": each.settings, **numbers, "seconds": _seconds(each), "runs": runs}

    def read(self) -> None:
        """What an earlier sweep in the folder has left. Seconds are in its sweep.jsonl alone."""
        path = self.folder / "sweep.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        known = {run["folder"]: run["seconds"] for line in lines for run in json.loads(line)["runs"]}
        for run in self.runs:
            run.seconds = known.get(run.name, 0.0)
            run.read(self.score)


def _ends(scores: list[float]) -> tuple[float | None, float | None]:
    return (min(scores), max(scores)) if scores else (None, None)


def _seconds(each: Combination) -> float:
    return sum(run.seconds for run in each.runs)


# -- the picture


def is_spread(values: list[float]) -> bool:
    return min(values) > 0 and max(values) > SPREAD * min(values)


def draw(results: Results, target: Path) -> None:
    """Score against each varied key: all combinations, with the range of seeds, and the lowest of a value."""
    keys = list(results.runs[0].settings)
    file = Path(results.runs[0].config.job.config_file)
    figure, panels = build_panels(len(keys), f"{file.stem}: {results.score}", columns=3, size=(4.6, 3.4))
    scored = [each for each in results.combinations if each.scores and not each.failed]
    for key, axes in zip(keys, panels, strict=True):
        places = place_values(axes, key, [each.settings[key] for each in results.combinations])
        draw_scores(axes, [(places[str(each.settings[key])], each) for each in scored])
        failed = [places[str(each.settings[key])] for each in results.combinations if each.failed]
        if failed:
            top = axes.get_xaxis_transform()
            axes.plot(failed, [0.97] * len(failed), "x", color="k", transform=top, label="failed")
        if is_spread([each.mean or 0.0 for each in scored]):
            axes.set_yscale("log")
        axes.grid(alpha=0.3, which="both")
    panels[0].set_ylabel("mean over seeds, lowest to highest")
    panels[0].legend(fontsize=8)
    save(figure, target)


def place_values(axes: Any, key: str, values: list[Any]) -> dict[str, float]:
    """Where each stands on its axis: numbers at themselves, anything else in its order."""
    axes.set(xlabel=key)
    if not all(type(value) in (int, float) and math.isfinite(value) for value in values):
        places = {text: float(i) for i, text in enumerate(dict.fromkeys(map(str, values)))}
        axes.set_xticks(list(places.values()), [shown_value(value) for value in dict.fromkeys(values)])
        axes.set_xlim(-0.5, len(places) - 0.5)
        return places
    if is_spread(values):
        axes.set_xscale("log")
        axes.tick_params(axis="x", which="both", labelrotation=45, labelsize=8)
    return {str(value): float(value) for value in values}


def draw_scores(axes: Any, points: list[tuple[float, Combination]]) -> None:
    means = [each.mean or 0.0 for _, each in points]
    below = [mean - min(each.scores) for mean, (_, each) in zip(means, points, strict=True)]
    above = [max(each.scores) - mean for mean, (_, each) in zip(means, points, strict=True)]
    at = [place for place, _ in points]
    axes.errorbar(at, means, (below, above), fmt="o", color="0.6", capsize=3, label="a combination")
    lowest = {place: min(m for p, m in zip(at, means, strict=True) if p == place) for place in sorted(at)}
    if len(lowest) < len(points):  # values that were drawn are each tried once: nothing to take the lowest of
        label = "lowest at each value"
        axes.plot(list(lowest), list(lowest.values()), "o-", color="C3", zorder=3, label=label)
