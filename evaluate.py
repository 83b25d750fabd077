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
--lead HOURS            of maps and spectra (default: the longest lead that has a truth)
--output FOLDER         scores and spectra as files; plots (default: evaluation/ in the run's folder)

Configuration keys set data, period and variables. The same command, started again, continues with the dates
that are not scored yet. Exit codes: 0, 2 bad input.
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
    lead=0,
    output="",
)
if __name__ == "__main__":
    answer_early(__doc__, check, OPTIONS)  # before torch is imported, which takes seconds

import logging
import os
import re
import shutil
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import IO

import numpy as np
import torch
import torch.distributed as dist
import xarray as xr
from tqdm import tqdm

from checkpoints.files import complete_steps, step_folder
from config import RANDOM, Config
from datasets.archive import open_archive
from datasets.dates import is_inside
from datasets.grid import Grid, coarser
from datasets.options import parse_selection
from datasets.regrid import Regridder
from datasets.remote import Access
from datasets.selection import Selection, access_of, open_selection
from errors import ConfigError, DataError, end_process, one_line_errors, refuse
from jobs.log_setup import start_logging
from parallelisms.mesh import PATIENCE, from_first_rank, start_ranks
from planning.start_checks import check_folder
from training.run_folder import lock_folder
from verification.baselines import (
    FIT_SAMPLES,
    MIN_FIT_SAMPLES,
    AnalysesForecast,
    ClimatologyForecast,
    fit_damping,
    mean_of_dates,
)
from verification.climatology import (
    Climatology,
    compute_climatology,
    fingerprint_of,
    open_climatology,
    stored_fingerprint,
)
from verification.forecast_layouts import StoredForecast, open_forecast
from verification.matching import ForecastFields
from verification.plots import describe, plot_evaluation
from verification.scores import REGIONS, regions_on
from verification.scores_by_date import Evaluation, evaluate
from verification.stores import NOT_COMPUTED
from verification.tables import (
    as_text,
    build_scorecard,
    lead_hours,
    select,
    tables_of,
    variable_names,
    write_scorecard,
)

logger = logging.getLogger("rossby")
BASELINES = ("persistence", "damped_persistence", "climatology")
ALL_CELLS = 0.9999  # fraction of the area that counts as all of it: the rest is rounding
OWN_FOLDER = "evaluation"  # in the run's folder, in which nothing else is changed
TABLE = "scores_by_date.zarr"


def parse_options(argv: list[str]) -> tuple[Namespace, list[str]]:
    """Return the checked options of this program, and the arguments of the configuration."""
    options, rest = split_options(argv, OPTIONS)
    for key, valid in (("baselines", BASELINES), ("regions", tuple(REGIONS))):
        names = [name for name in dict.fromkeys(getattr(options, key).split(",")) if name]
        setattr(options, key, names)
        for name in names:
            if name not in valid:
                raise ConfigError(f"--{key} {name!r}: valid: {', '.join(valid)}")
    return options, rest


