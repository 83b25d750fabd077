"""Scores of any forecasts, compared with persistence, damped persistence and climatology.

    .venv/bin/python evaluate.py --job.config_file train_configs/gfs_winds.toml
    .venv/bin/python evaluate.py --job.config_file F --forecast ours.zarr --forecast HRES=hres.zarr
    .venv/bin/python -m jobs.torchrun --nproc-per-node 4 evaluate.py ...      several processes

--forecast [NAME=]PATH  a forecast, WeatherBench2's, Pangu's, GraphCast's ... layout; may be repeated
                        (default: the one that forecast.py wrote into the run's folder)
--truth PATH            analyses (default: data.path)
--climatology PATH      in WeatherBench2's schema (default: of the training period, kept in the run's folder)
--baselines LIST        of persistence,damped_persistence,climatology (default: all; "": none); the
                        climatology, which the ACC also needs, is computed only if it is listed here
--regions LIST          "global,tropics,europe" (default: global)
--output FOLDER         scores and spectra as files; plots (default: evaluation/ in the run's folder)

Configuration keys set data, period and variables. Exit codes: 0, 2 bad input.
"""

import sys

from command_line import answer_early, own_options, split_options, start
from training.config_checks import check

OPTIONS = own_options(
    forecast=[],
    truth="",
    climatology="",
    baselines="persistence,damped_persistence,climatology",
    regions="global",
    output="",
)
if __name__ == "__main__":
    answer_early(__doc__, check, OPTIONS)  # before torch is imported, which takes seconds

import hashlib
import logging
import os
import shutil
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import xarray as xr
from tqdm import tqdm

from command_line import to_toml
from config import Config
from datasets.archive import Archive, open_archive
from datasets.dates import is_inside
from datasets.field_dataset import FieldDataset
from datasets.grid import area_weights, coarser
from datasets.options import parse_selection
from datasets.remote import Access, is_url
from datasets.selection import Selection, access_of, open_selection
from datasets.statistics import Source, fingerprint_of, sampled_pairs, stored_statistics
from errors import ConfigError, DataError, end_process, one_line_errors, refuse
from jobs.log_setup import start_logging
from jobs.saved_parts import SavedParts
from parallelisms.mesh import PATIENCE, from_first_rank, start_ranks
from planning.start_checks import check_folder
from training.shared_statistics import load_or_count
from verification.baselines import FIT_SAMPLES, MIN_FIT_SAMPLES, AnalysesForecast, fit_baselines, persistence
from verification.climatology import (
    Climatology,
    ClimatologyForecast,
    compute_climatology,
    open_climatology,
    stored_fingerprint,
)
from verification.evaluation import Evaluation, evaluate_together, write_scores
from verification.evaluation_options import (
    check_options,
    choose_regions,
    common_variables,
    open_forecasts,
    scorecard_reference,
)
from verification.matching import ForecastFields
from verification.plots import describe, plot_evaluation
from verification.rollout import Forecast
from verification.score_tables import lead_hours, select, table, variable_names
from verification.scorecard import build_scorecard, write_scorecard

logger = logging.getLogger("rossby")
ALL_CELLS = 0.9999  # fraction of the area that counts as all of it: the rest is rounding
OWN_FOLDER = "evaluation"  # in the run's folder, in which nothing else is changed


def parse_options(argv: list[str]) -> tuple[Namespace, list[str]]:
    """Return the checked options of this program, and the arguments of the configuration."""
    options, rest = split_options(argv, OPTIONS)
    check_options(options)
    return options, rest


def find_climatology(
    options: Namespace, folder: Path, selection: Selection, access: Access
) -> Climatology | None:
    """Return the climatology named or computed, None if none is wanted."""
    if not options.climatology and "climatology" not in options.baselines:
        logger.info("no climatology and no ACC: neither --baselines nor --climatology names one")
        return None
    path = options.climatology or own_climatology(folder, selection)
    return open_climatology(path, access)


def own_climatology(folder: Path, selection: Selection) -> str:
    """Return the path of the climatology of the training period, which all ranks compute once."""
    archive, target = selection.archive, folder / OWN_FOLDER / "climatology.zarr"
    fingerprint = fingerprint_of(archive, selection.variables, selection.train, selection.step)
    if from_first_rank(lambda: stored_fingerprint(target)) == fingerprint:
        return str(target)
    logger.info("computing the climatology of the training period, once, into %s", target)
    unfinished = target.with_suffix(".incomplete")
    compute_climatology(archive, selection.variables, selection.train, str(unfinished), fingerprint)

    def rename() -> None:
        shutil.rmtree(target, ignore_errors=True)
        os.replace(unfinished, target)

    from_first_rank(rename)
    return str(target)


