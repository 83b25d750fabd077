"""The exposed communication of a run's newest trace, as a metric. A process of its own, which gives way to
the run, works it out: no step waits.

    .venv/bin/python -m traces.exposed FILE    the part of a step in which nothing but a collective ran
"""

import os
import subprocess
import sys
from pathlib import Path

from config import PROJECT
from errors import one_line_errors
from traces.classes import COMMUNICATION
from traces.events import read_trace
from traces.timeline import build_timeline

KEY = "exposed_communication"  # in metrics.jsonl


class Exposed:
    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def look_at(self, trace: Path) -> None:
        """One that is still looked at is not waited for."""
        self.close()
        command = [sys.executable, "-m", "traces.exposed", str(trace.resolve())]
        off = subprocess.DEVNULL
        self.process = subprocess.Popen(
            command, cwd=PROJECT, text=True, stdin=off, stdout=subprocess.PIPE, stderr=off
        )

    def take(self) -> dict[str, float]:
        """Once, when it is known."""
        if self.process is None or self.process.poll() is None:
            return {}
        said, _ = self.process.communicate()
        failed, self.process = self.process.returncode, None
        return {} if failed else {KEY: float(said)}

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


exposed = Exposed()


def main(path: Path) -> None:
    os.nice(19)
    with one_line_errors():
        timeline = build_timeline(read_trace(path))
        print(timeline.by_class[COMMUNICATION] / timeline.step_milliseconds)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
