"""Validation of a run: scores of forecasts from every date of the validation period, and of baselines."""

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
import torch.distributed as dist

from config import RANDOM, Config
from datasets.field_dataset import LaterFields
from jobs.heartbeat import span
from training.best import Best
from training.due import every
from training.metrics import Metrics
from training.process_settings import return_memory
from training.samples import Samples
from training.step import Run
from verification.baselines import FIT_SAMPLES, MIN_FIT_SAMPLES, fit_baselines
from verification.rollout import model_forecast
from verification.validation import Example, Scores, Validation, ValidationEnded

logger = logging.getLogger(__name__)
FIT_BYTES = 2**34  # of training data that the baselines are fitted on, if these are enough dates


class Validator:
    """Scores of the averaged weights if there are any, with those of the trained ones as "raw weights".

    Its methods are called by all ranks together.
    """

    def __init__(self, config: Config, samples: Samples, run: Run, metrics: Metrics) -> None:
        self.run, self.model, self.metrics, self.samples = run, run.assembly.model, metrics, samples
        self.folder, self.settings = config.dump_folder, config.validation
        name, checkpointer = config.checkpoint.keep_best, run.checkpointer
        self.best = Best(config, checkpointer) if name and checkpointer else None
        self.validated: tuple[int, Scores] | None = None  # the last step, and its scores
        self.seconds = 0.0  # of the last validation
        self.validation = None
        if not self.settings.enable or not len(samples.selection.validation):
            return
        members, data = self.settings.members or config.training.members, config.data
        assembly, seconds = run.assembly, run.objective.step_seconds
        parts = (self.model.predict, assembly.normalizer, assembly.conditions, seconds)
        normalizer, selection = assembly.normalizer, samples.selection
        self.boundary = None if normalizer.boundary is None else normalizer.boundary.cpu().numpy()
        known = LaterFields(selection.archive, selection.variables[normalizer.channels.known])
        seed = config.training.seed
        self.forecast = model_forecast(*parts, members, seed, known if normalizer.channels.is_known else None)
        leads = sorted(hours // data.step_hours for hours in self.settings.lead_hours)
        mesh, area, batch_size = self.model.mesh, run.objective.area, self.settings.local_batch_size
        # Random weather has no skill to measure: one date shows that validation runs.
        limit, states = 1 if data.path == RANDOM else 0, sorted({1, *leads})
        self.leads = leads
        self.validation = Validation(
            # With the state after one step, of which the loss of training is.
            samples.dataset_by_lead("validation", states, limit, data.history),
            leads,
            data.step_hours,
            area.device,
            batch_size,
            data.num_workers,
            part=(mesh.dp_rank, mesh.degrees.dp),
            counts=self.model.is_sample_leader,
            members=members,
            num_forcing=normalizer.num_forcing,
            boundary=normalizer.boundary,
        )

    def seconds_due(self, step: int) -> float:
        """Return the estimated time of validations that are due after `step` and the next one."""
        due = [every(self.settings.interval, each) for each in (step, step + 1)]
        return self.seconds * sum(due)

    def restart(self, step: int) -> None:
        """Forget the scores of steps after `step`, and validate `step` if that was due and is missing."""
        self.validated = None
        if self.best:
            self.best.restart(step)
        if step and every(self.settings.interval, step) and not self.metrics.has_scores(step):
            self.validate(step)

    def validate(
        self, step: int, is_last: bool = False, is_ended: Callable[[], bool] | None = None
    ) -> Scores | None:
        """Score the weights after `step` once, write the scores, and compare them with the best so far.

        is_ended: asked before each batch; True ends the validation without scores. Returns None then, and
        without validation. Plots after the last step.
        """
        if self.validation is None:
            return None
        self.model.train(False)
        if not self.validated or self.validated[0] != step:
            try:
                self.validated = step, self._score(self.validation, step, is_ended)
            except ValidationEnded:
                logger.info(f"the validation of step {step} is ended; the next start repeats it")
                self.model.train()
                return None
        scores = self.validated[1]
        if self.settings.plots and is_last:
            with return_memory(self.model.device), self._averaged():  # on all ranks: they share the model
                example = self.validation.last_date(self.forecast)
            if dist.get_rank() == 0:
                self._plot(step, scores, example)
        self.model.train()
        self.metrics.start_interval()
        return scores

    def _score(self, validation: Validation, step: int, is_ended: Callable[[], bool] | None) -> Scores:
        state, checkpointer, started = self.run.state, self.run.checkpointer, time.monotonic()
        if checkpointer:
            checkpointer.wait_for_staging()  # averages replace weights that are still being copied
        forecast, loss, baselines = self.forecast, self.run.objective.loss_of_fields, {}
        if not validation.known:  # the first validation scores the baselines, too
            selection, archive = self.samples.selection, self.samples.selection.archive
            mean_field = torch.from_numpy(self.samples.statistics.mean_field).to(self.model.device)
            sample_bytes = 4 * mean_field.numel() * (1 + len(self.leads))
            limit = min(FIT_SAMPLES, max(MIN_FIT_SAMPLES, FIT_BYTES // sample_bytes))
            limit = 1 if archive.path == RANDOM else limit
            fitted = selection.samples_by_lead("train", self.leads, limit)
            with return_memory(self.model.device):
                baselines = fit_baselines(archive, selection.variables, fitted, mean_field, self.leads)
        with return_memory(self.model.device), span("validation"):
            with self._averaged():
                scores = validation.run(forecast, baselines, loss, is_ended)
            if state.average:
                raw = validation.run(forecast, {}, loss, is_ended)
                scores.by_forecast["raw weights"] = raw.by_forecast["model"]
        self.seconds = time.monotonic() - started
        logger.info(f"validated {max(scores.num_dates)} dates in {self.seconds:.1f} s")
        self.metrics.write(scores.record(step) | {"validation_seconds": self.seconds})
        logger.info(f"step {step}, {scores.table()}")
        if self.best:
            self.best.judge(step, scores.record(step))
        return scores

    def _averaged(self) -> AbstractContextManager:
        average = self.run.state.average
        return average.applied() if average else nullcontext()

    def _plot(self, step: int, scores: Scores, example: Example) -> None:
        """Plot losses, errors against lead time and maps of the last date."""
        from verification.plots import plot_run  # here, because it takes half a second of every start

        selection = self.samples.selection
        if self.boundary is not None:  # is given, not forecast
            date, fields = example
            example = date, {n: (t, np.where(self.boundary, np.nan, f)) for n, (t, f) in fields.items()}
        try:
            plot_run(self.folder, scores, example, selection.archive.grid, selection.land())
        except OSError as error:  # a full disk must not end a run
            logger.warning("plots of step %d are not written: %s", step, error)
