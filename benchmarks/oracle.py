"""Reading and scoring of random, valid, unusual inputs, compared with float64 code from the definitions.

attack.py starts both commands: `sources` compares what datasets/ reads and converts with what odd_inputs.py
wrote, `scores` what evaluate.py writes with score_definitions.py. Refusals are counted and printed: one of
what is neither ambiguous nor unsupported is a defect, too.
"""

import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from benchmarks.odd_inputs import HOUR, VARIABLES, Array, Case, Fields, base, generate_scores, generate_source
from benchmarks.results_file import record
from benchmarks.score_definitions import expected
from errors import DataError, one_line_errors

LIMIT = 60.0  # seconds of a command
ACTIVITY = ("forecast_activity", "truth_activity")
EXACT, ROUNDED = 1e-10, 1e-6  # relative: of float32 fields as they are, and of converted or regridded ones
WRONG = ("wrong", "traceback", "hang")
POWER = {"mse": 2} | dict.fromkeys(("rmse", "rmse_sqrt_before_time_avg", "mae", "bias", "crps", "spread"), 1)
POWER |= dict.fromkeys(("forecast_activity", "truth_activity"), 1)


# -- reading


def compare_archive(path: str, fields: Fields, dtype: str = "") -> list[str]:
    """Return what differs. dtype: of a store that was converted, with the error that it documents."""
    from datasets.archive import open_archive

    archive, wrong, times = open_archive(path), [], fields.axes["time"]
    if refused := {*map(base, fields.values)} & archive.unreadable.keys():
        raise DataError("; ".join(archive.unreadable[name] for name in refused))
    for what, ours, theirs in (
        ("variables", sorted(fields.values), sorted(set(archive.variables) - {"ozone_mass_mixing_ratio"})),
        ("static", sorted(fields.static), sorted(archive.static_variables)),
        ("dates", times.astype("M8[s]").tolist(), archive.times.tolist()),
        ("grid", (len(fields.latitude), len(fields.longitude)), archive.grid.shape),
    ):
        wrong += [f"{what}: {theirs}, not {ours}"] if ours != theirs else []
    if wrong:
        return wrong
    turn = np.abs((archive.grid.longitude[:, None] - fields.longitude + 180) % 360 - 180)
    columns = turn.argmin(axis=1)
    if max(turn.min(axis=1).max(), np.abs(archive.grid.latitude - fields.latitude).max()) > 1e-4:
        return [f"places: {archive.grid.latitude}, {archive.grid.longitude}"]
    for name in fields.values:
        theirs = np.stack([archive.read(i, [name])[0] for i in range(len(times))])
        wrong += compare_values(
            name, fields.values[name][..., columns], theirs, rounding_of(path, name, dtype)
        )
    for name, ours in fields.static.items():
        wrong += compare_values(name, ours[..., columns], archive.read_static(name), (0.0, 0.0, 0.0))
    return wrong


def rounding_of(path: str, name: str, dtype: str) -> tuple[float, float, float]:
    """Return an error for each unit of distance from an offset, the offset, and another error."""
    if dtype != "float16":
        return 0.0, 0.0, 0.0
    attrs = xr.open_zarr(path, decode_cf=False, consolidated=False)[name.replace(":", "_")].attrs
    return 2.0**-11, attrs["add_offset"], 2.0**-25 * attrs["scale_factor"]


def compare_values(name: str, ours: Array, theirs: Array, rounding: tuple[float, float, float]) -> list[str]:
    if (missing := np.isnan(ours) != np.isnan(theirs)).any():
        return [f"{name}: {missing.sum()} cells are missing in one, the first {np.argwhere(missing)[0]}"]
    relative, offset, absolute = rounding
    room = ROUNDED * np.abs(ours) + 1e-7 * VARIABLES[base(name)]["size"][1]
    room += relative * np.abs(ours - offset) + absolute
    off = np.nan_to_num(np.abs(ours - theirs) - room) > 0
    if not off.any():
        return []
    first = tuple(np.argwhere(off)[0])
    return [f"{name}: {off.sum()} of {off.size} values, the first {theirs[first]:.9g}, not {ours[first]:.9g}"]


def read_back(folder: Path) -> int:
    path, fields = pickle.loads((folder / "case.pickle").read_bytes())
    with one_line_errors():
        return report(compare_archive(path, fields))
    return 0


