"""Attention as one function with a named kernel. Weather is not causal: every token attends to all others.

Shapes: B batch, N heads, T tokens, E head size.
"""

import importlib.util
import math
from importlib.metadata import version

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from config import Model
from errors import ConfigError, refuse

# Modules of the packages with FlashAttention-2, -3 (for Hopper alone) and -4.
FLASH_MODULES = {"flash2": "flash_attn", "flash3": "flash_attn_interface", "flash4": "flash_attn.cute"}
FLASH4 = "4.0.0b18"  # the last version that torch 2.11 to 2.13 know how to call


def attention(q: Tensor, k: Tensor, v: Tensor, backend: str = "sdpa") -> Tensor:
    """softmax(q k^T / sqrt(E)) v; q (B, N, T, E), k and v (B, N, S, E) -> (B, N, T, E).

    `sdpa`, and `auto` before `use_backend`: torch chooses; `cudnn` and `flash`: one of torch's kernels;
    `flash4`: torch's flash kernel after `activate`; `flash_attn`: the package, or what `activate` returns for
    it; `math`: two matmuls and a softmax.
    """
    if backend in ("sdpa", "auto"):
        return F.scaled_dot_product_attention(q, k, v)
    if backend == "math":
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (B, N, T, S)
        return scores.softmax(dim=-1) @ v
    if backend == "flash_attn":
        from flash_attn import flash_attn_func  # type: ignore[import-not-found]  # an extra: CUDA only

        return flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)  # (B, T, N, E) inside
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if backend == "cudnn" else SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v)


def activate(backend: str) -> str:
    """Set the implementation of torch's flash kernel in the whole process; return the kernel for `attention`.

    FlashAttention-4 is "flash4"; FlashAttention-3 is "flash_attn" on Hopper, if it is installed.
    """
    implementation = {"flash4": "FA4"}.get(backend)
    if backend == "flash_attn" and _has_flash3():
        backend, implementation = "flash", "FA3"
    if implementation == torch.nn.attention.current_flash_attention_impl():
        return backend
    if implementation:
        torch.nn.attention.activate_flash_attention_impl(implementation)
    else:
        torch.nn.attention.restore_flash_attention_impl()
    return backend


def use_backend(model: nn.Module, backend: str) -> None:
    """Set the kernel of all blocks."""
    backend = activate(backend)
    for module in model.modules():
        if isinstance(module, Kernel):
            module.backend = backend


def _has_flash3() -> bool:
    is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    return is_hopper and _is_installed(FLASH_MODULES["flash3"])


# GPU generations (8: Ampere, 9: Hopper; 0: CPU), dtypes, most tokens, kernel: the first match is used.
HALF = (torch.bfloat16, torch.float16)
CHOICES: tuple[tuple[range, tuple[torch.dtype, ...], float, str], ...] = (
    # On an EPYC 0.17 of torch's kernel's time at 128 tokens, 0.43 at 1,024, 1.25 at 2,048; in float16 1.6.
    (range(1), (torch.bfloat16,), 1024, "math"),
    # Heads of 64 on an H200, forward and backward in TFLOP/s: FlashAttention-4 536 and 434, cuDNN 470 and
    # 360, FlashAttention-2 301 and 222 (benchmarks/gpu.sh).
    (range(9, 99), HALF, math.inf, "flash4"),
    (range(9, 10), HALF, math.inf, "flash3"),  # "flash_attn"; has kernels for Hopper alone
    (range(9, 99), HALF, math.inf, "cudnn"),
    (range(8, 9), HALF, math.inf, "flash"),  # cuDNN has no kernel of its own for Ampere
)  # otherwise torch chooses


def preferred_backend(device: torch.device, dtype: torch.dtype, num_tokens: int, head_dim: int) -> str:
    """Return the kernel of `model.attention_backend = "auto"` on this machine, by CHOICES."""
    generation = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
    if generation and (head_dim % 8 or head_dim > 128):
        return "sdpa"  # not all of these kernels have such heads
    for generations, dtypes, most_tokens, backend in CHOICES:
        fits = generation in generations and dtype in dtypes and num_tokens <= most_tokens
        if fits and not find_obstacle(backend, device.type, dtype):
            return "flash_attn" if backend == "flash3" else backend
    return "sdpa"


