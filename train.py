"""Trains a weather transformer: data, ranks, statistics, model, loss and optimiser, validation, resume, loop.

    ./run_train.sh --job.config_file train_configs/vit1b.toml --section.key value

Reads from top to bottom; what a chapter uses was made in one before it.
"""

import gc
import logging
import os
import sys
import time
import warnings
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from config import Config, one_line_errors, start, to_toml
from config_checks import check_machine, check_model, degrees_asked
from datasets.conditions import Conditions
from datasets.grid import area_weights
from datasets.loader import FieldDataset, TrainLoader, TrainSampler, cache_if_small
from datasets.normalization import Normalizer, known_empty_dates, load_or_compute
from datasets.selection import evenly_spaced, open_selection
from models.build import build_model
from parallelisms.degrees import resolve_degrees
from parallelisms.mesh import build_mesh, from_first_rank, start_ranks
from parallelisms.parallelize import parallelize
from training.checkpoint import Checkpointer, check_steps, resume, run_state
from training.determinism import set_determinism
from training.divergence import FiniteWatch, TrainingDiverged
from training.ema import EMA
from training.gradients import LossScaler, clip, total_norm
from training.losses import (
    change_weights,
    mse_loss,
    mse_weights,
    relative_l2_loss,
    relative_l2_weights,
    sum_of_squares,
    variable_weights,
)
from training.lr_schedules import lr_factor, peak_lr
from training.metrics import Metrics, peak_tflops
from training.optimizers import build_optimizer, set_lr
from training.profiler import Profiler, span
from verification.baselines import fit_baselines
from verification.plots import plot_loss, plot_maps, plot_rmse
from verification.rollout import model_forecast
from verification.validation import Scores, Validation

logger = logging.getLogger("rossby")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BASELINE_SAMPLES = 400  # training samples that damped persistence is fitted on, evenly spaced