def convert(words: list[str], ended_by: int | None = None) -> int:
    """Convert; ended_by: number of the durable write before which the process is killed."""
    from datasets import convert as module
    from datasets import shards

    replacing, count = module.replacing, iter(range(10**6))

    @contextmanager
    def durable(path: Path) -> Iterator[Path]:
        if next(count) == ended_by:
            os.kill(os.getpid(), signal.SIGKILL)
        with replacing(path) as partial:
            yield partial

    module.replacing = shards.replacing = durable
    with one_line_errors():
        return module.main(words)
    return 0


def compare_converted(folder: Path, target: str, dtype: str) -> int:
    path, fields = pickle.loads((folder / "case.pickle").read_bytes())
    with one_line_errors():
        return report(compare_archive(target, fields, dtype))
    return 0


def report(wrong: list[str]) -> int:
    print("\n".join(wrong))
    return 3 * bool(wrong)


def source(seed: int, folder: Path) -> tuple[str, str]:
    """Return the verdict on one source, and why."""
    ask(generate_source, seed, folder)
    answer = judge(*forked(LIMIT, read_back, folder))
    if answer[0] != "right":
        return answer
    path, fields = pickle.loads((folder / "case.pickle").read_bytes())
    target, dtype = str(folder / "store"), ("float16", "float32")[seed % 2]
    words, kill = [path, target, "--dtype", dtype], int(np.random.default_rng([seed, 2]).integers(4))
    for run in ([words, kill], [words, None]):
        answer = judge(*forked(LIMIT, convert, *run))
        if answer[0] != "right" and not (run[1] is not None and "signal 9" in answer[1]):
            return answer[0], f"convert: {answer[1]}"
    verdict, why = judge(*forked(LIMIT, compare_converted, folder, target, dtype))
    return verdict, f"converted to {dtype}: {why}" if why else ""


# -- scoring


def evaluate_case(folder: Path) -> None:
    import evaluate

    case = pickle.loads((folder / "case.pickle").read_bytes())
    evaluate.plot_evaluation = lambda *_: None  # seconds a case, and no numbers
    sys.argv = ["evaluate.py", *case.words]
    evaluate.main()


def compare_scores(folder: Path) -> int:
    case: Case = pickle.loads((folder / "case.pickle").read_bytes())
    ours, regions, card, exact = expected(case)
    with xr.open_dataset(folder / "run/evaluation/scores.nc", engine="h5netcdf") as ds:
        theirs, wrong = ds.load(), []
    if [*theirs.region.values] != regions:
        return report([f"regions: {[*theirs.region.values]}, not {regions}"])
    worst: dict[str, tuple[float, str]] = {}
    for (forecast, metric, variable, hours), values in ours.items():
        name, _, level = variable.partition(":")
        at: dict[str, Any] = {
            "forecast": forecast,
            "metric": metric,
            "lead_time": hours * HOUR.astype("m8[ns]"),
        }
        try:
            found = theirs[name].sel(at | ({"level": int(level)} if level else {})).values
        except KeyError:
            found = np.full(len(regions), np.nan)
        found = np.nan_to_num(found) if metric == "num_dates" else found
        mean, size = VARIABLES[
            base(variable).replace("wind_vector", "u_component_of_wind").replace("10m_u", "u")
        ]["size"]
        power = POWER.get(metric, 0)
        activity = [ours.get((forecast, m, variable, hours), size) for m in ACTIVITY if "acc" in metric]
        least = reduce(np.fmin, activity, size)
        rounding = EXACT if exact else ROUNDED + 5e-7 * mean / least
        room = rounding * (np.abs(values) + size**power)  # float32 of large means, of anomalies for an ACC
        room = room * (100 * np.maximum(1, values) if "skill" in metric else 1)  # the skill may be nearly 0
        off = np.where(
            np.isnan(values) | np.isnan(found),
            np.isnan(values) != np.isnan(found),
            np.abs(values - found) > room,
        )
        if off.any():
            r = int(off.argmax())
            by = np.nan_to_num(abs(found[r] / values[r] - 1), nan=np.inf)
            where = f"{metric} of {forecast!r}, {variable} at {hours} h, {regions[r]}"
            text = f"{where}: {found[r]:.9g}, not {values[r]:.9g}"
            worst[metric] = max(worst.get(metric, (-1.0, "")), (by, text))
    wrong = [text for _, text in worst.values()]
    extra = sum(int(each.sel(metric="rmse").notnull().sum()) for each in theirs.values())
    mine = sum(np.isfinite(v).sum() for (_, metric, _, _), v in ours.items() if metric == "rmse")
    wrong += [f"{extra} RMSEs, not {mine}"] if extra != mine else []
    path = folder / "run/evaluation/scorecard.csv"
    rows = pd.read_csv(path).to_dict("records") if path.exists() else []
    percent = {(row["variable"], row["lead_hours"]): row["percent"] for row in rows}
    if case.against and percent.keys() != card.keys():
        wrong.append(f"scorecard: rows {sorted(percent.keys() ^ card.keys())} are in one of both")
    off = {
        key: value
        for key, value in percent.items()
        if abs(value - card.get(key, value)) > 2e-4 + (1e-4 - exact * 1e-4) * (100 + abs(value))
    }
    wrong += [f"scorecard: {key}: {value}, not {card[key]:.4f}" for key, value in off.items()][:2]
    return report(wrong)


