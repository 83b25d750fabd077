"""status.json in the run's folder: how the run ended, for launchers that lose exit codes (torchrun, srun)."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path

from jobs.durable_files import write_durably

NAME = "status.json"


def write_status(folder: Path, step: int, exit_code: int | None, message: str = "") -> None:
    """Write the last step, the exit code and the reason. exit_code: None while the run goes on. OSError."""
    content = {
        "exit_code": exit_code,  # 0 done, 1 failed, 2 bad input, 75 saved and to be started again
        "step": step,
        "message": message,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "restart": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
    }
    write_durably(folder / NAME, json.dumps(content, indent=1) + "\n")
