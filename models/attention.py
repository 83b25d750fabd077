"""Attention behind one function with a named kernel. Weather is not causal: every token sees every other one.

Shapes: B batch, N heads, T tokens, E head size.
"""

import importlib.util
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from errors import ConfigError

BACKENDS = ("auto", "sdpa", "cudnn", "flash", "flash_attn", "math")


def attention(q: Tensor, k: Tensor, v: Tensor, backend: str = "sdpa") -> Tensor:
    """softmax(q k^T / sqrt(E)) v; q (B, N, T, E), k and v (B, N, S, E) -> (B, N, T, E).

    `sdpa` lets torch choose, as `auto` does until parallelisms/measured_choices.py has measured; `cudnn` and
    `flash` pin one of torch's kernels; `flash_attn` is the package; `math` is two matmuls and a softmax,
    faster on a CPU than its flash kernel at a few hundred tokens.
    """
    if backend in ("sdpa", "auto"):
        return F.scaled_dot_product_attention(q, k, v)
    if backend == "math":
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (B, N, T, S)
        return scores.softmax(dim=-1) @ v
    if backend == "flash_attn":
        return _flash_attn_package(q, k, v)
    pinned = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}[backend]
    with sdpa_kernel(pinned):
        return F.scaled_dot_product_attention(q, k, v)


def _flash_attn_package(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from flash_attn import flash_attn_func  # type: ignore[import-not-found]  # an extra: CUDA only

    out = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)))  # its layout is (B, T, N, E)
    return out.transpose(1, 2)


def check_backend(backend: str, device_type: str, dtype: torch.dtype) -> None:
    """Raises ConfigError, with the fix, when this machine has no such kernel."""
    reason = _missing(backend, device_type, dtype)
    if reason:
        raise ConfigError(f'model.attention_backend = "{backend}": {reason}; use "sdpa"')


def _missing(backend: str, device_type: str, dtype: torch.dtype) -> str:
    if backend in ("cudnn", "flash_attn") and device_type != "cuda":
        return f"needs a CUDA device and the run is on {device_type}"
    if backend == "flash_attn" and importlib.util.find_spec("flash_attn") is None:
        return "the package flash-attn is not installed (pip install flash-attn)"
    if backend in ("cudnn", "flash", "flash_attn") and device_type == "cuda" and dtype == torch.float32:
        return 'has no float32 kernel; set training.mixed_precision_param = "bfloat16"'
    if backend == "cudnn" and not torch.backends.cudnn.is_available():
        return "this torch has no cuDNN"
    return ""


class Kernel(nn.Module):
    """The attention function as a module without parameters, so that a layout can replace it."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.backend = backend

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, self.backend)