def score(seed: int, folder: Path) -> tuple[str, str]:
    """Return the verdict on one evaluation, and why."""
    ask(generate_scores, seed, folder)
    answer = judge(*forked(LIMIT, evaluate_case, folder))
    if answer[0] == "refused" and "truth has no analysis" in answer[1]:
        ours = expected(pickle.loads((folder / "case.pickle").read_bytes()))[0]
        return answer if any(v.any() for key, v in ours.items() if key[1] == "num_dates") else ("right", "")
    return answer if answer[0] != "right" else judge(*forked(LIMIT, compare_scores, folder))


# -- commands in processes of their own


def forked(limit: float, function: Callable[..., int | None], *args: Any) -> tuple[int | None, str]:
    """Return the exit code of a function in a fork of this process, None if it hangs, and what it printed."""
    sys.stdout.flush()
    with tempfile.TemporaryFile("w+") as output:
        if not (pid := os.fork()):
            os.setsid()
            for descriptor in (1, 2):
                os.dup2(output.fileno(), descriptor)
            code: Any = 1
            try:
                code = function(*args) or 0
            except SystemExit as end:
                code = end.code or 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        end, status = time.monotonic() + limit, (0, 0)
        while not (status := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < end:
            time.sleep(0.01)
        if not status[0]:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(status[1]) if status[0] else None, output.read()


def ask(function: Callable[..., int | None], *args: Any) -> str:
    code, text = forked(LIMIT, function, *args)
    assert code == 0, text
    return text


def judge(code: int | None, text: str) -> tuple[str, str]:
    if code is None:
        return "hang", ""
    if "Traceback (most recent" in text or code < 0:
        return "traceback", text.strip()[-900:] + f" signal {-code}" * (code < 0)
    if code == 2:
        return "refused", [line for line in text.splitlines() if line.startswith("rossby:")][-1]
    if code == 3:
        return "wrong", "; ".join(text.splitlines()[:4])[:600]
    return ("right", "") if code == 0 else ("traceback", f"exit code {code}: {text[-300:]}")


def run(kind: str, one: Callable[[int, Path], tuple[str, str]], options: Namespace) -> int:
    for name in ("evaluate", "datasets.convert"):  # forks have them
        import_module(name)
    began, counts, wrong, messages = time.monotonic(), Counter(), [], Counter()
    seeds = [options.seed] if options.seed >= 0 else range(options.first, options.first + options.seeds)
    for seed in seeds:
        folder = Path(tempfile.mkdtemp(prefix=f"rossby-{kind}-{seed}-"))
        try:
            verdict, why = one(seed, folder)
        except AssertionError as error:
            verdict, why = "traceback", f"generator: {error}"
        counts[verdict] += 1
        if verdict == "right":
            shutil.rmtree(folder)
            continue
        print(f"seed {seed}: {verdict}: {why}; kept: {folder}", flush=True)
        if verdict in WRONG:
            wrong.append(f"seed {seed}: {verdict}: {why}")
        else:
            messages[re.sub(r"'/tmp\S*'|[\d.:-]+", "#", why)] += 1
    for text, number in messages.most_common():
        print(f"refused {number} x: {text}")
    row = {"kind": kind, "cases": len(seeds), "first": min(seeds), "counts": counts, "wrong": wrong}
    record("attack", [row | {"seconds": time.monotonic() - began}])
    print(f"\n{pd.Series(counts, name=kind).to_string()}\n{time.monotonic() - began:.0f} s")
    return int(bool(wrong))


def scores(options: Namespace) -> int:
    return run("scores", score, options)


def sources(options: Namespace) -> int:
    return run("sources", source, options)
