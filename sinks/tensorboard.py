"""Scalars for TensorBoard."""

import logging
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class TensorBoard:
    """Scalars into a folder of their own. A disk that is full costs what it does not take, and no more."""

    def __init__(self, folder: Path, resume_step: int) -> None:
        self.folder, self.resume_step = folder, resume_step
        self.writer: Any = None

    def write(self, record: dict[str, Any]) -> None:
        try:
            self._open()
            for name, value in record.items():
                if name != "step" and value is not None:
                    group = "" if "/" in name else "train/"
                    self.writer.add_scalar(f"{group}{name}", value, record["step"])
        except OSError as error:
            logger.warning("step %d is missing from %s: %s", record["step"], self.folder, error)
            self.writer = None  # its thread has ended; the next step tries another file

    def _open(self) -> None:
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter  # slow to import, and not always wanted

            self.writer = SummaryWriter(str(self.folder), purge_step=self.resume_step + 1)

    def go_back(self, step: int) -> None:
        """The next file says that what stands in those before it after `step` does not count."""
        self.close()
        self.writer, self.resume_step = None, step

    def close(self) -> None:
        try:
            if self.writer:
                self.writer.close()
        except OSError as error:
            logger.warning("%s: %s", self.folder, error)
