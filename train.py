"""Train a weather transformer.

    ./run_train.sh --job.config_file train_configs/vit1b.toml --section.key value

`train` reads from top to bottom: data, ranks, samples and model, resume, reporting, loop, end.
"""

import sys

from command_line import answer_early, start
from jobs.slurm import set_rank_from_slurm
from training.config_checks import check

if __name__ == "__main__":
    set_rank_from_slurm()
    answer_early(__doc__, check)  # help and bad input, before the seconds that torch takes to import

import gc
import logging
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from checkpoints.initial_weights import start_from
from config import Config
from errors import EXIT_SAVED, FAILED, RunFailed, end_process, one_line_errors, print_message
from jobs.heartbeat import activity
from jobs.preemption import Agreement, Decision, exit_message
from jobs.watchdog import Watchdog
from parallelisms.mesh import mesh_of, start_ranks
from planning.out_of_memory import watched_run
from planning.start_checks import open_checked
from traces.profiler import Profiler, part_times, span
from training.assembly import Fields, assemble, build_objective, build_run_state, build_update
from training.batches import build_batches
from training.best import Best
from training.determinism import seed_step, set_determinism
from training.due import Schedule, due_at
from training.host_memory import keep_freed_memory
from training.metrics import Metrics, output_summary, peak_tflops
from training.run_folder import RunFolder
from training.samples import Samples
from training.state import global_batch_of, resume, roll_back
from training.step import train_step
from training.validator import Validator

logger = logging.getLogger("rossby")


