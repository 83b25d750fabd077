"""What every sink can do, and that none of them ends a run."""

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from errors import without_secrets

logger = logging.getLogger(__name__)


class Sink(Protocol):
    def write(self, record: dict[str, Any]) -> None:
        """A logged step or a validation: "step" and numbers, None or not finite where there is none."""
        ...

    def go_back(self, step: int) -> None:
        """The steps after `step` are going to be done again."""
        ...

    def show(self, step: int, pictures: Mapping[str, Path], scorecard: str) -> None:
        """Of a validation: name -> PNG, and its table."""
        ...

    def close(self) -> None: ...


class Guarded:
    """A sink of somebody else's library: its first error is one warning, and the end of it alone."""

    def __init__(self, name: str, open_sink: Callable[[], Sink]) -> None:
        self.name = name
        self.sink: Sink | None = self._tried(open_sink)

    def _tried(self, do: Callable[[], Any]) -> Any:
        try:
            return do()
        except Exception as error:  # whatever its library or its server makes of it
            text = without_secrets(" ".join(f"{error}".split()))[:300]
            logger.warning("%s: %s (%s); the run goes on without it", self.name, text, type(error).__name__)
            self.sink = None

    def write(self, record: dict[str, Any]) -> None:
        if sink := self.sink:
            self._tried(lambda: sink.write(record))

    def go_back(self, step: int) -> None:
        if sink := self.sink:
            self._tried(lambda: sink.go_back(step))

    def show(self, step: int, pictures: Mapping[str, Path], scorecard: str) -> None:
        if sink := self.sink:
            self._tried(lambda: sink.show(step, pictures, scorecard))

    def close(self) -> None:
        if sink := self.sink:
            self._tried(sink.close)


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """The finite numbers of a record under the names that TensorBoard has: "train/loss", "val/loss"."""
    return {
        name if "/" in name else f"train/{name}": float(value)
        for name, value in record.items()
        if name != "step" and value is not None and math.isfinite(value)
    }
