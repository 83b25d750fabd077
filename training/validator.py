"""Validation of a run: scores of forecasts from every date of the validation period, and of baselines."""

import logging
import time
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
import torch.distributed as dist

from config import Config
from datasets.field_dataset import LaterFields
from jobs.heartbeat import span
from training.best import Best
from training.due import every
from training.metrics import Metrics
from training.process_settings import return_memory
from training.samples import Samples
from training.step import Run
from verification.baselines import FIT_SAMPLES, fit_baselines
from verification.rollout import model_forecast
from verification.validation import Example, Scores, Validation

logger = logging.getLogger(__name__)


class Validator:
    """Scores of the averaged weights if there are any, with those of the trained ones as "raw weights".

    Its methods are called by all ranks together.
    """

    def __init__(self, config: Config, samples: Samples, run: Run, metrics: Metrics) -> None:
        self.run, self.model, self.metrics, self.samples = run, run.assembly.model, metrics, samples
        self.folder, self.settings = config.dump_folder, config.validation
        self.best = Best(config) if config.checkpoint.keep_best else None
        self.validated: tuple[int, Scores] | None = None  # the last step, and its scores
        self.seconds = 0.0  # of the last validation
        self.validation, self.baselines = None, {}
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
        self.validation = Validation(
            # With the state after one step, of which the loss of training is.
            samples.dataset_by_lead("validation", sorted({1, *leads}), history=data.history),
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
        mean_field = torch.from_numpy(samples.statistics.mean_field).to(area.device)  # (V, H, W)
        fitted = selection.samples_by_lead("train", leads, FIT_SAMPLES)
        with return_memory(area.device):
            names = selection.variables
            self.baselines = fit_baselines(selection.archive, names, fitted, mean_field, leads)

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

    def validate(self, step: int, is_last: bool = False) -> Scores | None:
        """Score the weights after `step` once, write the scores, and compare them with the best so far.

        Returns None without validation. Plots after the last step.
        """
        if self.validation is None:
            return None
        self.model.train(False)
        if not self.validated or self.validated[0] != step:
            self.validated = step, self._score(self.validation, step)
        scores = self.validated[1]
        if self.settings.plots and is_last:
            with return_memory(self.model.device), self._averaged():  # on all ranks: they share the model
                example = self.validation.last_date(self.forecast)
            if dist.get_rank() == 0:
                self._plot(step, scores, example)
        self.model.train()
        self.metrics.start_interval()
        return scores

    def _score(self, validation: Validation, step: int) -> Scores:
        state, checkpointer, started = self.run.state, self.run.checkpointer, time.monotonic()
        if checkpointer:
            checkpointer.wait_for_staging()  # averages replace weights that are still being copied
        forecast, loss = self.forecast, self.run.objective.loss_of_fields
        with return_memory(self.model.device), span("validation"):
            with self._averaged():
                scores = validation.run(forecast, self.baselines, loss)
            if state.average:
                raw = validation.run(forecast, {}, loss)
                scores.by_forecast["raw weights"] = raw.by_forecast["model"]
        self.seconds = time.monotonic() - started
        logger.info(f"validated {max(scores.num_dates)} dates in {self.seconds:.1f} s")
        self.metrics.write(scores.record(step) | {"validation_seconds": self.seconds})
        logger.info(f"step {step}, {scores.table()}")
        if self.best and checkpointer:
            self.best.judge(step, scores.record(step), checkpointer)
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
