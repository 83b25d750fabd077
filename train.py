"""Trains a weather transformer: data, ranks, statistics, model, loss and optimiser, validation, resume, loop.

    ./run_train.sh --job.config_file train_configs/vit1b.toml --section.key value

Reads from top to bottom; what a chapter uses was made in one before it.
"""

import gc
import logging
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from checkpoints.best import Best
from checkpoints.checkpointer import Checkpointer
from checkpoints.files import check_steps
from checkpoints.initial_weights import Channels, load_initial_weights
from checkpoints.run_state import Progress, RunState, global_batch_size, go_back, resume
from config import Config, start, to_toml
from config_checks import check_machine, check_model
from datasets.conditions import Conditions
from datasets.grid import area_weights
from datasets.loader import FieldDataset, TrainLoader, TrainSampler, cache_if_small
from datasets.normalization import Normalizer, known_empty_dates, load_or_compute
from datasets.selection import evenly_spaced, open_selection
from errors import one_line_errors
from jobs.heartbeat import activity
from jobs.log_setup import start_logging
from jobs.preemption import EXIT_SAVED, Agreement, farewell
from jobs.replica_state import join_replicas
from jobs.replicas import ReplicaLost
from jobs.watchdog import Watchdog
from models.build import build_model
from models.vit import VisionTransformer
from parallelisms.attention_choice import choose_attention
from parallelisms.degrees import resolve_degrees
from parallelisms.float8_choice import choose_float8
from parallelisms.layout_checks import degrees_asked
from parallelisms.mesh import build_mesh, from_first_rank, start_ranks
from parallelisms.parallelize import parallelize
from traces.profiler import Profiler, part_times, span
from training.backward_updates import BackwardUpdates
from training.bad_steps import BadSteps, TrainingDiverged, step_unless
from training.determinism import seed_step, set_determinism
from training.ema import EMA
from training.gradients import LossScaler, clip, total_norm
from training.host_memory import keep_freed_memory
from training.losses import variable_weights
from training.lr_schedules import lr_factor, peak_lr
from training.metrics import Metrics, peak_tflops
from training.objective import Objective
from training.optimizers import build_optimizer, set_lr
from verification.baselines import FIT_SAMPLES, fit_baselines
from verification.rollout import model_forecast
from verification.validation import Scores, Validation

