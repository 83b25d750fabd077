"""Validation of a run: scores of forecasts from every date of the validation period, and of baselines."""

import json
import logging
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from checkpoints.checkpointer import Checkpointer
from checkpoints.files import BEST, complete_steps, read_best
from config import RANDOM, Config
from datasets.loader import FieldDataset, LaterFields
from datasets.selection import Selection
from datasets.statistics import Statistics
from jobs.durable_files import read_records, write_durably
from jobs.heartbeat import span
from parallelisms.mesh import from_first_rank
from training.due import every
from training.metrics import SCORE, Metrics
from training.process_settings import return_memory
from training.step import Run
from verification.baselines import FIT_SAMPLES, MIN_FIT_SAMPLES, fit_baselines
from verification.rollout import model_forecast
from verification.validation import Scores, Validation, ValidationEnded

logger = logging.getLogger(__name__)
FIT_BYTES = 2**34  # of training data that the baselines are fitted on, if these are enough dates


class Validator:
    """Scores of the averaged weights if there are any, with those of the trained ones as "raw weights". Used
    by all ranks together.
    """

    def __init__(
        self, config: Config, selection: Selection, statistics: Statistics, run: Run, metrics: Metrics
    ) -> None:
        self.run, self.model, self.metrics = run, run.assembly.model, metrics
        self.selection, self.statistics = selection, statistics
        self.folder, self.settings = config.dump_folder, config.validation
        name, checkpointer = config.checkpoint.keep_best, run.checkpointer
        self.best = Best(config, checkpointer) if name and checkpointer else None
        self.validated: tuple[int, Scores] | None = None  # the last step, and its scores
        self.seconds = 0.0  # of the last validation
        self.validation = None
        if not self.settings.enable or not len(selection.validation):
            return
        members, data, assembly = self.settings.members or config.training.members, config.data, run.assembly
        normalizer = assembly.normalizer
        self.boundary = None if normalizer.boundary is None else normalizer.boundary.cpu().numpy()
        later = LaterFields(selection.archive, selection.variables[normalizer.channels.known])
        self.forecast = model_forecast(
            self.model.predict,
            normalizer,
            assembly.conditions,
            run.objective.step_seconds,
            members,
            config.training.seed,
            later if normalizer.channels.is_known else None,
        )
        self.leads = sorted(hours // data.step_hours for hours in self.settings.lead_hours)
        # Random weather has no skill to measure: one date shows that validation runs.
        limit = 1 if data.path == RANDOM else 0
        # With the state after one step, of which the loss of training is.
        states = sorted({1} | set(self.leads))
        chosen = selection.samples_by_lead("validation", states, limit, data.history)
        if not limit:
            logger.info(selection.describe("validation", chosen))
        self.validation = Validation(
            FieldDataset(selection.archive, selection.variables, chosen, data.history),
            self.leads,
            data.step_hours,
            run.objective.area.device,
            self.settings.local_batch_size,
            data.num_workers,
            part=(self.model.mesh.dp_rank, self.model.mesh.degrees.dp),
            counts=self.model.is_sample_leader,
            members=members,
            num_forcing=normalizer.num_forcing,
            boundary=normalizer.boundary,
        )

    def seconds_due(self, step: int) -> float:
        """Return the estimated time of validations that are due after `step` and the next one."""
        interval = self.settings.interval
        return self.seconds * (every(interval, step) + every(interval, step + 1))

    def restart(self, step: int) -> None:
        """Forget the scores of steps after `step`, and validate `step` if that was due and is missing."""
        self.validated = None
        if self.best:
            self.best.restart(step)
        if not step or not every(self.settings.interval, step):
            return
        path = self.folder / "metrics.jsonl"
        scored = from_first_rank(lambda: [r["step"] for r in read_records(path) if SCORE in r])
        if step not in scored:
            self.validate(step)

    def validate(
        self, step: int, is_last: bool = False, is_ended: Callable[[], bool] | None = None
    ) -> Scores | None:
        """Score the weights after `step` once, write the scores, and compare them with the best so far; None
        without validation, and if is_ended, which is asked before each batch, has ended it.
        """
        validation = self.validation
        if validation is None:
            return None
        self.model.train(False)

        # -- scores, once
        average = self.run.state.average
        averaged = average.applied if average else nullcontext
        if not self.validated or self.validated[0] != step:
            checkpointer, started = self.run.checkpointer, time.monotonic()
            if checkpointer:
                checkpointer.wait_for_staging()  # averages replace weights that are still being copied
            forecast, loss, baselines = self.forecast, self.run.objective.loss_of_fields, {}
            if not validation.known:  # the first validation scores the baselines, too
                selection, archive = self.selection, self.selection.archive
                mean_field = torch.from_numpy(self.statistics.mean_field).to(self.model.device)
                sample_bytes = 4 * mean_field.numel() * (1 + len(self.leads))
                limit = min(FIT_SAMPLES, max(MIN_FIT_SAMPLES, FIT_BYTES // sample_bytes))
                limit = 1 if archive.path == RANDOM else limit
                fitted = selection.samples_by_lead("train", self.leads, limit)
                with return_memory(self.model.device):
                    baselines = fit_baselines(archive, selection.variables, fitted, mean_field, self.leads)
            try:
                with return_memory(self.model.device), span("validation"):
                    with averaged():
                        scores = validation.run(forecast, baselines, loss, is_ended)
                    if average:
                        raw = validation.run(forecast, {}, loss, is_ended)
                        scores = scores.with_raw_weights(raw)
            except ValidationEnded:
                logger.info(f"the validation of step {step} is ended; the next start repeats it")
                self.model.train()
                return None
            self.seconds = time.monotonic() - started
            logger.info(f"validated {max(scores.num_dates)} dates in {self.seconds:.1f} s")
            self.metrics.write(scores.record(step) | {"validation_seconds": self.seconds})
            logger.info(f"step {step}, {scores.table()}")
            if self.best:
                self.best.judge(step, scores.record(step))
            self.validated = step, scores
        scores = self.validated[1]

        # -- plots of losses, errors against lead time and maps of the last date
        if self.settings.plots and is_last:
            with return_memory(self.model.device), averaged():  # on all ranks: they share the model
                date, fields = validation.last_date(self.forecast)
            if self.boundary is not None:  # is given, not forecast
                fields = {n: (t, np.where(self.boundary, np.nan, f)) for n, (t, f) in fields.items()}
            if dist.get_rank() == 0:
                from verification.plots import plot_run  # here, because it takes half a second of every start

                grid = self.selection.archive.grid
                try:
                    plot_run(self.folder, scores, (date, fields), grid, self.selection.land())
                except OSError as error:  # a full disk must not end a run
                    logger.warning("plots of step %d are not written: %s", step, error)
        self.model.train()
        self.metrics.start_interval()
        return scores


class Best:
    """Selection of the best checkpoint by one score, the lower the better. Used by all ranks together.

    It stays among those of the run however old it is, unless the run continues from a step before it; its
    step is in best/best.json: {"score": ..., "value": ..., "step": ..., "basis": ...}.
    """

    def __init__(self, config: Config, checkpointer: Checkpointer) -> None:
        """Create before the first `restart`."""
        self.run, self.name, self.checkpointer = config.dump_folder, config.checkpoint.keep_best, checkpointer
        self.value, self.step = math.inf, -1
        # What comparable scores have in common: dates, first lead, members; for val/loss the loss.
        training, validation = config.training, config.validation
        basis: list[Any] = [config.data.validation_period, min(validation.lead_hours, default=0)]
        if training.loss == "crps":
            basis.append(validation.members or training.members)
        if self.name.startswith("val/loss"):
            basis += [training.loss, training.variable_weights, training.weight_by_change]
        self.basis = repr(basis)

    def judge(self, step: int, record: dict[str, float]) -> None:
        """Compare the scores of a validation after `step`, for which a save has been started."""
        value = from_first_rank(lambda: record[self.name])  # the same number on all ranks
        if not value < self.value:  # NaN is no improvement
            return
        # A best step is one that can be loaded: wait until its save is complete, or has failed.
        with span("checkpoint"):  # a phase that may take long
            self.checkpointer.wait()
        is_saved = self.checkpointer.saved_step == step

        def write() -> bool:
            """Write best.json before the one before may be pruned: a kill loses neither."""
            if not is_saved:
                logger.warning(f"{self.name} is {value:.4g}, the best so far, but step {step} was not saved")
                return False
            content = {"score": self.name, "value": value, "step": step, "basis": self.basis}
            try:
                write_durably(self.run / "best" / BEST, json.dumps(content))
            except OSError as error:  # as with any save: the run goes on
                logger.warning(f"the best checkpoint, of step {step}, could not be recorded: {error}")
                return False
            logger.info(f"{self.name} is {value:.4g}, the best so far: step {step}")
            return True

        # -- the step before may be pruned from here on, on all ranks
        if from_first_rank(write):
            self.value, self.step = value, step
            self.checkpointer.spared_step = step
            self.checkpointer.prune()

    def restart(self, step: int) -> None:
        """Read the best score up to `step` from the run's folder, if its checkpoint is there."""

        def read() -> tuple[float, int]:
            best = read_best(self.run)
            if best and (best.get("score"), best.get("basis")) != (self.name, self.basis):
                logger.warning(f"{BEST} is of another score, loss, period or lead; starting again")
            elif best and best["step"] > step:
                logger.info(f"the best checkpoint is removed: its step {best['step']} is repeated")
                (self.run / "best" / BEST).unlink(missing_ok=True)
            elif best and best["step"] in complete_steps(self.checkpointer.folder):
                return best["value"], best["step"]
            return math.inf, -1

        self.value, self.step = from_first_rank(read)
        self.checkpointer.spared_step = self.step
