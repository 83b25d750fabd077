"""TensorBoard: scalars, and the configuration. A full disk costs what it does not take, and no more."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from command_line import to_toml
from config import Config

logger = logging.getLogger(__name__)


class Logger:
    def __init__(self, folder: Path, resume_step: int, config: Config) -> None:
        self.folder, self.resume_step, self.config = folder, resume_step, config
        self.writer: Any = None

    @contextmanager
    def _open(self, what: str) -> Iterator[Any]:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and not always used

        try:
            if not self.writer:
                self.writer = SummaryWriter(str(self.folder), purge_step=self.resume_step + 1)
                lines = to_toml(self.config).splitlines()  # indented: Markdown shows them as they are
                self.writer.add_text("config", "\n".join(f"    {line}" for line in lines))
            yield self.writer
        except OSError as error:
            logger.warning("%s: %s not written: %s", self.folder, what, error)
            self.writer = None  # its thread has ended; the next step opens another file

    def log(self, record: dict[str, Any]) -> None:
        with self._open(f"step {record['step']}") as writer:
            for name, value in record.items():
                if name != "step" and value is not None:
                    writer.add_scalar(name if "/" in name else f"train/{name}", value, record["step"])

    def restart(self, step: int) -> None:
        """Close the file: the next one declares the steps after `step` invalid."""
        self.close()
        self.writer, self.resume_step = None, step

    def close(self) -> None:
        if self.writer:
            with self._open("the end") as writer:
                writer.close()