def build_baselines(
    names: list[str],
    times: np.ndarray,
    leads: np.ndarray,
    selection: Selection,
    variables: Sequence[str],
    climatology: Climatology | None,
    config: Config,
) -> dict[str, ForecastFields]:
    """Return the baselines from initial dates (n,) at the leads (L,) that are whole steps and have a truth:
    to fit other leads would read years of analyses for nothing. Climatology is included if it has all valid
    times and at least one of the scored `variables`.
    """
    archive, step, now = selection.archive, selection.step, np.timedelta64(0, "s")
    leads = leads[(leads > now) & (leads % step == now)]
    valid_times = times[:, None] + leads  # (n, L)
    there = np.isin(valid_times, archive.times).any(axis=0)
    leads, valid_times = leads[there], valid_times[:, there]
    build = partial(AnalysesForecast, archive, selection.variables, times, leads, step)
    baselines: dict[str, ForecastFields] = {}
    if "persistence" in names:
        baselines["persistence"] = build(persistence)
    if "damped_persistence" in names:
        forecast, number = fit_damping(selection, (leads // step).tolist(), config)
        if number < MIN_FIT_SAMPLES:
            logger.warning("damped persistence is fitted on %d dates: too few to rely on", number)
        baselines["damped persistence"] = build(forecast)
    if "climatology" in names and climatology:
        lacking = [time for time in np.unique(valid_times) if not climatology.has(time)]
        if not {*variables} & {*climatology.variables}:
            logger.info("climatology is no baseline: %s has none of the variables", climatology.path)
        elif lacking:
            number = f"{len(lacking)} valid times, the first {lacking[0]}"
            logger.info("climatology is no baseline: %s lacks %s", climatology.path, number)
        else:
            baselines["climatology"] = ClimatologyForecast(climatology, times, leads)
    return baselines


def fit_damping(selection: Selection, steps: list[int], config: Config) -> tuple[Forecast, int]:
    """Fit damped persistence as train.py does, on the same dates; return it and the number of dates.

    Raises ConfigError for a lead that is longer than the training period.
    """
    archive, variables, folder = selection.archive, selection.variables, config.dump_folder
    area = area_weights(archive.grid.latitude)
    source = Source(archive, variables, selection.train, selection.step, area)
    source = replace(source, dates=sampled_pairs(source, config.data.statistics_dates))
    own = folder / OWN_FOLDER / "statistics.npz"  # the run's are only read
    statistics = stored_statistics(folder / "statistics.npz", source) or load_or_count(own, source)
    samples = selection.samples_by_lead("train", steps, FIT_SAMPLES)
    dataset = FieldDataset(archive, variables, samples)
    mean_field = torch.from_numpy(statistics.mean_field)
    rows, cache = torch.tensor(area, dtype=torch.float32), folder / OWN_FOLDER / "damping.json"
    fitted = fit_baselines(dataset, mean_field, rows, steps, 1, cache, statistics.fingerprint)
    return fitted["damped persistence"], len(samples)


def common_axes(
    forecasts: Mapping[str, ForecastFields], period: tuple[str, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the initial dates in data.test_period (all without one) and the leads above 0, in whole hours,
    that all forecasts have. Raises ConfigError if there are none.
    """
    hour = np.timedelta64(1, "h")
    times, leads = (
        reduce(np.intersect1d, [getattr(each, axis) for each in forecasts.values()])
        for axis in ("times", "leads")
    )
    leads, whole = leads[leads > 0 * hour], leads[(leads > 0 * hour) & (leads % hour == 0 * hour)]
    if len(whole) < len(leads):
        logger.warning("leads that are no whole hours are not scored")
    if not len(times) or not len(whole):
        names = ", ".join(map(repr, forecasts))
        raise ConfigError(f"--forecast: {names} have no initial date and lead in common; score them alone")
    inside = times[is_inside(times, "data.test_period", period)]
    if not len(inside):
        fix = 'score other dates with --forecast.period, or all with --data.test_period "[]"'
        reason = f"no initial date of the forecasts is in it; {fix}"
        raise ConfigError(f"data.test_period = {list(period)}: {reason}")
    return inside, whole


def saved_parts(
    config: Config, options: Namespace, archives: list[Archive], paths: list[str], variables: list[str]
) -> SavedParts | None:
    """Return the saved partial sums of this evaluation, valid for the present state of its files; None if a
    file is not on a disk. archives: of analyses; paths: of forecasts and climatology.
    """

    def key() -> str:
        states = [archive.files_state(variables) for archive in archives]
        if not all(states) or any(map(is_url, paths)):
            return ""
        parts = [to_toml(config), repr(vars(options)), *(state.hex() for state in states)]
        for path in paths:  # a store's metadata are written when it is created, and when forecast.py starts
            files = [Path(path), *(Path(path, name) for name in ("zarr.json", ".zmetadata", ".zattrs"))]
            status = {file: file.stat() for file in files if file.exists()}
            parts += [f"{file} {each.st_mtime_ns} {each.st_size}" for file, each in status.items()]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    folder = config.dump_folder / OWN_FOLDER / "unfinished"
    return SavedParts(folder / name, dist.get_rank()) if (name := from_first_rank(key)) else None


def common_cells(scores: Mapping[str, xr.Dataset]) -> str:
    """Return a line about the scored cells: all that have a truth, or the smallest common fraction."""
    lowest, where = 1.0, ""
    for each in scores.values():
        for variable in variable_names(each):
            area = select(each, "common_area", variable).fillna(1.0).values  # of each lead
            if area.min() < lowest:
                lowest, where = area.min(), f"{variable} at {lead_hours(each)[area.argmin()]} h"
    if lowest > ALL_CELLS:
        return "cells: all that have a truth"
    return f"cells: those that all forecasts have, {lowest:.1%} of the truth's area for {where}, else more"


def print_scores(evaluations: dict[str, Evaluation], target: Path) -> None:
    """Print the tables of RMSE and of ACC, where there is a climatology."""
    scores = {name: evaluation.scores for name, evaluation in evaluations.items()}
    print(table(scores, "rmse", describe(next(iter(evaluations.values())))))
    if "acc" in next(iter(scores.values()))["metric"]:
        print("\n" + table(scores, "acc", "anomaly correlation"))
    print(f"\n{common_cells(scores)}\n\nwritten to {target}")


def run(config: Config, options: Namespace) -> None:
    """Run the whole evaluation on every rank."""
    folder = config.dump_folder
    target = Path(options.output or folder / OWN_FOLDER).expanduser()
    check_folder("--output", target, config.data)
    picks, access = parse_selection(config.data.select), access_of(config.data)
    forecasts = open_forecasts(options.forecast, folder, picks, access)
    dims = {dim for forecast in forecasts.values() for dim in forecast.extra_dimensions}
    selection = open_selection(config.data, config.model.patch_size, (), elsewhere=dims)
    truth = selection.archive
    if options.truth:
        truth = open_archive(options.truth, picks, access, config.data.region)
    variables = common_variables(forecasts, truth, selection.variables)
    if options.truth:
        truth.check(variables)
    period, hour = () if config.forecast.period else config.data.test_period, np.timedelta64(1, "h")
    times, leads = common_axes(forecasts, period)
    grid = reduce(coarser, [each.grid for each in forecasts.values()], truth.grid)
    regions = choose_regions(options.regions, grid)
    if (width := config.data.boundary_width) and not grid.same_as(selection.archive.grid):
        refuse("data.boundary_width", width, "forecasts and truth must be on the grid of data.path then")

    device = start_ranks(PATIENCE)
    climatology = find_climatology(options, folder, selection, access)
    baselines = build_baselines(options.baselines, times, leads, selection, variables, climatology, config)
    compared: dict[str, ForecastFields] = {**forecasts, **baselines}
    against = scorecard_reference(list(compared), len(options.forecast))
    scored = leads[[bool(np.isin(times + lead, truth.times).any()) for lead in leads]]
    paths = [each.path for each in forecasts.values()] + ([climatology.path] if climatology else [])
    saved = saved_parts(config, options, [selection.archive, truth], paths, variables)
    with tqdm(total=len(times), unit="date", disable=dist.get_rank() > 0 or None) as bar:  # on a terminal
        evaluations = evaluate_together(
            compared,
            truth,
            climatology,
            variables=variables,
            lead_hours=(leads // hour).tolist(),
            dates=times,
            grid=grid,
            regions=regions,
            spectra_lead=int(scored[-1] // hour) if len(scored) else None,
            boundary_width=width,
            device=device,
            progress=bar.update,
            saved=saved,
        )

    def report() -> None:
        target.mkdir(parents=True, exist_ok=True)
        write_scores(evaluations, target)
        if against:
            try:
                write_scorecard(build_scorecard(next(iter(evaluations)), against, evaluations), target)
            except DataError as error:
                logger.warning("no scorecard: %s", error)
        plot_evaluation(evaluations, target)
        print_scores(evaluations, target)

    from_first_rank(report)
    if saved and dist.get_rank() == 0:
        saved.remove()
    dist.destroy_process_group()


def main() -> None:
    with one_line_errors():
        options, rest = parse_options(sys.argv[1:])
        config = start(rest, __doc__, check)
        start_logging(os.environ.get("RANK", "0") == "0")
        run(config, options)
    end_process(0)


if __name__ == "__main__":
    main()
