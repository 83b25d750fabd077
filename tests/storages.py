"""Bytes that a forward pass saves for its backward pass."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Storages(TorchDispatchMode):
    """Every storage made while active, and which of them still live: autograd's and the policy's alike."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.weights: set[int] = set()  # autocast's copies: a matter of parameters, not of tokens

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.made.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
                if func is torch.ops.aten._to_copy.default and isinstance(args[0], nn.Parameter):
                    self.weights.add(storage._cdata)
        return out

    def live_bytes(self, model: nn.Module) -> int:
        own = {p.untyped_storage()._cdata for p in model.parameters()} | self.weights
        return sum(n for key, (ref, n) in self.made.items() if key not in own and not ref.expired())


def bytes_alive(model: nn.Module, x: Tensor, autocast: bool, *keys: Tensor) -> int:
    """After model(x, *keys), without parameters and autocast's copies of them."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), Storages() as storages:
        out = model(x, *keys)
    alive = storages.live_bytes(model)
    del out
    return alive
