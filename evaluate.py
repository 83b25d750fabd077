"""Scores of any forecasts, compared with persistence, damped persistence and climatology.

    .venv/bin/python evaluate.py --job.config_file train_configs/demo.toml
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

from jobs.signals import end_at_signals

if __name__ == "__main__":
    end_at_signals()

from command_line import answer_early, split_options, start
from training.config_checks import check

OPTIONS = dict(
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
import time
from argparse import Namespace
from collections.abc import Sequence
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
from datasets.archive import is_inside, open_archive
from datasets.grid import Grid, coarser
from datasets.options import parse_selection
from datasets.regrid import Regridder
from datasets.remote import Access
from datasets.selection import open_selection
from errors import ConfigError, DataError, end_process, one_line_errors, refuse
from jobs.log_setup import start_logging
from parallelisms.mesh import PATIENCE, from_first_rank, start_ranks
from planning.start_checks import check_folder
from training.run_folder import lock_folder
from verification.baselines import build_baselines
from verification.climatology import compute_climatology, open_climatology
from verification.matching import ForecastFields
from verification.plots import describe, plot_evaluation
from verification.scores import REGIONS, RegionMeans
from verification.scores_by_date import Evaluation, evaluate
from verification.stores import NOT_COMPUTED, StoredForecast, open_forecast
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
    picks = parse_selection(config.data.select)
    access = Access.of(config.data.storage_options, config.data.path)
    forecasts = open_forecasts(options.forecast, folder, picks, access)
    dims = {dim for forecast in forecasts.values() for dim in forecast.extra_dimensions}
    selection = open_selection(config.data, config.model.patch_size, (), elsewhere=dims)
    truth = selection.archive
    if options.truth:
        truth = open_archive(options.truth, picks, access, config.data.region)
    first, *further = forecasts
    variables = [v for v in selection.variables if v in forecasts[first].variables and v in truth.variables]
    if not variables:
        reason = f"the forecast has {', '.join(forecasts[first].variables)}"
        refuse("data.variables", selection.variables, f"{reason}; name some of them that the truth has")
    for name in further:
        if not {*variables} & {*forecasts[name].variables}:
            reason = f"it has none of the variables that {first!r} has, {', '.join(variables)}"
            raise ConfigError(f"--forecast {name!r}: {reason}; score it alone")
    if options.truth:
        truth.check(variables)
    # The initial dates and the leads above 0, in whole hours, that all forecasts have; of the dates those in
    # forecast.period, else in data.test_period, all without either.
    common = reduce(np.intersect1d, [forecast.times for forecast in forecasts.values()])
    ahead = reduce(np.intersect1d, [forecast.leads for forecast in forecasts.values()])
    ahead = ahead[ahead > 0 * hour]
    leads = ahead[ahead % hour == 0 * hour]
    if len(leads) < len(ahead):
        logger.warning("leads that are no whole hours are not scored")
    if not len(common) or not len(leads):
        names = ", ".join(map(repr, forecasts))
        raise ConfigError(f"--forecast: {names} have no initial date and lead in common; score them alone")
    key, period = "forecast.period", config.forecast.period
    if not period:
        key, period = "data.test_period", config.data.test_period
    times = common[is_inside(common, key, period)]
    if not len(times):
        fix = 'score other dates with --forecast.period, or all with --data.test_period "[]"'
        span = f"no initial date of the forecasts is in it, which are from {common[0]} to {common[-1]}"
        raise ConfigError(f"{key} = {list(period)}: {span}; {fix}")
    with_truth = leads[[np.isin(times + lead, truth.times).any() for lead in leads]] // hour
    if options.lead and options.lead not in with_truth:
        choice = with_truth.tolist()
        raise ConfigError(f"--lead {options.lead}: not one of the leads with a truth, {choice} hours")
    detail_lead = options.lead or (int(with_truth[-1]) if len(with_truth) else None)
    grid = reduce(coarser, [forecast.grid for forecast in forecasts.values()], truth.grid)
    regions = choose_regions(options.regions, grid)
    if (width := config.data.boundary_width) and not grid.same_as(selection.archive.grid):
        refuse("data.boundary_width", width, "forecasts and truth must be on the grid of data.path then")

    # -- ranks, climatology, baselines --------------------------------------------------------------------
    device, locks = start_ranks(PATIENCE), list[IO[str]]()
    from_first_rank(lambda: locks.append(lock_output(target)))
    climatology = None
    if options.climatology:
        climatology = open_climatology(options.climatology, access)
    elif "climatology" in options.baselines:
        # That of the training period, kept in the run's folder. One evaluation computes it, others that
        # started meanwhile with another --output wait for it.
        path, waiting = folder / OWN_FOLDER / "climatology.zarr", list[IO[str]]()
        if target != path.parent:
            from_first_rank(lambda: waiting.append(lock_output(path.parent, wait=True)))
        compute_climatology(selection.archive, selection.variables, selection.train, path)
        waiting.clear()
        climatology = open_climatology(str(path), access)
    else:
        logger.info("no climatology and no ACC: neither --baselines nor --climatology names one")
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
    candidates = [*further, "damped persistence", "persistence", "climatology"]
    against = next((name for name in candidates if name in compared), "")
    land = selection.land()
    if land is not None and not grid.same_as(selection.archive.grid):
        land = Regridder(selection.archive.grid, grid)(torch.from_numpy(land)).numpy()
    scored = ", ".join(f"{name} ({f.checkpoint})" if f.checkpoint else name for name, f in forecasts.items())
    from_first_rank(lambda: report(evaluation, against, land, target, scored))
    locks.clear()
    dist.destroy_process_group()


def open_forecasts(
    texts: list[str], folder: Path, picks: dict[str, str], access: Access
) -> dict[str, StoredForecast]:
    """Return the forecasts by name. Logs the checkpoint of each forecast of Rossby's, and warns if the run
    has a newer one. Raises ConfigError if a path does not exist or a name occurs twice.
    """
    forecasts: dict[str, StoredForecast] = {}
    for text in texts or [f"model={folder / 'forecast.zarr'}"]:
        is_path = "://" in text.partition("=")[0] or Path(text).exists()  # which may have a "=" in it
        name, path = ("", text) if is_path else text.partition("=")[::2]
        name, path = (name, path) if path else ("", name)
        name = name or Path(path).name.removesuffix(".zarr").removesuffix(".nc")
        if "://" not in path and not Path(path).exists():
            raise ConfigError(f"--forecast {path!r}: does not exist; run forecast.py, or name another")
        if plain_name(name) in map(plain_name, (*BASELINES, *forecasts)):
            reason = "its files would have the names of a baseline's or another one's; rename it, NAME=PATH"
            raise ConfigError(f"--forecast {name!r}: {reason}")
        # -- what the forecast says of itself, and whether the run has trained on since
        stored = forecasts[name] = open_forecast(path, picks, access)
        if stored.status is not None and (left := int((stored.status == NOT_COMPUTED).any(1).sum())):
            reason = f"the forecasts from {left} of its {len(stored.times)} initial dates are not finished"
            logger.warning("--forecast %r: %s, not scored; start forecast.py again", path, reason)
        if stored.checkpoint:
            logger.info("%s: forecasts of %s, from %s", name, stored.checkpoint, path)
        steps = complete_steps(folder / "checkpoints") if Path(path).parent == folder else []
        newest = step_folder(folder, steps[-1]).name if steps else ""
        if re.fullmatch(r"step-\d{8}", stored.checkpoint) and newest > stored.checkpoint:
            fix = "remove it and start forecast.py again to score the newer one"
            logger.warning("%s is of %s, and the run has %s; %s", path, stored.checkpoint, newest, fix)
    return forecasts


def plain_name(name: str) -> str:
    """Return the name of a forecast as a part of a file's name."""
    return re.sub(r"[^\w.+-]", "_", name)