def train(config: Config) -> None:
    """One run, from the data to the last validation, on every rank."""
    data, training, folder = config.data, config.training, config.dump_folder
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
    set_determinism(training.seed, mesh.dp_rank, training.deterministic, training.tf32)
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
    loss_weights = loss_weights.to(device)  # (V,)
    if training.weight_by_change:
        loss_weights = loss_weights * change_weights(normalizer.change_scale.flatten())

    def weights_of(target: Tensor, mask: Tensor) -> Tensor:
        """(B, V, H, W): what each squared error of a normalised state weighs in the loss."""
        if training.loss == "relative_l2":
            return relative_l2_weights(mask, target)
        return mse_weights(mask, area_weight, loss_weights)

    def loss_of(output: Tensor, target: Tensor, weights: Tensor) -> Tensor:
        """The share of the loss that a piece of a batch has; shares add up."""
        squares = sum_of_squares(output, target, weights)  # (B,)
        if training.loss == "relative_l2":
            return relative_l2_loss(squares, training.local_batch_size, model.shards.sum_over_pieces)
        return mse_loss(squares)

    def cut(fields: Tensor, times: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What this rank has of a batch (B, 2, V, H, W): the model's input, its expected output, and
        weights.
        """
        values, mask = normalizer.normalize(fields)
        state, target = values[:, 0], values[:, 1]
        weights = weights_of(target, mask[:, 1]) * normalizer.output_scale.square()
        return (
            model.shards.cut_input(plan.to_pieces(conditions.append(state, times))),
            model.shards.cut_output(plan.to_pieces(normalizer.expected_output(state, target))),
            model.shards.cut_output(plan.to_pieces(weights, with_zeros=True)),
        )

    if model.pipeline:
        micro_batches = training.local_batch_size // config.parallelism.pipeline_parallel_microbatch_size
        model.pipeline.schedule(config.parallelism.pipeline_parallel_schedule, micro_batches, loss_of)
    optim, schedule = config.optimizer, config.lr_scheduler
    betas = (optim.beta1, optim.beta2)
    optimizer = build_optimizer(
        model.own_parameters(), betas, optim.eps, optim.weight_decay, optim.implementation
    )
    average = EMA(parameters, training.ema_decay) if training.ema_decay else None
    scaler = LossScaler(enabled=dtype == torch.float16)
    smallest_batch = training.local_batch_size * degrees.dp
    global_batch = max(training.global_batch_size, smallest_batch)
    accumulation = global_batch // smallest_batch
    peak = peak_lr(optim.lr, optim.lr_scaling, optim.lr_reference_batch_size, global_batch, optim.lr_max)

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
        fitted = samples("train", [0, *leads], limit=BASELINE_SAMPLES)
        baselines = fit_baselines(fitted, mean_field, area_weight, leads, batch_size)

    def physical_loss(predicted: Tensor, truth: Tensor) -> Tensor:
        """The loss of one sample of whole physical fields (1, V, H, W)."""
        target, mask = normalizer.normalize(truth)
        squares = sum_of_squares(normalizer.normalize(predicted)[0], target, weights_of(target, mask))
        return squares.sqrt().mean() if training.loss == "relative_l2" else mse_loss(squares)

    def validate(step: int) -> Scores | None:
        if validation is None:
            return None
        model.train(False)
        with average.in_place() if average else nullcontext():  # the averages are what gets used
            scores = validation.run(forecast, baselines, physical_loss)
        model.train()
        metrics.write(scores.record(step))
        return scores

    # -- resume: a run that was stopped goes on where its newest complete checkpoint stands --------
    step, checkpointer = 0, None
    if config.checkpoint.enable:
        background, keep = config.checkpoint.async_mode == "async", config.checkpoint.keep_latest_k
        checkpointer = Checkpointer(folder / "checkpoints", background, keep, to_toml(config))
        with one_line_errors():
            step = resume(checkpointer, parameters, optimizer, scaler, average, device)
    sampler = TrainSampler(
        len(train_set), training.seed, training.local_batch_size, accumulation, mesh.dp_rank, degrees.dp
    )
    loader = TrainLoader(
        train_set, sampler, data.num_workers, data.prefetch_factor, pin=device.type == "cuda"
    )
    metrics = Metrics(
        folder,
        resume_step=step,
        steps=training.steps,
        tensorboard=config.metrics.enable_tensorboard,
        flops_per_sample=3 * plan.flops(),
        peak=config.metrics.peak_tflops or peak_tflops(device),
    )
    profiler = Profiler(folder / "traces", config.profiling, rank, step)
    watch = FiniteWatch(step, device)
    logger.info(
        f"{num_parameters / 1e6:.1f} M parameters, "
        f"{plan.describe()}, {plan.in_channels} channels in, {len(variables)} out; "
        f"global batch {global_batch} = {training.local_batch_size} x {degrees.dp} ranks x {accumulation}; "
        f"from step {step} to {training.steps} on {device}"
    )

    # -- the loop: nothing here waits for the device, except on logging and saving steps -----------
    gc.disable()  # collected on a schedule: at random it stops one rank while the others wait
    batches = loader.iterate(step)
    model.train()
    metrics.start_interval()
    with profiler:
        while step < training.steps:
            step += 1
            last = step == training.steps
            step_loss, data_seconds = torch.zeros((), device=device), 0.0
            for micro_batch in range(accumulation):
                with span("data"):
                    started = time.perf_counter()
                    fields, times = next(batches)  # (B, 2, V, H, W), (B,)
                    data_seconds += time.perf_counter() - started
                    fields, times = (x.to(device, non_blocking=True) for x in (fields, times))
                pieces, exchange = cut(fields, times), micro_batch == accumulation - 1
                share = model.forward_backward(*pieces, loss_of, scaler.factor / accumulation, exchange)
                step_loss += share / accumulation
            with span("optimizer"):
                factor = lr_factor(
                    step, training.steps, schedule.warmup_steps, schedule.decay_type, schedule.min_lr_factor
                )
                set_lr(optimizer, peak * factor)
                scaler.unscale(parameters.values())
                grad_norm = total_norm(parameters.values(), model.pipeline_group)
                clip(parameters.values(), training.max_norm, grad_norm)
                if scaler.good(grad_norm):
                    optimizer.step()
                    model.after_update()
                    if average:
                        average.update(step)
                model.zero_grad()
            # fp16: a gradient that overflows is what the scaler is there for; a loss that does is not.
            watch.see(*((step_loss,) if scaler.enabled else (step_loss, grad_norm)))
            metrics.count(global_batch, data_seconds)

            # -- on a schedule ---------------------------------------------------------------------
            if last or step % config.metrics.log_freq == 0:
                watch.check(step, checkpointer)
                dist.all_reduce(step_loss)
                metrics.log_step(step, step_loss / degrees.dp, grad_norm, peak * factor, device)
            if step % training.gc_freq == 0:
                gc.collect(1)
            if checkpointer and (last or step % config.checkpoint.interval == 0):
                with span("checkpoint"):
                    watch.check(step, checkpointer)  # NaN must not become the newest checkpoint
                    checkpointer.save(step, run_state(parameters, optimizer, scaler, average, step, device))
                metrics.start_interval()
            if config.validation.interval and step % config.validation.interval == 0 and not last:
                if scores := validate(step):
                    logger.info(f"step {step}, {scores.table()}")
                metrics.start_interval()
            profiler.step()
    gc.enable()
    if checkpointer:
        checkpointer.wait()

    # -- at the end: scores and plots --------------------------------------------------------------
    scores = validate(step)
    metrics.close()
    if validation and scores and config.validation.plots:
        with average.in_place() if average else nullcontext():
            example = validation.last_date(forecast)  # on all ranks: the model may take all of them
        if rank == 0:
            plot_loss(folder / "metrics.jsonl", folder / "plots/loss.png")
            plot_rmse(scores, folder / "plots/rmse.png")
            land = selection.static.get("land_sea_mask")
            plot_maps(*example, scores.lead_hours[0], grid, land, folder / "plots/maps.png")
    if rank == 0:
        print(f"\n{scores.table() if scores else 'nothing was validated'}\n\nthe run's folder: {folder}")
    dist.barrier()
    dist.destroy_process_group()


def start_logging(is_first: bool) -> None:
    """One line a message from rank 0; other ranks speak of warnings and errors only."""
    logging.basicConfig(format="%(asctime)s  %(message)s", datefmt="%H:%M:%S")
    logging.getLogger().setLevel(logging.INFO if is_first else logging.WARNING)
    # Said by every rank, known, and nothing to be done about: gloo has no all-to-all, a mesh of two axes is
    # reduced one axis after the other, and nobody writes into what FSDP's modules return.
    for name in ("_redistribute", "_collective_utils"):
        logging.getLogger(f"torch.distributed.tensor.{name}").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    warnings.filterwarnings("ignore", message=".*all_gather_tensor_autograd.* is deprecated")


def main() -> None:
    config = start(sys.argv[1:])
    is_first = os.environ.get("RANK", "0") == "0"
    start_logging(is_first)
    try:
        train(config)
    except TrainingDiverged as error:
        if is_first:
            print(f"rossby: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
