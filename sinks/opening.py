"""A name for jobs/start_checks.py: train.py calls training.loggers.opening.check_loggers itself."""

from typing import Any


def check_sinks(settings: Any) -> None: ...
