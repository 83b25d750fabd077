"""TensorBoard: scalars, pictures and tables. A full disk costs what it does not take, and no more."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from command_line import to_toml
from config import Config

logger = logging.getLogger(__name__)


def as_code(text: str) -> str:
    """Return Markdown that shows a text as it is."""
    return "\n".join(f"    {line}" for line in text.splitlines())


class Logger:
    def __init__(self, folder: Path, resume_step: int, config: Config) -> None:
        self.folder, self.resume_step, self.config = folder, resume_step, config
        self.writer: Any = None
        self.charts: dict[str, list[str]] = {}  # a variable, and the keys of its scores

    def _describe_run(self) -> None:
        """Write the configuration as a text, and its keys as hyperparameters of the run."""
        from torch.utils.tensorboard.summary import hparams

        self.writer.add_text("config", as_code(to_toml(self.config)))
        sections = asdict(self.config).items()
        values = {f"{section}.{key}": value for section, keys in sections for key, value in keys.items()}
        plain = {key: v if isinstance(v, bool | int | float) else str(v) for key, v in values.items()}
        for summary in hparams(plain, {"train/loss": 0, "val/loss": 0}):
            self.writer.file_writer.add_summary(summary)

    def _draw_baselines(self, keys: Iterable[str]) -> None:
        """Ask for one chart a variable: the model next to its baselines."""
        for key in keys:
            kind, _, variable = key.removeprefix("val/").partition("/")
            if kind.startswith("rmse"):
                self.charts.setdefault(variable, []).append(key)
        charts = {variable: ["Multiline", chosen] for variable, chosen in self.charts.items()}
        self.writer.add_custom_scalars({"RMSE of model and baselines": charts})

    @contextmanager
    def _open(self, what: str) -> Iterator[Any]:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and not always used

        try:
            if not self.writer:
                self.writer = SummaryWriter(str(self.folder), purge_step=self.resume_step + 1)
                self._describe_run()
            yield self.writer
        except OSError as error:
            logger.warning("%s: %s not written: %s", self.folder, what, error)
            self.writer = None  # its thread has ended; the next step opens another file

    def log(self, record: dict[str, Any]) -> None:
        with self._open(f"step {record['step']}") as writer:
            if "val/loss" in record and not self.charts:
                self._draw_baselines(record)
            for name, value in record.items():
                if name != "step" and value is not None:
                    writer.add_scalar(name if "/" in name else f"train/{name}", value, record["step"])

    def log_images(self, step: int, pictures: Mapping[str, Path], scorecard: str) -> None:
        import numpy as np
        from PIL import Image

        with self._open(f"pictures of step {step}") as writer:
            for name, path in pictures.items():
                writer.add_image(f"plots/{name}", np.asarray(Image.open(path)), step, dataformats="HWC")
            writer.add_text("plots/scorecard", as_code(scorecard), step)

    def restart(self, step: int) -> None:
        """Close the file: the next one declares the steps after `step` invalid."""
        self.close()
        self.writer, self.resume_step = None, step

    def close(self) -> None:
        if self.writer:
            with self._open("the end") as writer:
                writer.close()
