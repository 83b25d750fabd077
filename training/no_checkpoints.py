"""The checkpoints of a run that saves none."""

import math

from torch import Tensor

from checkpoints.checkpointer import Checkpointer


class NoCheckpoints:
    """Has the methods of a Checkpointer that the training loop calls."""

    saves, saved_step, last_seconds = False, -1, 0.0

    def save(self, step: int, tensors: dict[str, Tensor]) -> None: ...

    def wait_for_staging(self) -> None: ...

    def poll(self) -> None: ...

    def wait(self) -> None: ...

    def finish(self, step: int, tensors: dict[str, Tensor]) -> str:
        return ""

    def newest(self, at_most: float = math.inf) -> int | None:
        return None


Saves = Checkpointer | NoCheckpoints
