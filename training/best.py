"""The best checkpoint by a named score, which stays among those of the run however old it is.

    best/best.json        {"score": ..., "value": ..., "step": ..., "basis": ...}

It is removed only if the run continues from a step before it. `forecast.checkpoint = "<run>/best"` takes it.
"""

import json
import logging
import math
from typing import Any

from checkpoints.checkpointer import Checkpointer
from checkpoints.files import BEST, complete_steps, read_best
from config import Config
from jobs.durable_files import write_durably
from jobs.heartbeat import span
from parallelisms.mesh import from_first_rank

logger = logging.getLogger(__name__)


class Best:
    """Selection of the best checkpoint by one score, the lower the better. Used by all ranks together."""

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