def train(config: Config, watchdog: Watchdog | None = None) -> None:
    """Train on this rank, from opening the data to the last validation. Exits with 75 after an early stop."""
    training, folder = config.training, config.dump_folder
    watchdog = watchdog or Watchdog(folder, config.comm)

    # -- data, before any rank waits for another, so that bad input is one line
    selection = watchdog.selection = open_checked(config)

    # -- ranks
    device = start_ranks(config.comm.timeout_seconds)
    is_first = dist.get_rank() == 0
    mesh = mesh_of(config.parallelism, device)
    degrees = mesh.degrees
    limits = (training.max_wall_time, config.checkpoint.interval_minutes, config.comm.timeout_seconds)
    agreement = Agreement(*limits).listen(watchdog)
    set_determinism(training.deterministic, training.tf32)
    keep_freed_memory(device)
    if degrees.world > 1:
        logger.info(f"{degrees.world} ranks\n{mesh.picture()}")
    run_folder = RunFolder(config, selection)  # from here on no other run writes into it

    # -- samples and statistics, model, loss, and the state that a checkpoint contains
    samples = Samples(selection, config.data, folder, run_folder.trained)
    train_set = samples.dataset("train", range(1, 1 + training.states_ahead))
    fields = Fields.of(selection, samples.statistics)
    assembly = assemble(config, fields, mesh, device, folder)
    model, meta_model = assembly.model, assembly.meta_model
    objective = build_objective(config, assembly, samples.area)
    run = build_run_state(config, model, objective.replay)
    progress, bad_steps = run.progress, run.bad_steps

    # -- resume from the newest complete checkpoint, or start from the weights of another run
    checkpointer = run_folder.open_checkpoints(samples.statistics, asdict(degrees))
    if not resume(checkpointer, run) and config.checkpoint.initial_load_path:
        start_from(Path(config.checkpoint.initial_load_path), run.parameters, config)
        run.restart_average()
    global_batch = global_batch_of(training, training.local_batch_size * degrees.dp, progress)
    update = build_update(config, model, run, checkpointer, objective.loss_part, global_batch)
    batches = build_batches(train_set, config, run, (mesh.dp_rank, degrees.dp), global_batch, device)

    # -- reporting; all errors of input have been raised before
    run_folder.begin(progress.step, asdict(degrees))
    activity.step, watchdog.owns_folder = progress.step, True
    if is_first:
        watchdog.write_status(None)
    metrics = Metrics(
        folder,
        resume_step=progress.step,
        steps=training.steps,
        settings=config.metrics,
        flops_per_pass=training.members * meta_model.flops(),
        peak=config.metrics.peak_tflops or peak_tflops(device),
        readers=config.data.num_workers,
    )
    validator = Validator(config, samples, assembly, objective, run, checkpointer, metrics)
    name, patience = config.checkpoint.keep_best, config.validation.early_stop_patience
    best = Best(folder, name, patience) if name else None
    profiler = Profiler(folder / "traces", config.profiling, dist.get_rank(), progress.step)
    logger.info(
        f"{assembly.num_parameters / 1e6:.1f} M parameters, {meta_model.describe()}, "
        f"{meta_model.in_channels} channels in, {len(selection.variables)} out; global batch "
        f"{global_batch.at(progress.step + 1)} = {training.local_batch_size} x {degrees.dp} ranks x "
        f"{len(batches)}; from step {progress.step} to {training.steps} on {device}"
    )

    # -- the loop, which waits for the device only on logging and saving steps
    schedule = Schedule(
        training.steps,
        log=config.metrics.log_freq,
        save=config.checkpoint.interval if config.checkpoint.enable else 0,
        validate=config.validation.interval,
        keeps_best=best is not None,
    )
    gc.disable()  # run on a schedule: at random times it would stop one rank while the others wait
    model.train()
    part_times.start(device)
    metrics.start_interval()
    decision = Decision()
    with profiler, agreement:
        while progress.step < training.steps and not decision.stop and not (best and best.exhausted):
            activity.start_phase("train", progress.step + 1)
            step = progress.step + 1
            seed_step(training.seed, step, mesh.dp_rank)
            result = train_step(step, batches, objective, model, update)
            progress.advance(batches.samples)
            metrics.count(progress.global_batch, batches)
            watchdog.step_done(agreement.group, mesh.groups)
            with span("agree"):
                decision = agreement.at(checkpointer.last_seconds)
            due = due_at(step, schedule, decision.save, bool(decision.stop))
            if due.check and bad_steps.too_many(step, due.last):
                roll_back(checkpointer, run)
                metrics.rollback(progress.step)
                continue
            assembly.fingerprints.compare(step, due.save)
            if due.log:
                with span("log"):
                    dist.all_reduce(result.loss)
                    metrics.log_step(step, result.loss / degrees.dp, result.grad_norm, update, device)
                    checkpointer.poll()
            if due.collect:
                gc.collect(1)
            if due.save and (decision.stop or not bad_steps.now):
                with span("checkpoint"):
                    checkpointer.save(step, run.state_dict())
                agreement.saved()
                metrics.start_interval()
            if due.validate and (scores := validator.scores(step)):
                logger.info(f"step {step}, {scores.table()}")
                if best:
                    best.judge(step, scores.record(step), checkpointer)
                metrics.start_interval()
            profiler.step()
    gc.enable()
    activity.start_phase("end", progress.step)
    unsaved = checkpointer.finish(progress.step, run.state_dict())

    # -- scores and plots, unless the run is to be started again
    if decision.stop:
        metrics.close()
        message = exit_message(decision.stop, progress.step, checkpointer.saves)
        return leave(watchdog, agreement, run_folder, unsaved, EXIT_SAVED, message)
    scores = validator.scores(progress.step, last=True)
    if best and scores:
        best.judge(progress.step, scores.record(progress.step), checkpointer)
    metrics.close()
    if is_first:
        print(f"\n{scores.table() if scores else 'nothing was validated'}\n\n{output_summary(folder)}")
    leave(watchdog, agreement, run_folder, unsaved)


def leave(
    watchdog: Watchdog,
    agreement: Agreement,
    run_folder: RunFolder,
    unsaved: str,
    code: int = 0,
    message: str = "done",
) -> None:
    """End the run on all ranks together with an exit code. Raises RunFailed if a checkpoint is `unsaved`."""
    watchdog.stop()
    agreement.close()
    if dist.get_rank() == 0:
        watchdog.write_status(FAILED if unsaved else code, unsaved or message)
        if code and not unsaved:
            print_message(message)
    dist.barrier()
    run_folder.release()
    dist.destroy_process_group()
    if unsaved:
        raise RunFailed(unsaved)
    if code:
        end_process(code)


def main() -> None:
    with one_line_errors():
        config = start(sys.argv[1:], __doc__, check)
        with watched_run(config) as watchdog:
            train(config, watchdog)


if __name__ == "__main__":
    main()
