"""Train a weather transformer.

    ./run_train.sh --job.config_file train_configs/vit1b.toml --section.key value

`train` reads from top to bottom: data, ranks, samples and model, resume, reporting, loop, end.
"""

import sys

from jobs.signals import end_at_signals, end_with_trainer

if __name__ == "__main__":
    end_at_signals(trains=True)
elif __name__ == "__mp_main__":
    end_with_trainer()  # torch's checkpoint process imports this file, for seconds, before all else

from command_line import answer_early, start
from training.config_checks import check

if __name__ == "__main__":
    answer_early(__doc__, check)  # help and bad input, before torch is imported, which takes seconds

import gc
import logging
from dataclasses import asdict

import torch.distributed as dist

from config import Config
from datasets.grid import area_weights
from datasets.loader import FieldDataset
from errors import EXIT_SAVED, FAILED, RunFailed, end_process, one_line_errors, print_message
from jobs.heartbeat import activity, span
from jobs.preemption import Agreement
from jobs.watchdog import Watchdog
from parallelisms.mesh import cpu_group, mesh_of, start_ranks
from planning.start_checks import open_checked, plan_here, run_with_watchdog
from training.assembly import Fields, assemble
from training.batches import Batches, choose_global_batch
from training.due import Rollouts, actions_after
from training.metrics import Metrics, Profiler
from training.process_settings import retain_memory, set_determinism
from training.run_folder import Restart, RunFolder, load_or_start
from training.state import build_state
from training.step import Run, train_step
from training.validator import Validator

logger = logging.getLogger("rossby")


def train(config: Config, watchdog: Watchdog | None = None) -> None:
    """Train on this rank, from opening the data to the last validation. Exits with 75 after an early stop."""
    training, folder = config.training, config.dump_folder
    watchdog = watchdog or Watchdog(folder, config.comm)

    # -- data, before any rank waits for another, so that bad input is reported in one line
    selection = watchdog.selection = open_checked(config)

    # -- ranks
    device = start_ranks(watchdog.group_seconds)
    mesh = mesh_of(config.parallelism, device)
    layout = asdict(mesh.degrees)
    agreement = Agreement(training.max_wall_time, cpu_group(), watchdog)
    set_determinism(training.deterministic)
    retain_memory(device)
    if mesh.degrees.world > 1:
        logger.info(f"{mesh.degrees.world} ranks\n{mesh.picture()}")
    run_folder = RunFolder(config, selection)  # from here on no other run writes into it

    # -- samples, model, and the state that a checkpoint contains
    archive, chosen = selection.archive, selection.samples("train", range(1, 1 + training.states_ahead))
    logger.info(selection.describe("train", chosen))
    samples = FieldDataset(archive, selection.variables, chosen, selection.history)
    assembly = assemble(config, Fields.of(selection, run_folder.statistics), mesh, device)
    state = build_state(config, assembly)
    progress, model = state.progress, assembly.model

    # -- resume from the newest complete checkpoint, or start from the weights of another run
    checkpointer = run_folder.open_checkpoints(layout)
    load_or_start(checkpointer, state, config, archive.grid)
    global_batch = choose_global_batch(training, training.local_batch_size * mesh.degrees.dp, progress)
    area = area_weights(archive.grid.latitude)  # (H,)
    run = Run(config, assembly, state, area, global_batch, checkpointer)
    batches = Batches(samples, config, state, model, global_batch)

    # -- reporting; all errors of input have been raised before
    if checkpointer:
        checkpointer.start_process()
    run_folder.begin(progress.step, layout)
    watchdog.begin(progress.step)
    planned = plan_here(config, selection, mesh.degrees.world) if dist.get_rank() == 0 else None
    memory = planned.memory.peak if planned and device.type == "cuda" else 0.0
    metrics = Metrics(config, run, batches, planned and (planned.time.total, memory))
    validator = Validator(config, selection, run_folder.statistics, run, metrics)
    profiler = Profiler(config)
    restart = Restart(checkpointer, state, [run.fingerprints, batches, metrics, validator, profiler])
    channels = f"{assembly.meta_model.in_channels} channels in, {len(assembly.normalizer.mean)} out"
    logger.info(
        f"{assembly.num_parameters / 1e6:.1f} M parameters, {channels}; "
        f"global batch {global_batch} = {training.local_batch_size} x "
        f"{mesh.degrees.dp} ranks x {len(batches)}; from step {progress.step} to {training.steps} on {device}"
    )

    # -- the loop, which waits for the device only on logging and saving steps
    rollouts = Rollouts.of(training)
    stop = ""  # why the run ends before its last step
    gc.disable()  # collections are scheduled: at a random time one would delay a rank while the others wait
    model.train()
    with profiler, agreement:
        while progress.step < training.steps and not stop:
            step = progress.step + 1
            activity.start_phase("stage" if rollouts.begins_stage(step) else "train", step)
            result = train_step(run, step, batches)
            progress.advance(global_batch)
            metrics.count_step()
            with span("agree"):
                save_seconds = checkpointer.last_seconds if checkpointer else 0.0
                stop = agreement.decide(save_seconds + validator.seconds_due(step))
            due = actions_after(config, step, bool(stop))
            if due.check and state.bad_steps.too_many(step, due.last):
                with span("rollback"):
                    restart.roll_back()
                continue
            run.fingerprints.compare(step, due.save)
            if due.log:
                with span("log"):
                    metrics.log_step(step, result)
                watchdog.comparison = metrics.comparison
                if checkpointer:
                    checkpointer.poll()
            if due.collect:
                gc.collect(1)
            if checkpointer and due.save and (stop or not state.bad_steps.last_is_bad):
                with span("checkpoint"):
                    checkpointer.save(step, state.state_dict())
                metrics.start_interval()
            if due.validate:
                validator.validate(step, is_ended=agreement.ends_validation)
                stop = agreement.stop
            profiler.step(step)
    gc.enable()
    activity.start_phase("end", progress.step)
    unsaved = checkpointer.finish(progress.step, state.state_dict()) if checkpointer else ""
    message, code = agreement.after_last_save(progress.step, checkpointer is not None, unsaved)

    # -- scores and plots, unless the run is to be started again
    if not stop:
        validator.validate(progress.step, is_last=True)
        if dist.get_rank() == 0:
            print(f"the run's folder: {folder}", flush=True)
    metrics.close()
    leave(watchdog, agreement, run_folder, message, code)


def leave(watchdog: Watchdog, agreement: Agreement, run_folder: RunFolder, message: str, code: int) -> None:
    """End the run on all ranks together: return for exit code 0, exit with 75, or raise RunFailed for 1."""
    dist.barrier()  # of ranks that the watchdog still watches: rank 0 may draw plots for minutes
    agreement.close()
    watchdog.stop()
    if dist.get_rank() == 0:
        watchdog.write_status(code, message)
        if code == EXIT_SAVED:
            print_message(message)
    run_folder.release()
    dist.destroy_process_group()
    if code == FAILED:
        raise RunFailed(message)
    if code:
        end_process(code)


def main() -> None:
    with one_line_errors():
        config = start(sys.argv[1:], __doc__, None)
        with run_with_watchdog(config) as watchdog:
            train(config, watchdog)


if __name__ == "__main__":
    main()