def check_backend(backend: str, device_type: str, dtype: torch.dtype) -> None:
    """Raise ConfigError, with the fix, if this machine has no such kernel."""
    if reason := find_obstacle(backend, device_type, dtype):
        raise ConfigError(f'model.attention_backend = "{backend}": {reason}; use "sdpa"')


def find_obstacle(backend: str, device_type: str, dtype: torch.dtype) -> str:
    """Return why a kernel cannot run here, "" if it can."""
    if backend in ("cudnn", "flash_attn", *FLASH_MODULES) and device_type != "cuda":
        return f"needs a CUDA device and the run is on {device_type}"
    if backend == "flash_attn" and not (_is_installed(FLASH_MODULES["flash2"]) or _has_flash3()):
        return 'the package flash-attn is not installed (pip install -e ".[gpu]")'
    if backend in FLASH_MODULES and not _is_installed(FLASH_MODULES[backend]):
        return f"the package with {FLASH_MODULES[backend]} is not installed"
    if backend == "flash4" and torch.__version__ < "2.14" and version("flash-attn-4") != FLASH4:
        return f"returns more than this torch expects; pip install flash-attn-4=={FLASH4}"
    if device_type == "cuda" and dtype == torch.float32 and backend not in ("auto", "sdpa", "math"):
        return 'has no float32 kernel; set training.mixed_precision_param = "bfloat16"'
    if backend == "cudnn" and not torch.backends.cudnn.is_available():
        return "this torch has no cuDNN"
    return ""


def _is_installed(module: str) -> bool:
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # its parent package
        return False
    # A folder without code is none: flash-attn-4 has flash_attn.cute and no flash_attn.
    return spec is not None and spec.origin is not None


class Kernel(nn.Module):
    """The attention function as a module without parameters, so that a layout can replace it."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.backend = backend

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, self.backend)


class WindowedKernel(nn.Module):
    """Attention among the tokens of each window of the token grid (h, w): a reshape around a kernel.

    window: its rows R and columns S, which divide h and w. Queries may have padded tokens at the end, which
    attend to nothing and become zeros.
    """

    def __init__(self, inner: nn.Module, token_shape: tuple[int, int], window: tuple[int, int]) -> None:
        super().__init__()
        (h, w), (rows, columns) = token_shape, window
        self.inner, self.num_tokens = inner, h * w
        self.split = (h // rows, rows, w // columns, columns)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # All reshapes keep the heads of a token adjacent in memory, like models/vit.py.
        windows = []  # B' = B h/R w/S
        for x in (q[:, :, : self.num_tokens], k, v):
            x = x.transpose(1, 2).unflatten(1, self.split)  # (B, h/R, R, w/S, S, N, E)
            windows.append(x.transpose(2, 3).flatten(3, 4).flatten(0, 2).transpose(1, 2))  # (B', N, R S, E)
        out = self.inner(*windows)  # (B', N, R S, E)
        down, rows, across, columns = self.split
        out = out.transpose(1, 2).unflatten(1, (rows, columns)).unflatten(0, (q.shape[0], down, across))
        out = out.transpose(2, 3).flatten(1, 4).transpose(1, 2)  # (B, N, T, E)
        padded = q.shape[2] - self.num_tokens
        return F.pad(out, (0, 0, 0, padded)) if padded else out


def choose_windows(model: Model, token_shape: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the rows and columns of the window of each block. ConfigError: they do not divide the tokens."""
    height, width = token_shape
    for window in model.attention_windows:
        for size, count in zip(window, token_shape, strict=True):
            if size and count % size:
                divisors = [n for n in range(1, count + 1) if count % n == 0]
                near = sorted(divisors, key=lambda n: abs(n - size))[:3]
                reason = (
                    f"{size} does not divide the {count} of {height} x {width} tokens; the nearest: {near}"
                )
                refuse("model.attention_windows", list(window), reason)
    windows = model.attention_windows or ((0, 0),)
    shapes = [(rows or height, columns or width) for rows, columns in windows]
    return [shapes[block % len(shapes)] for block in range(model.num_layers)]
