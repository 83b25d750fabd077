"""Scalars, and the pictures and tables of validations, for TensorBoard."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

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

    def show(self, step: int, pictures: Mapping[str, Path], scorecard: str) -> None:
        try:
            self._open()
            for name, path in pictures.items():
                self.writer.add_image(f"plots/{name}", np.asarray(Image.open(path)), step, dataformats="HWC")
            as_it_stands = "\n".join(f"    {line}" for line in scorecard.splitlines())  # Markdown's code
            self.writer.add_text("plots/scorecard", as_it_stands, step)
        except OSError as error:
            logger.warning("pictures of step %d are missing from %s: %s", step, self.folder, error)
            self.writer = None

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
