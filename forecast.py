"""Forecasts from a checkpoint and initial dates, written to a Zarr store in WeatherBench2's schema.

    .venv/bin/python forecast.py --job.config_file train_configs/demo.toml --forecast.num_steps 12
    .venv/bin/python -m jobs.torchrun --nproc-per-node 8 forecast.py ...     several processes
    .venv/bin/python forecast.py ... --export FOLDER                           the model for other programs

The same command, started again, computes what is missing. Exit codes: 0 done, 1 done but some forecasts blew
up or had no input, 2 bad input. More: docs/forecasting.md.
"""

import sys

from jobs.signals import end_at_signals

if __name__ == "__main__":
    end_at_signals()

from command_line import answer_early, split_options, start
from training.config_checks import check

OPTIONS = dict(export="")
if __name__ == "__main__":
    answer_early(__doc__, check, OPTIONS)  # before torch is imported, which takes seconds

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from checkpoints.checkpointer import expect_checkpoint
from checkpoints.export import OneStep, check_target, export_model
from checkpoints.weights import Trained, checkpoint_source, find_trained, load_weights
from config import Compile, Config, Float8
from datasets.channels import Channels
from datasets.loader import LaterFields
from datasets.selection import Selection, initial_dates, open_without_periods
from datasets.statistics import refuse_fills
from errors import ConfigError, DataError, end_process, one_line_errors, refuse, without_secrets
from jobs.log_setup import start_logging
from models.lora import merge_lora
from models.noise import noise_keys
from parallelisms.mesh import PATIENCE, from_all_ranks, from_first_rank, mesh_of, start_ranks
from planning.start_checks import check_folder, check_machine, check_model
from training.assembly import Assembly, Fields, assemble
from training.process_settings import set_determinism
from verification.rollout import rollout
from verification.stores import COMPUTED, DIVERGED, NO_ANALYSIS, NOT_COMPUTED, ForecastStore

logger = logging.getLogger("rossby")
Pair = tuple[int, int]  # numbers of an initial date and a member: one forecast
MAX_LINES = 20  # reports of failed forecasts; an untrained model blows up from every date

# Limits above which a state has blown up: standard deviations from the mean, and a multiple of the initial
# state's. Rain in a single cell can be 300 standard deviations from the mean, a wind never 20; an unbounded
# forecast exceeds both within some steps.
LARGEST_DEVIATIONS, LARGEST_GROWTH = 100.0, 10.0