def choose_regions(wanted: Sequence[str], grid: Grid) -> list[str]:
    """Return the regions with points on the grid, the globe first, because tables use the first region.

    Logs the others. Raises ConfigError if no region is left.
    """
    weights = RegionMeans(grid, list(REGIONS)).weight.tolist()
    on_grid = [name for name, weight in zip(REGIONS, weights, strict=True) if weight > 0]
    chosen = [name for name in wanted if name in on_grid]
    if not chosen:
        reason = f"no point of this grid is in it; there are {', '.join(on_grid)}"
        raise ConfigError(f"--regions {','.join(wanted)}: {reason}")
    if outside := [name for name in wanted if name not in chosen]:
        logger.info("--regions: left out, as no point of this grid is in it: %s", ", ".join(outside))
    return sorted(chosen, key=lambda name: name != "global")


def lock_output(folder: Path, wait: bool = False) -> IO[str]:
    """Lock a folder until the returned file is closed. Raises ConfigError if it is locked, or waits."""
    while True:
        with suppress(ConfigError):
            return lock_folder(folder)
        if not wait:
            reason = "another evaluate.py writes there; wait for it, or choose another --output"
            raise ConfigError(f"{folder}: {reason}")
        logger.info("waiting for another evaluate.py in %s", folder)
        time.sleep(1)


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
    spectra = {f"spectra_{plain_name(name)}.nc": energy for name, energy in evaluation.spectra.items()}
    files = [*spectra, "rmse.png", "maps.png", "spectra.png", "scorecard.csv", "scorecard.html"]
    scores = scores.assign_attrs(scored=scored, files="\n".join(files))
    for name, dataset in ({stored.name: scores} | spectra).items():
        dataset.to_netcdf(target / name, engine="h5netcdf")
    if against:
        try:
            card = build_scorecard(evaluation.by_date, first, against)
            write_scorecard(card, target)
            logger.info("scorecard: %s", card.attrs["by_chance"])
        except DataError as error:
            logger.warning("no scorecard: %s", error)
    plot_evaluation(evaluation, land, target)

    # All cells that have a truth are scored, or the smallest common fraction is named.
    cells, smallest = "cells: all that have a truth", ALL_CELLS
    for name in variable_names(scores):
        area = select(scores, "common_area", name).fillna(1.0).min("forecast")
        if float(area.min()) <= smallest:
            smallest, hours = float(area.min()), lead_hours(scores)[int(np.argmin(area.values))]
            where = f"{smallest:.1%} of the truth's area for {name} at {hours} h"
            cells = f"cells: those that all forecasts have, {where}, else more"
    tables = map(as_text, tables_of(scores, describe(evaluation)))
    print("\n\n".join([*tables, cells, f"scored: {scored}; written to {target}"]))


def main() -> None:
    with one_line_errors():
        options, rest = parse_options(sys.argv[1:])
        config = start(rest, __doc__, None)
        start_logging(os.environ.get("RANK", "0") == "0")
        run(config, options)
    end_process(0)


if __name__ == "__main__":
    main()
