"""TensorBoard: scalars, pictures and tables. A full disk costs what it does not take, and no more."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class Logger:
    def __init__(self, folder: Path, resume_step: int) -> None:
        self.folder, self.resume_step = folder, resume_step
        self.writer: Any = None

    @contextmanager
    def _open(self, what: str) -> Iterator[Any]:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and not always used

        try:
            self.writer = self.writer or SummaryWriter(str(self.folder), purge_step=self.resume_step + 1)
            yield self.writer
        except OSError as error:
            logger.warning("%s: %s not written: %s", self.folder, what, error)
            self.writer = None  # its thread has ended; the next step opens another file

    def log(self, record: dict[str, Any]) -> None:
        with self._open(f"step {record['step']}") as writer:
            for name, value in record.items():
                if name != "step" and value is not None:
                    writer.add_scalar(name if "/" in name else f"train/{name}", value, record["step"])

    def log_images(self, step: int, pictures: Mapping[str, Path], scorecard: str) -> None:
        import numpy as np
        from PIL import Image

        with self._open(f"pictures of step {step}") as writer:
            for name, path in pictures.items():
                writer.add_image(f"plots/{name}", np.asarray(Image.open(path)), step, dataformats="HWC")
            code = "\n".join(f"    {line}" for line in scorecard.splitlines())  # Markdown
            writer.add_text("plots/scorecard", code, step)

    def rollback(self, step: int) -> None:
        """Close the file: the next one declares the steps after `step` invalid."""
        self.close()
        self.writer, self.resume_step = None, step

    def close(self) -> None:
        if self.writer:
            with self._open("the end") as writer:
                writer.close()
