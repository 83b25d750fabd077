"""An exponential moving average of the weights, sharded as they are; validation and export use it."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class EMA:
    """average <- decay x average + (1 - decay) x weight, after every step, in float32."""

    def __init__(
        self, parameters: dict[str, nn.Parameter], decay: float, after_exchange: Callable[[], None]
    ) -> None:
        """after_exchange: called after every swap of weights and averages."""
        self.parameters, self.decay, self.after_exchange = parameters, decay, after_exchange
        self.averages: dict[str, Tensor] = {name: p.detach().clone() for name, p in parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the averages after step `step` (from 1), faster early on to forget the initial weights."""
        decay = min(self.decay, (1 + step) / (10 + step))
        weights = [self.parameters[name].detach() for name in self.averages]
        averages = [*self.averages.values()]
        local = [
            [t.to_local() if isinstance(t, DTensor) else t for t in some] for some in (averages, weights)
        ]
        torch._foreach_lerp_(local[0], local[1], 1 - decay)  # type: ignore[reportPrivateImportUsage]

    @torch.no_grad()
    def restart(self, names: Iterable[str]) -> None:
        """Set the averages of these parameters, if they have some, to the weights."""
        for name in self.averages.keys() & set(names):
            self.averages[name].copy_(self.parameters[name].detach())

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Exchange the weights for the averages inside the context."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, average in self.averages.items():
            weight = self.parameters[name]
            trained = weight.detach().clone()
            weight.copy_(average)
            average.copy_(trained)
        self.after_exchange()
