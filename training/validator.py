"""A run's own validation: forecasts over every date of the validation period, beside what costs nothing."""

import logging
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from config import Config
from datasets.variables import named_by
from traces.profiler import span
from training.assembly import Assembly
from training.host_memory import giving_memory_back
from training.metrics import Metrics
from training.no_checkpoints import Saves
from training.objective import Objective
from training.progress_bar import progress_bar
from training.samples import Samples
from training.state import TrainState
from verification.baselines import FIT_SAMPLES, fit_baselines
from verification.rollout import Forecast, model_forecast
from verification.validation import Example, Validation
from verification.validation_scores import Scores

logger = logging.getLogger(__name__)


def counted(forecast: Forecast, bar: tqdm) -> Forecast:
    """The same forecast; the bar moves with every batch of dates."""

    def run(*batch: Any) -> Tensor:
        fields = forecast(*batch)
        bar.update()
        return fields

    return run


class Validator:
    """Called by all ranks together. Averaged weights, where there are any, are what is validated, and those
    that are trained stand beside them as "raw weights".
    """

    def __init__(
        self,
        config: Config,
        samples: Samples,
        assembly: Assembly,
        objective: Objective,
        run: TrainState,
        saves: Saves,
        metrics: Metrics,
    ) -> None:
        self.model, self.objective, self.run = assembly.model, objective, run
        self.saves, self.metrics, self.samples, self.folder = saves, metrics, samples, config.dump_folder
        settings, data, area = config.validation, config.data, objective.area
        self.plots = settings.plots
        loggers = config.metrics
        self.shows = loggers.enable_tensorboard or loggers.enable_wandb or loggers.enable_mlflow
        members, step_seconds = settings.members or config.training.members, data.step_hours * 3600
        parts = (self.model.predict, assembly.normalizer, assembly.conditions, step_seconds)
        self.forecast = model_forecast(*parts, members, config.training.seed)
        self.validation, self.baselines, self.plotted = None, {}, settings.plot_variables
        if not settings.enable or not len(samples.selection.validation):
            return
        leads = sorted(hours // data.step_hours for hours in settings.lead_hours)
        mesh = self.model.mesh
        self.validation = Validation(
            samples.dataset_by_lead("validation", leads, history=data.history),
            leads,
            data.step_hours,
            area,
            settings.local_batch_size,
            data.num_workers,
            part=(mesh.dp_rank, mesh.degrees.dp),
            counts=self.model.is_sample_leader,
            members=members,
        )
        mean_field = torch.from_numpy(samples.statistics.mean_field).to(area.device)  # (V, H, W)
        fitted = samples.dataset_by_lead("train", leads, limit=FIT_SAMPLES)
        with giving_memory_back(area.device):
            self.baselines = fit_baselines(fitted, mean_field, area, leads, settings.local_batch_size)

    def _averaged(self) -> AbstractContextManager:
        return self.run.average.in_place() if self.run.average else nullcontext()

    def scores(self, step: int, last: bool = False) -> Scores | None:
        """After `step`, into metrics.jsonl too; None where nothing is validated. Plots after the last step,
        and where somebody looks at them meanwhile.
        """
        if self.validation is None:
            return None
        self.model.train(False)
        self.saves.wait_for_staging()  # averages take the place of weights that are still being copied
        started = time.monotonic()
        number = len(self.validation.sampler) * (2 if self.run.average else 1)
        bar = progress_bar(number, "batch", dist.get_rank() == 0, desc="validation")
        forecast, loss = counted(self.forecast, bar), self.objective.of_fields
        with giving_memory_back(self.model.device), span("validation"), bar:
            with self._averaged():
                scores = self.validation.run(forecast, self.baselines, loss)
            if self.run.average:
                scores.rmse["raw weights"] = self.validation.run(forecast, {}, loss).rmse["model"]
            example = self._example(last)
        self.model.train()
        seconds = time.monotonic() - started
        logger.info(f"validated {max(scores.num_dates)} dates in {seconds:.1f} s")
        self.metrics.write(scores.record(step) | {"validation_seconds": seconds})
        if example and dist.get_rank() == 0:
            self._plot(step, scores, example)
        return scores

    def _example(self, last: bool) -> Example | None:
        """The forecast that is drawn, where one is: on all ranks, since the model may take all of them."""
        if self.validation is None or not self.plots or not (last or self.shows):
            return None
        with self._averaged():
            return self.validation.last_date(self.forecast)

    def _plot(self, step: int, scores: Scores, example: Example) -> None:
        """Plot losses, errors against lead time, maps and spectra of the last date; log them too."""
        from verification.plots import plot_run  # here, because it takes half a second of every start

        selection, chosen = self.samples.selection, named_by(self.plotted, scores.variables)
        parts = (selection.archive.grid, selection.land(), chosen)
        self.metrics.log_images(step, plot_run(self.folder, scores, example, *parts), scores.table())
