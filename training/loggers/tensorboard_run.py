"""TensorBoard: scalars, and the configuration."""

from typing import Any

from torch.utils.tensorboard import SummaryWriter

from command_line import to_toml
from config import Config
from training.loggers.opening import scalars


class Logger:
    def __init__(self, config: Config, resume_step: int, written: int) -> None:
        self.folder, self.config = config.dump_folder / "tensorboard", config
        self.writer = self._open(resume_step)

    def _open(self, step: int) -> SummaryWriter:
        """Open a file that declares the steps after `step` in earlier ones invalid."""
        writer = SummaryWriter(str(self.folder), purge_step=step + 1)
        lines = to_toml(self.config).splitlines()  # indented: Markdown shows them as they are
        writer.add_text("config", "\n".join(f"    {line}" for line in lines))
        return writer

    def log(self, record: dict[str, Any]) -> None:
        for name, value in scalars(record).items():
            self.writer.add_scalar(name, value, record["step"])

    def restart(self, step: int) -> None:
        self.writer.close()
        self.writer = self._open(step)

    def close(self) -> None:
        self.writer.close()