def run(config: Config, options: Namespace) -> None:
    """Run the whole evaluation on every rank."""
    # -- forecasts, truth, and what they have in common: before any rank waits for another ----------------
    folder, hour = config.dump_folder, np.timedelta64(1, "h")
    target = Path(options.output or folder / OWN_FOLDER).expanduser()
    check_folder("--output", target, config.data)
    if config.data.path == RANDOM:
        refuse("data.path", RANDOM, "noise has no forecasts that could be scored; name analyses")
    picks, access = parse_selection(config.data.select), access_of(config.data)
    forecasts = open_forecasts(options.forecast, folder, picks, access)
    scored = describe_steps(forecasts, folder)
    dims = {dim for forecast in forecasts.values() for dim in forecast.extra_dimensions}
    selection = open_selection(config.data, config.model.patch_size, (), elsewhere=dims)
    truth = selection.archive
    if options.truth:
        truth = open_archive(options.truth, picks, access, config.data.region)
    variables = common_variables(forecasts, truth.variables, selection.variables)
    if options.truth:
        truth.check(variables)
    times, leads = common_axes(forecasts, config)
    has_truth = [bool(np.isin(times + lead, truth.times).any()) for lead in leads]
    detail_lead = int(leads[has_truth][-1] // hour) if any(has_truth) else None
    if options.lead:
        if options.lead not in (choice := (leads[has_truth] // hour).tolist()):
            raise ConfigError(f"--lead {options.lead}: not one of the leads with a truth, {choice} hours")
        detail_lead = options.lead
    grid = reduce(coarser, [forecast.grid for forecast in forecasts.values()], truth.grid)
    regions = choose_regions(options.regions, grid)
    if (width := config.data.boundary_width) and not grid.same_as(selection.archive.grid):
        refuse("data.boundary_width", width, "forecasts and truth must be on the grid of data.path then")

    # -- ranks, climatology, baselines --------------------------------------------------------------------
    device, locks = start_ranks(PATIENCE), list[IO[str]]()
    from_first_rank(lambda: locks.append(lock_output(target)))
    climatology = find_climatology(
        options, folder, selection, access, is_locked=target == folder / OWN_FOLDER
    )
    baselines = build_baselines(options.baselines, times, leads, selection, variables, climatology)
    compared: dict[str, ForecastFields] = {**forecasts, **baselines}

    # -- the loop over dates and leads --------------------------------------------------------------------
    with tqdm(total=len(times), unit="date", disable=dist.get_rank() > 0 or None) as bar:  # on a terminal
        evaluation = evaluate(
            compared,
            truth,
            climatology,
            variables=variables,
            lead_hours=(leads // hour).tolist(),
            dates=times,
            grid=grid,
            regions=regions,
            detail_lead=detail_lead,
            boundary_width=width,
            device=device,
            progress=bar.update,
            path=target / TABLE,
        )

    # -- files, plots, tables -----------------------------------------------------------------------------
    # The scorecard compares with the second forecast, or with the hardest baseline.
    candidates = [*list(forecasts)[1:], "damped persistence", "persistence", "climatology"]
    against = next((name for name in candidates if name in compared), "")
    from_first_rank(lambda: report(evaluation, against, land_on(selection, grid), target, scored))
    locks.clear()
    dist.destroy_process_group()


# -- what is scored ------------------------------------------------------------------------------------


def open_forecasts(
    texts: list[str], folder: Path, picks: dict[str, str], access: Access
) -> dict[str, StoredForecast]:
    """Return the forecasts by name. Raises ConfigError if a path does not exist or a name occurs twice."""
    forecasts: dict[str, StoredForecast] = {}
    for text in texts or [f"model={folder / 'forecast.zarr'}"]:
        name, _, path = text.rpartition("=")
        name = name or Path(path).name.removesuffix(".zarr").removesuffix(".nc")
        if "://" not in path and not Path(path).exists():
            raise ConfigError(f"--forecast {path!r}: does not exist; run forecast.py, or name another")
        if plain_name(name) in map(plain_name, (*BASELINES, *forecasts)):
            reason = "its files would have the names of a baseline's or another one's; rename it, NAME=PATH"
            raise ConfigError(f"--forecast {name!r}: {reason}")
        stored = forecasts[name] = open_forecast(path, picks, access)
        if stored.status is not None and (left := int((stored.status == NOT_COMPUTED).any(1).sum())):
            reason = f"the forecasts from {left} of its {len(stored.times)} initial dates are not finished"
            logger.warning("--forecast %r: %s, not scored; start forecast.py again", path, reason)
    return forecasts


def plain_name(name: str) -> str:
    """Return the name of a forecast as a part of a file's name."""
    return re.sub(r"[^\w.+-]", "_", name)


def describe_steps(forecasts: Mapping[str, StoredForecast], folder: Path) -> str:
    """Log the checkpoint of each forecast of Rossby's, and warn if the run has a newer one; return a text
    with the names of all forecasts.
    """
    texts, steps = [], complete_steps(folder / "checkpoints")
    for name, forecast in forecasts.items():
        checkpoint = str(forecast.identity.get("checkpoint", ""))
        texts.append(f"{name} ({checkpoint})" if checkpoint else name)
        if checkpoint:
            logger.info("%s: forecasts of %s, from %s", name, checkpoint, forecast.path)
        is_of_run = Path(forecast.path).parent == folder and re.fullmatch(r"step-\d{8}", checkpoint)
        if is_of_run and steps and step_folder(folder, steps[-1]).name > checkpoint:
            newer = step_folder(folder, steps[-1]).name
            fix = "remove it and start forecast.py again to score the newer one"
            logger.warning("%s is of %s, and the run has %s; %s", forecast.path, checkpoint, newer, fix)
    return ", ".join(texts)


def common_variables(
    forecasts: Mapping[str, ForecastFields], of_truth: Sequence[str], wanted: list[str]
) -> list[str]:
    """Return the configured variables in both the first forecast and the truth. Raises ConfigError if there
    are none, or another forecast has none of them.
    """
    first, *further = forecasts.items()
    names = [name for name in wanted if name in first[1].variables and name in of_truth]
    if not names:
        reason = f"the forecast has {', '.join(first[1].variables)}; name some of them that the truth has"
        raise ConfigError(f"data.variables = {wanted}: {reason}")
    for name, forecast in further:
        if not {*names} & {*forecast.variables}:
            reason = f"it has none of the variables that {first[0]!r} has, {', '.join(names)}"
            raise ConfigError(f"--forecast {name!r}: {reason}; score it alone")
    return names


def common_axes(forecasts: Mapping[str, ForecastFields], config: Config) -> tuple[np.ndarray, np.ndarray]:
    """Return the initial dates and the leads above 0, in whole hours, that all forecasts have. The dates are
    those in forecast.period, else in data.test_period, all without either. Raises ConfigError for none.
    """
    hour = np.timedelta64(1, "h")
    times, leads = (
        reduce(np.intersect1d, [getattr(forecast, axis) for forecast in forecasts.values()])
        for axis in ("times", "leads")
    )
    leads, whole = leads[leads > 0 * hour], leads[(leads > 0 * hour) & (leads % hour == 0 * hour)]
    if len(whole) < len(leads):
        logger.warning("leads that are no whole hours are not scored")
    if not len(times) or not len(whole):
        names = ", ".join(map(repr, forecasts))
        raise ConfigError(f"--forecast: {names} have no initial date and lead in common; score them alone")
    key, period = "forecast.period", config.forecast.period
    if not period:
        key, period = "data.test_period", config.data.test_period
    inside = times[is_inside(times, key, period)]
    if not len(inside):
        fix = 'score other dates with --forecast.period, or all with --data.test_period "[]"'
        span = f"no initial date of the forecasts is in it, which are from {times[0]} to {times[-1]}"
        raise ConfigError(f"{key} = {list(period)}: {span}; {fix}")
    return inside, whole


def choose_regions(wanted: Sequence[str], grid: Grid) -> list[str]:
    """Return the regions with points on the grid, the globe first, because tables use the first region.

    Logs the others. Raises ConfigError if no region is left.
    """
    on_grid = regions_on(grid)
    chosen = [name for name in wanted if name in on_grid]
    if not chosen:
        reason = f"no point of this grid is in it; there are {', '.join(on_grid)}"
        raise ConfigError(f"--regions {','.join(wanted)}: {reason}")
    if outside := [name for name in wanted if name not in chosen]:
        logger.info("--regions: left out, as no point of this grid is in it: %s", ", ".join(outside))
    return sorted(chosen, key=lambda name: name != "global")


# -- climatology and baselines -------------------------------------------------------------------------


def lock_output(folder: Path) -> IO[str]:
    """Lock a folder for this evaluation until the returned file is closed. Raises ConfigError."""
    try:
        return lock_folder(folder)
    except ConfigError:
        reason = "another evaluate.py writes there; wait for it, or choose another --output"
        raise ConfigError(f"{folder}: {reason}") from None


def find_climatology(
    options: Namespace, folder: Path, selection: Selection, access: Access, is_locked: bool
) -> Climatology | None:
    """Return the climatology named, or that of the training period, which all ranks compute once; None if
    none is wanted. is_locked: this evaluation has the lock of the folder in which it is kept.
    """
    if not options.climatology and "climatology" not in options.baselines:
        logger.info("no climatology and no ACC: neither --baselines nor --climatology names one")
        return None
    if options.climatology:
        return open_climatology(options.climatology, access)
    archive, target = selection.archive, folder / OWN_FOLDER / "climatology.zarr"
    fingerprint = from_first_rank(lambda: fingerprint_of(archive, selection.variables, selection.train))
    locks = list[IO[str]]()

    def wait_for_lock() -> None:
        while not is_locked and not locks:  # of an evaluation with another --output
            with suppress(ConfigError):
                locks.append(lock_folder(target.parent))
            if not locks:
                logger.info("waiting for another evaluate.py in %s", target.parent)
                time.sleep(1)

    from_first_rank(wait_for_lock)
    if from_first_rank(lambda: stored_fingerprint(target)) != fingerprint:
        logger.info("computing the climatology of the training period, once, into %s", target)
        unfinished = target.with_suffix(".incomplete")
        compute_climatology(archive, selection.variables, selection.train, str(unfinished), fingerprint)

        def rename() -> None:
            shutil.rmtree(target, ignore_errors=True)
            os.replace(unfinished, target)

        from_first_rank(rename)
    locks.clear()
    return open_climatology(str(target), access)


def build_baselines(
    names: list[str],
    times: np.ndarray,
    leads: np.ndarray,
    selection: Selection,
    variables: Sequence[str],
    climatology: Climatology | None,
) -> dict[str, ForecastFields]:
    """Return the baselines from initial dates (n,) at the leads (L,) that are whole steps and have a truth:
    to fit other leads would read years of analyses for nothing. Climatology is included if it has all valid
    times and at least one of the scored `variables`; damped persistence decays to it if it has all of them.
    """
    archive, step, now = selection.archive, selection.step, np.timedelta64(0, "s")
    leads = leads[(leads > now) & (leads % step == now)]
    valid_times = times[:, None] + leads  # (n, L)
    there = np.isin(valid_times, archive.times).any(axis=0)
    leads, valid_times = leads[there], valid_times[:, there]
    variables = [name for name in selection.variables if name in variables]
    persistence = AnalysesForecast(archive, variables, times, leads)
    baselines: dict[str, ForecastFields] = {"persistence": persistence} if "persistence" in names else {}
    if "damped_persistence" in names:
        # Fitted on the dates of train.py, towards the climatology of each date or the mean of these dates.
        samples = selection.samples_by_lead("train", (leads // step).tolist(), FIT_SAMPLES)
        if len(samples) < MIN_FIT_SAMPLES:
            logger.warning("damped persistence is fitted on %d dates: too few to rely on", len(samples))
        fitted_on = archive.times[np.unique(samples[samples >= 0])]
        dates = np.unique(np.concatenate([times, valid_times.ravel(), fitted_on]))
        decays_to_climatology = (
            climatology
            and climatology.grid.same_as(archive.grid)
            and {*variables} <= {*climatology.variables}
            and all(map(climatology.has, dates))
        )
        if climatology and decays_to_climatology:
            normal, text = climatology.field, "the climatology of the date"
        else:
            mean = mean_of_dates(archive, variables, np.unique(samples[:, 0]))
            rows = {name: row for row, name in enumerate(variables)}
            normal = lambda time, names: mean[[rows[name] for name in names]]  # noqa: E731
            text = "the mean of the training period"
        logger.info("damped persistence decays to %s; fitted on %d dates", text, len(samples))
        factors = fit_damping(archive, variables, samples, normal)
        baselines["damped persistence"] = AnalysesForecast(
            archive, variables, times, leads, factors, normal, persistence.read
        )
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


# -- results -------------------------------------------------------------------------------------------


def land_on(selection: Selection, grid: Grid) -> np.ndarray | None:
    """Return the land-sea mask (H, W) of the data on a grid, None if there is none."""
    land = selection.land()
    if land is None or grid.same_as(selection.archive.grid):
        return land
    return Regridder(selection.archive.grid, grid)(torch.from_numpy(land)).numpy()


def report(evaluation: Evaluation, against: str, land: np.ndarray | None, target: Path, scored: str) -> None:
    """Write scores, scorecard, spectra and plots; print tables. scored: names and checkpoints."""
    # Of an earlier evaluation, as far as this program wrote them: scores.nc has their names.
    stored = target / "scores.nc"
    if stored.exists():
        with suppress(OSError, ValueError), xr.open_dataset(stored, engine="h5netcdf") as earlier:
            for name in str(earlier.attrs.get("files", "")).split("\n"):
                if name and name == Path(name).name:
                    (target / name).unlink(missing_ok=True)
    scores, first = evaluation.scores, str(evaluation.scores["forecast"].values[0])
    spectra = {f"spectra_{plain_name(name)}.nc": each for name, each in evaluation.spectra.items()}
    files = [*spectra, "rmse.png", "maps.png", "spectra.png", "scorecard.csv", "scorecard.html"]
    scores = scores.assign_attrs(scored=scored, files="\n".join(files))
    scores.to_netcdf(stored, engine="h5netcdf")
    for name, each in spectra.items():
        each.to_netcdf(target / name, engine="h5netcdf")
    if against:
        try:
            card = build_scorecard(evaluation.by_date, first, against)
            write_scorecard(card, target)
            logger.info("scorecard: %s", card.attrs["by_chance"])
        except DataError as error:
            logger.warning("no scorecard: %s", error)
    plot_evaluation(evaluation, land, target)

    about = describe(evaluation)
    texts = [f"{title}\n{as_text(frame)}" for title, frame in tables_of(scores, about).items()]
    # All cells that have a truth are scored, or the smallest common fraction is named.
    areas = {
        name: select(scores, "common_area", name).fillna(1.0).min("forecast")
        for name in variable_names(scores)
    }
    smallest = min(areas, key=lambda name: float(areas[name].min()))
    lowest, cells = float(areas[smallest].min()), "cells: all that have a truth"
    if lowest <= ALL_CELLS:
        where = f"{smallest} at {lead_hours(scores)[int(areas[smallest].values.argmin())]} h"
        cells = (
            f"cells: those that all forecasts have, {lowest:.1%} of the truth's area for {where}, else more"
        )
    print("\n\n".join([*texts, cells, f"scored: {scored}; written to {target}"]))


def main() -> None:
    with one_line_errors():
        options, rest = parse_options(sys.argv[1:])
        config = start(rest, __doc__, check)
        start_logging(os.environ.get("RANK", "0") == "0")
        run(config, options)
    end_process(0)


if __name__ == "__main__":
    main()