logger = logging.getLogger("rossby")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def train(config: Config, watchdog: Watchdog | None = None) -> None:
    """One run, from the data to the last validation, on every rank. SystemExit: to be started again."""
    data, training, folder = config.data, config.training, config.dump_folder
    watchdog = watchdog or Watchdog(folder, config.comm)
    dtype = DTYPES[training.mixed_precision_param]

    # -- data: before any rank waits for another, so that bad input is one line --------------------
    with one_line_errors():
        check_machine(config)
        lead_hours = config.validation.lead_hours if config.validation.enable else ()
        selection = open_selection(data, config.model.patch_size, lead_hours)
        check_model(config, selection.archive.grid)
        loss_weights = variable_weights(training.variable_weights, len(selection.variables))
        if config.checkpoint.enable:
            check_steps(folder / "checkpoints", training.steps)
    grid, variables = selection.archive.grid, selection.variables
    area = area_weights(grid.latitude)  # (H,)

    # -- ranks -------------------------------------------------------------------------------------
    device = start_ranks(config.comm.backend, config.comm.timeout_seconds)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    degrees = resolve_degrees(num_ranks, **degrees_asked(config.parallelism))
    mesh = build_mesh(device.type, degrees, config.parallelism.axis_order)
    place = config.fault_tolerance
    num_replicas, replica = (place.group_size, place.replica_id) if place.enable else (1, 0)
    dp, dp_rank = degrees.dp * num_replicas, degrees.dp * replica + mesh.dp_rank  # of all replicas
    max_wall_time, minutes = training.max_wall_time, config.checkpoint.interval_minutes
    agreement = Agreement(max_wall_time, minutes, config.comm.timeout_seconds).listen(watchdog)
    set_determinism(training.deterministic, training.tf32)
    keep_freed_memory(device)
    if num_ranks > 1:
        logger.info(f"{num_ranks} ranks\n{mesh.picture()}")
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.toml").write_text(to_toml(config))

    # -- statistics of the training period, and the samples of both periods ------------------------
    leads = sorted(hours // data.step_hours for hours in config.validation.lead_hours)
    dates = np.union1d(selection.train, selection.validation)
    archive = cache_if_small(selection.archive, variables, dates, data.cache_gib)
    counted = evenly_spaced(selection.train, data.statistics_dates)
    cache = folder / "statistics.npz"
    with one_line_errors():
        statistics = from_first_rank(
            lambda: load_or_compute(cache, archive, variables, counted, selection.step, area)
        )
    empty = {
        "train": statistics.empty_dates,
        "validation": from_first_rank(lambda: known_empty_dates(archive, variables, selection.validation)),
    }

    def samples(period: str, offsets: list[int], limit: int = 0) -> FieldDataset:
        with one_line_errors():
            chosen = selection.samples(period, offsets, empty[period])
        if not limit:
            logger.info(selection.describe(period, chosen, empty[period]))
        return FieldDataset(archive, variables, evenly_spaced(chosen, limit))

    train_set = samples("train", [0, 1])

    # -- model: planned on the meta device, cut to this rank's part, then every weight from (seed, name) ---
    conditions = Conditions(list(selection.static.values()), data.forcings, grid).to(device)
    normalizer = Normalizer(statistics, config.model.predict).to(device)
    plan = build_model(config.model, len(variables), conditions.num_channels, grid.shape, grid.periodic)
    num_parameters = sum(p.numel() for p in plan.parameters())
    if config.model.attention_backend == "auto" and isinstance(plan, VisionTransformer):
        with one_line_errors():
            choose_attention(plan, training.local_batch_size, degrees, dtype, device, folder)
    choose_float8(plan, training.local_batch_size, mesh, config.float8, config.compile, dtype, device, folder)
    model = parallelize(
        plan,
        mesh,
        device,
        training.seed,
        config.parallelism,
        config.activation_checkpoint,
        config.compile,
        param_dtype=dtype,
        reduce_dtype=DTYPES[training.mixed_precision_reduce],
        float8=config.float8,
    )
    parameters = dict(model.named_parameters())

    # -- loss and optimiser ------------------------------------------------------------------------
    area_weight = torch.tensor(area, dtype=torch.float32, device=device)  # (H,)
    scales = (area_weight, loss_weights, training.weight_by_change)
    objective = Objective(
        training.loss, plan, model.shards, conditions, normalizer, *scales, training.local_batch_size
    )
    if model.pipeline:
        micro_batches = training.local_batch_size // config.parallelism.pipeline_parallel_microbatch_size
        model.pipeline.schedule(config.parallelism.pipeline_parallel_schedule, micro_batches, objective.share)
    optim, schedule = config.optimizer, config.lr_scheduler
    betas = (optim.beta1, optim.beta2)
    own, kernel = model.own_parameters(), optim.implementation
    optimizer = build_optimizer(own, betas, optim.eps, optim.weight_decay, kernel, optim.state_dtype)
    average = EMA(parameters, training.ema_decay) if training.ema_decay else None
    scaler = LossScaler(enabled=dtype == torch.float16)
    run = RunState(parameters, optimizer, scaler, average, Progress())

    # -- validation: every date of the period, beside what costs nothing ---------------------------
    forecast = model_forecast(model.predict, normalizer, conditions, data.step_hours * 3600)
    validation, baselines = None, {}
    if config.validation.enable and len(selection.validation):
        batch_size = config.validation.local_batch_size
        validation = Validation(
            samples("validation", [0, *leads]),
            leads,
            data.step_hours,
            area_weight,
            batch_size,
            data.num_workers,
            share=(mesh.dp_rank, degrees.dp),
            counts=model.speaks_for_sample,
        )
        mean_field = torch.from_numpy(statistics.mean_field).to(device)  # (V, H, W)
        fitted = samples("train", [0, *leads], limit=FIT_SAMPLES)
        baselines = fit_baselines(fitted, mean_field, area_weight, leads, batch_size)

    def validate(step: int) -> Scores | None:
        if validation is None:
            return None
        model.train(False)
        if checkpointer:
            checkpointer.before_update()  # averages take the place of weights that are still being copied
        # The averages are what gets used.
        with span("validation"), average.in_place() if average else nullcontext():
            scores = validation.run(forecast, baselines, objective.of_fields)
        model.train()
        metrics.write(scores.record(step))
        return scores

    # -- resume: a run that was stopped goes on where its newest complete checkpoint stands --------
    checkpointer, replicas, resumed, progress = None, None, False, run.progress
    bad_steps = BadSteps(training.spike_threshold, training.max_skipped_steps, device)
    with one_line_errors():
        if config.checkpoint.enable:
            mode, keep = config.checkpoint.async_mode, config.checkpoint.keep_latest_k
            checkpointer = Checkpointer(folder / "checkpoints", mode, keep, to_toml(config), asdict(degrees))
            resumed = resume(checkpointer, run)
        if config.checkpoint.initial_load_path and not resumed:
            path, channels = config.checkpoint.initial_load_path, Channels.of(asdict(data))
            load_initial_weights(Path(path), parameters, channels)
            if average:
                average.restart()
        if place.enable:
            replicas = join_replicas(config, num_ranks, run, bad_steps)
        smallest_batch = training.local_batch_size * dp
        progress.global_batch = global_batch_size(training.global_batch_size, smallest_batch, progress)
        accumulation = progress.global_batch // smallest_batch
        updates, share = None, objective.share
        if optim.in_backward:
            updates = BackwardUpdates(optimizer, parameters.values(), bad_steps, share, accumulation)
            share = updates.share
    step, global_batch = progress.step, progress.global_batch
    peak = peak_lr(optim.lr, optim.lr_scaling, optim.lr_reference_batch_size, global_batch, optim.lr_max)
    sampler = TrainSampler(
        len(train_set), training.seed, training.local_batch_size, accumulation, dp_rank, dp
    )
    loader = TrainLoader(
        train_set, sampler, data.num_workers, data.prefetch_factor, pin=device.type == "cuda"
    )
    metrics = Metrics(
        folder,
        resume_step=step,
        steps=training.steps,
        tensorboard=config.metrics.enable_tensorboard,
        flops_per_sample=3 * plan.flops() / num_replicas,  # that a replica computes
        peak=config.metrics.peak_tflops or peak_tflops(device),
    )
    name, patience = config.checkpoint.keep_best, config.validation.early_stop_patience
    best = Best(folder, name, patience) if name else None
    profiler = Profiler(folder / "traces", config.profiling, rank, step)
    logger.info(
        f"{num_parameters / 1e6:.1f} M parameters, {plan.describe()}, {plan.in_channels} channels in, "
        f"{len(variables)} out; global batch {global_batch} = {training.local_batch_size} x {dp} ranks "
        f"x {accumulation}; from step {step} to {training.steps} on {device}"
    )

    # -- the loop: nothing here waits for the device, except on logging and saving steps -----------
    gc.disable()  # collected on a schedule: at random it stops one rank while the others wait
    batches = loader.iterate(progress.samples, progress.rollbacks)
    model.train()
    part_times.start(device)
    metrics.start_interval()
    first, stop = step + 1, ""
    with profiler, agreement:
        while step < training.steps and not stop and not (best and best.exhausted):
            activity.chapter("train", step + 1)
            if replicas:
                with span("replicas"):
                    there = replicas.begin_step()
                if there != step:  # the others went on without this replica, which now has their state
                    step, batches = there, loader.iterate(progress.samples, progress.rollbacks)
                    first = step + 1
                    model.after_update()
                    metrics.start_interval()
                    continue
            step += 1
            last = step == training.steps
            step_loss, data_seconds, data_bytes = torch.zeros((), device=device), 0.0, 0
            seed_step(training.seed, step, dp_rank)
            factor = lr_factor(
                step, training.steps, schedule.warmup_steps, schedule.decay_type, schedule.min_lr_factor
            )
            set_lr(optimizer, peak * factor)
            if updates:
                updates.begin(step, checkpointer)
            for micro_batch in range(accumulation):
                with span("data"):
                    started = time.perf_counter()
                    fields, times = next(batches)  # (B, 2, V, H, W), (B,)
                    data_seconds += time.perf_counter() - started
                    data_bytes += fields.nbytes
                    fields, times = (x.to(device, non_blocking=True) for x in (fields, times))
                pieces, exchange = objective.cut(fields, times), micro_batch == accumulation - 1
                loss = model.forward_backward(*pieces, share, scaler.factor / accumulation, exchange)
                step_loss += loss / accumulation
            if replicas:
                with span("replicas"):
                    replicas.average(step_loss, parameters.values())
                    committed = replicas.commit()
                if not committed:  # a replica was lost: the same samples again, with those that are left
                    step, batches = progress.step, loader.iterate(progress.samples, progress.rollbacks)
                    model.zero_grad()
                    continue
            with span("optimizer"):
                if updates:  # made in backward
                    grad_norm = updates.grad_norm
                else:
                    scaler.unscale(parameters.values())
                    grad_norm = total_norm(parameters.values(), model.pipeline_group)
                    clip(parameters.values(), training.max_norm, grad_norm)
                    bad = bad_steps.judge(step, step_loss, grad_norm, overflow_is_normal=scaler.enabled)
                    if checkpointer:
                        checkpointer.before_update()  # the save in flight has its copies
                if scaler.good(grad_norm):
                    if not updates:
                        step_unless(bad, optimizer)
                    model.after_update()
                    if average:
                        average.update(step)
                model.zero_grad()
            progress.step, progress.samples = step, progress.samples + global_batch
            present = replicas.present if replicas else 1
            metrics.count(global_batch * present // num_replicas, data_seconds, data_bytes)

            # -- on a schedule, or agreed on by all ranks at the step before -----------------------
            if step == first:
                watchdog.first_step_done(agreement.group, mesh.groups)
            between = config.validation.interval and step % config.validation.interval == 0
            with span("agree"):
                decision = agreement.at(checkpointer.last_seconds if checkpointer else 0.0)
            stop, due = decision.stop, last or step % config.checkpoint.interval == 0
            due = due or bool(best and between)  # it may be the best: written while it is validated
            # One replica saves; one that is told to stop does not know who else is.
            saving = checkpointer and (stop or (due or decision.save) and (not replicas or replicas.is_first))
            if last or saving or step % config.metrics.log_freq == 0:
                if bad_steps.too_many(step, last):  # of all ranks alike
                    go_back(None if replicas else checkpointer, run, bad_steps)
                    step, batches = progress.step, loader.iterate(progress.samples, progress.rollbacks)
                    metrics.go_back(step)
                    continue
            if last or step % config.metrics.log_freq == 0:
                with span("log"):
                    dist.all_reduce(step_loss)
                    metrics.log_step(step, step_loss / degrees.dp, grad_norm, peak * factor, device)
            if step % training.gc_freq == 0:
                gc.collect(1)
            if saving and checkpointer and not (bad_steps.now and not stop):
                with span("checkpoint"):
                    checkpointer.save(step, run.tensors())
                agreement.saved()
                metrics.start_interval()
            if between and not last and not stop:
                if scores := validate(step):
                    logger.info(f"step {step}, {scores.table()}")
                    if best and checkpointer:
                        best.judge(step, scores.record(step), checkpointer)
                metrics.start_interval()
            profiler.step()
    gc.enable()
    activity.chapter("end", step)
    if replicas:
        replicas.close() if stop else replicas.finish()
    if checkpointer:
        checkpointer.close()

    # -- at the end: scores and plots, unless it is to be started again ----------------------------
    if stop:
        if rank == 0:
            print(f"rossby: {farewell(stop, step, checkpointer is not None)}", file=sys.stderr)
        metrics.close()
        leave(watchdog, agreement)
        sys.exit(EXIT_SAVED)
    scores = validate(step)
    if best and checkpointer and scores:
        best.judge(step, scores.record(step), checkpointer)
    metrics.close()
    if validation and scores and config.validation.plots:
        with average.in_place() if average else nullcontext():
            example = validation.last_date(forecast)  # on all ranks: the model may take all of them
        if rank == 0:
            from verification.plots import plot_run  # here, because it takes half a second of every start

            plot_run(folder, scores, example, grid, selection.static.get("land_sea_mask"))
    if rank == 0:
        print(f"\n{scores.table() if scores else 'nothing was validated'}\n\nthe run's folder: {folder}")
    leave(watchdog, agreement)


def leave(watchdog: Watchdog, agreement: Agreement) -> None:
    """All ranks together."""
    watchdog.stop()
    agreement.close()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    config = start(sys.argv[1:])
    is_first = os.environ.get("RANK", "0") == "0"
    start_logging(is_first)
    with Watchdog(config.dump_folder, config.comm) as watchdog:
        try:
            train(config, watchdog)
        except (TrainingDiverged, ReplicaLost) as error:
            if is_first:
                print(f"rossby: {error}", file=sys.stderr)
            sys.exit(1)


if __name__ == "__main__":
    main()