def forecast(config: Config) -> int:
    """Compute the forecasts of one store, on all ranks; return the exit code."""
    settings, data = config.forecast, config.data
    target = Path(settings.path or config.dump_folder / "forecast.zarr")
    if target.suffix == ".nc":
        fix = "name a store, FILE.zarr, and convert that by xarray: docs/forecasting.md has the line"
        refuse("forecast.path", settings.path, f"forecasts are Zarr stores; {fix}")

    # -- analyses and initial dates: before any rank waits for another, so that bad input is one line --------
    check_folder("the folder of forecast.path" if settings.path else "job.dump_folder", target.parent, data)
    selection = open_data(config)
    chosen = initial_dates(
        selection, settings.period or data.test_period or data.validation_period, settings.interval_hours
    )

    # -- ranks, model, weights -----------------------------------------------------------------------
    assembly, trained = load_model(config, selection)
    model, device, channels = assembly.model, assembly.model.device, assembly.normalizer.channels
    known = None  # fields of later states, which then do not change
    if channels.is_known and not settings.persist_forcings:
        known = LaterFields(selection.archive, selection.variables[channels.known])
    rank, dp_rank, dp = dist.get_rank(), model.mesh.dp_rank, model.mesh.degrees.dp

    # -- the store: made once, then written to by every rank -----------------------------------------
    leads = [lead * data.step_hours for lead in range(1, settings.num_steps + 1)]
    variables, archive = Channels.of(data).predicted, selection.archive
    units = {name: archive.units(name) for name in variables}
    dates, members = archive.times[chosen[:, 0]], settings.num_members
    store = ForecastStore(target, variables, archive.grid, dates, leads, members, units)
    from_first_rank(lambda: store.create(about(config, store, trained, selection, chosen)))

    # -- what is missing, in batches that are the same on any number of ranks and after a restart ------------
    is_finished = from_first_rank(store.status).min(axis=1) > NOT_COMPUTED  # (n, M)
    pairs, size = list(np.ndindex(is_finished.shape)), config.validation.local_batch_size
    batches = [pairs[i : i + size] for i in range(0, len(pairs), size)]
    missing = [batch for batch in batches if not all(is_finished[pair] for pair in batch)]
    logger.info(
        f"{target}: {len(pairs)} forecasts of {leads[-1]} h, "
        f"{is_finished.sum()} of them finished; {len(missing)} batches for {dp} x {device}"
    )

    # -- the loop: all ranks take equally many batches, as they may share the model -------------------------
    rounds = -(-len(missing) // dp)
    names: dict[Pair, str] = {}  # variables that caused the failure of a forecast of this start
    bar = tqdm(total=rounds * settings.num_steps, unit="step", disable=rank > 0 or None)  # on a terminal
    for number in range(dp_rank, rounds * dp, dp):
        batch = missing[min(number, len(missing) - 1)]
        mine = number < len(missing) and model.is_sample_leader
        # The windows from which the batch starts (B, h V, H, W), NaN where missing, and their dates (B,).
        states = chosen[[date for date, _ in batch]]  # (B, h), the newest first
        analyses = {row: archive.read(row, selection.variables) for row in np.unique(states).tolist()}
        for row, fields in analyses.items():
            refuse_fills(fields, selection.variables, archive.times[row], archive.path)
        stacked = [np.concatenate([analyses[row] for row in window]) for window in states.tolist()]
        start = torch.from_numpy(np.stack(stacked))
        times = torch.from_numpy(archive.times[states[:, 0]].astype(np.int64))
        target_store = store if mine else None
        status, causes = forecast_batch(assembly, known, config, batch, start, times, target_store, bar)
        if mine:
            store.wait()
            for pair, of_leads, cause in zip(batch, status, causes, strict=True):
                store.finish(pair[0], pair[1], of_leads)
                names[pair] = cause
    bar.close()

    # -- at the end: what went wrong, of this start and of those before it ---------------------------
    names = {pair: text for of_rank in from_all_ranks(names) for pair, text in of_rank.items()}
    status, problems = from_first_rank(store.status), {}
    for pair in pairs:
        of_leads, cause = status[pair[0], :, pair[1]].tolist(), names.get(pair, "")
        if NO_ANALYSIS in of_leads:
            problems[pair] = f"the analysis has no value of {cause or 'a variable'}"
        elif DIVERGED in of_leads:
            problems[pair] = f"blew up at {leads[of_leads.index(DIVERGED)]} h{': ' * bool(cause)}{cause}"
    if rank == 0:
        for (date, member), problem in list(problems.items())[:MAX_LINES]:
            which = f", member {member}" if members > 1 else ""
            print(f"rossby: forecast from {dates[date]}{which}: {problem}", file=sys.stderr)
        if problems:
            number = f"{len(problems)} of {len(pairs)} forecasts"
            print(f"rossby: {number} went wrong; the others are good", file=sys.stderr)
        print(f"\n{len(pairs) - len(problems)} forecasts: {target}")
    dist.barrier()
    dist.destroy_process_group()
    return 1 if problems else 0


def open_data(config: Config) -> Selection:
    """Open the analyses to start from; the training dates may be missing. Raises ConfigError, DataError."""
    check_machine(config)
    expect_checkpoint(*checkpoint_source(config))  # before weather is simulated
    selection = open_without_periods(config.data, config.model.patch_size)
    check_model(config, selection.archive.grid)
    return selection


def load_model(config: Config, selection: Selection) -> tuple[Assembly, Trained]:
    """Join the ranks, and load this rank's part of the trained model."""
    device = start_ranks(PATIENCE)
    mesh = mesh_of(config.parallelism, device)
    set_determinism(config.training.deterministic)
    trained = find_trained(config, selection)
    fields = Fields.of(selection, trained.statistics)
    assembly = assemble(config, fields, mesh, device, for_training=False)
    load_weights(trained, assembly.model.parameters)
    assembly.model.after_update()  # float8 scales are those of the weights
    assembly.model.train(False)
    return assembly, trained


def about(
    config: Config, store: ForecastStore, trained: Trained, selection: Selection, chosen: np.ndarray
) -> dict[str, Any]:
    """Return everything that determines the values of a store, except the layout (last digits).

    chosen (n, h): indices of the windows that forecasts start from.
    """
    dates, archive = store.dates.astype("datetime64[s]"), selection.archive
    # Of the constant fields, and of the first, middle and last state.
    some = [int(chosen[i, 0]) for i in (0, len(chosen) // 2, -1)]
    fields = [*(archive.read(date, selection.variables) for date in some), *selection.static.values()]
    checksum = crc32(b"".join(np.ascontiguousarray(field).tobytes() for field in fields))
    content = {
        **trained.identity,
        "data.path": without_secrets(config.data.path),
        "data.select": list(config.data.select),
        "states": f"CRC-32 {checksum:08x}",
        "variables": list(store.variables),
        "dates": f"{len(dates)} from {dates[0]} to {dates[-1]} (CRC-32 {crc32(dates.tobytes()):08x})",
        "leads": list(store.leads),
        "num_members": store.num_members,
        "local_batch_size": config.validation.local_batch_size,
        "precision": config.training.mixed_precision_param,
    }
    if Channels.of(config.data).forcing:
        content["persist_forcings"] = config.forecast.persist_forcings
    if config.model.noise_dim:
        content["seed"] = config.training.seed
    return content


@torch.no_grad()
def forecast_batch(
    assembly: Assembly,
    known: LaterFields | None,
    config: Config,
    batch: Sequence[Pair],
    start: Tensor,
    times: Tensor,
    store: ForecastStore | None,
    bar: tqdm,
) -> tuple[np.ndarray, list[str]]:
    """Write all leads from the windows `start` (B, h V, H, W) at `times` (B,); return their status (B, L),
    and for each forecast the variables that caused its failure, "" for none.

    Nothing waits for the device before the last lead, except the store when it falls behind.
    """
    normalizer, device = assembly.normalizer, assembly.model.device
    # -- initial states; one with a missing value is not forecast, and its forecast stays NaN
    empty = ~torch.isfinite(start).flatten(2).any(-1)  # (B, h V)
    empty[:, normalizer.channels.hidden] = False  # the model does not see these
    rows = (~empty.any(1)).nonzero().flatten().tolist()  # the others stay NaN in the store
    pairs = [batch[row] for row in rows]
    start, times = start.to(device), times.to(device)
    sizes = normalizer.normalize(normalizer.newest(start))[0].abs().amax(dim=(-2, -1))  # (B, V)
    limit, of_leads = (LARGEST_GROWTH * sizes).clamp(min=LARGEST_DEVIATIONS), list[Tensor]()
    members = torch.tensor([member for _, member in batch], device=device)
    keys = noise_keys(config.training.seed, 0, times, members)
    # -- all leads: the device runs ahead of this loop, which only queues its work
    windows = rollout(
        assembly.model.predict,
        normalizer,
        assembly.conditions,
        config.data.step_hours * 3600,
        start,
        times,
        config.forecast.num_steps,
        keys,
        known,
    )
    for lead, window in enumerate(windows):
        state = normalizer.newest(window)
        # amax keeps NaN, and no comparison with it is true
        of_leads.append(~(state.abs().amax(dim=(-2, -1)) <= limit))  # (B, V)
        if store:
            store.write(pairs, lead, normalizer.denormalize(state[rows])[:, normalizer.predicted])
        bar.update()
    # -- a forecast has diverged from its first implausible lead on, because later ones start from that
    broken = torch.stack(of_leads, dim=1).cpu().numpy()  # (B, L, V), waits for the device
    status = np.where(np.logical_or.accumulate(broken.any(-1), axis=1), DIVERGED, COMPUTED)
    status[empty.any(1).numpy()] = NO_ANALYSIS
    names, causes = np.array(normalizer.channels.window), []
    for lacks, by_lead in zip(empty.numpy(), broken, strict=True):
        at_first_bad_lead = by_lead[by_lead.any(-1).argmax()]  # (V,)
        causes.append(", ".join(names[np.flatnonzero(lacks if lacks.any() else at_first_bad_lead)]))
    return status, causes


def export(config: Config, target: Path) -> None:
    """Write the trained model as a folder, with adapters merged into their matrices."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(f"--export {target}: start one process; each of several has a part of the model")
    check_folder("--export", target.parent, config.data)
    check_target(target)
    # Plain float32, because every machine can run it; kernels and precisions depend on the machine.
    model = replace(config.model, attention_backend="sdpa")
    training = replace(config.training, mixed_precision_param="float32")
    plain = replace(config, model=model, training=training, compile=Compile(), float8=Float8())
    selection = open_data(plain)
    assembly, trained = load_model(plain, selection)
    merge_lora(assembly.meta_model)
    step = OneStep(assembly.meta_model, assembly.normalizer, assembly.conditions).cpu()
    try:
        export_model(target, step, trained, selection, config)
    except OSError as error:
        raise DataError(f"--export {target}: {error}; remove what is there, and start again") from None
    dist.destroy_process_group()
    print(target)


def main() -> None:
    with one_line_errors():
        options, rest = split_options(sys.argv[1:], OPTIONS)
        config = start(rest, __doc__, None)
        start_logging(os.environ.get("RANK", "0") == "0")
        if options.export:
            export(config, Path(options.export).expanduser())
            return
        try:
            code = forecast(config)
        except OSError as error:  # a full disk, a file of the analyses that is damaged
            print(f"rossby: {error}; start the same command again to continue", file=sys.stderr)
            code = 1
    end_process(code)


if __name__ == "__main__":
    main()
