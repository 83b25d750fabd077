"""`model.attention_backend = "auto"`: the kernel that is fastest here, for the shapes of this run."""

import logging
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from errors import ConfigError
from models.attention import Kernel, attention, check_backend
from models.vit import VisionTransformer
from parallelisms.degrees import Degrees
from parallelisms.measured_choice import device_name, kept_or_measured, wait
from parallelisms.mesh import from_first_rank

logger = logging.getLogger("rossby")
CANDIDATES = {"cpu": ("sdpa", "math"), "cuda": ("sdpa", "cudnn", "flash", "flash_attn")}
MAX_SCORES = 2**28  # bytes of the T x T scores that "math" may keep for each block
REPETITIONS = 5
HOPPER = (9, 0)
# Names that a kernel of Hopper's own has: cuDNN's and FlashAttention-3's; SDPA's flash is Ampere's.
HOPPER_KERNELS = ("cudnn", "sm90", "flash_fwd_hopper", "FlashAttnFwdSm90")
Shape = tuple[int, int, int, int]  # (B, N, T, E) of a rank


def choose_attention(
    model: VisionTransformer,
    batch: int,
    degrees: Degrees,
    dtype: torch.dtype,
    device: torch.device,
    folder: Path,
) -> str:
    """Sets the kernel of all blocks, the same on all ranks, and returns its name; rank 0 measures."""
    kernels = [module for module in model.modules() if isinstance(module, Kernel)]
    attention_layer = model.get_submodule("blocks.0.attention")
    head_dim = int(attention_layer.head_dim)  # type: ignore[arg-type]
    heads = max(model.dim // head_dim // (degrees.tp * degrees.cp), 1)
    shape = (batch, heads, model.num_tokens, head_dim)
    key = {"shape": list(shape), "dtype": str(dtype), "device": device_name(device)}
    path = folder / "attention.json"
    found = from_first_rank(lambda: kept_or_measured(path, key, lambda: choose(shape, dtype, device)))
    for kernel in kernels:
        kernel.backend = found["backend"]
    return found["backend"]


def choose(shape: Shape, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """The fastest backend, and seconds of all. ConfigError where it is not what a Hopper should run."""
    seconds = measure(shape, dtype, device)
    name = min(seconds, key=lambda backend: seconds[backend])
    said = ", ".join(f"{backend} {1e3 * value:.2f} ms" for backend, value in seconds.items())
    logger.info(f"attention: {name} ({said}, forward and backward of {' x '.join(map(str, shape))})")
    if device.type == "cuda":
        kernel = kernel_name(name, shape, dtype, device)
        logger.info(f"attention: kernel {kernel}")
        if dtype != torch.float32:  # for which Hopper has no kernel of its own
            check_hopper(kernel, name, device)
    return {"backend": name, "seconds": seconds}


def measure(shape: Shape, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Backend -> seconds of forward and backward, medians of interleaved repetitions; those that run here."""
    inputs = [torch.randn(shape, dtype=dtype, device=device).requires_grad_() for _ in range(3)]
    times: dict[str, list[float]] = {name: [] for name in CANDIDATES[device.type] if runs(name, inputs)}
    for _ in range(REPETITIONS):
        for name, found in times.items():
            found.append(seconds_of(name, inputs))
    return {name: statistics.median(found) for name, found in times.items()}


def runs(name: str, inputs: list[Tensor]) -> bool:
    """Whether this machine has the kernel and it takes these inputs; also its warm-up."""
    q, device = inputs[0], inputs[0].device
    b, n, t, _ = q.shape
    if name == "math" and b * n * t**2 * q.element_size() > MAX_SCORES:
        return False
    try:
        check_backend(name, device.type, q.dtype)
        seconds_of(name, inputs)
    except (ValueError, RuntimeError) as error:  # RuntimeError: torch's "no available kernel"
        logger.info(f"attention: {name} does not run here: {str(error).splitlines()[0]}")
        return False
    return True


def seconds_of(name: str, inputs: list[Tensor]) -> float:
    wait(inputs[0].device)
    started = time.perf_counter()
    q, k, v = inputs
    out = attention(q, k, v, name)
    torch.autograd.grad(out, inputs, torch.ones_like(out))
    wait(inputs[0].device)
    return time.perf_counter() - started


def kernel_name(name: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> str:
    """What the profiler calls the longest CUDA kernel of a forward pass."""
    q = torch.randn(shape, dtype=dtype, device=device)
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        attention(q, q, q, name)
        wait(device)
    kernels = sorted(record.key_averages(), key=lambda event: event.device_time_total)
    return kernels[-1].key if kernels else "unknown"


def check_hopper(kernel: str, name: str, device: torch.device) -> None:
    """On Hopper only cuDNN and FlashAttention-3 or later come near its rate: ConfigError for another."""
    if torch.cuda.get_device_capability(device) < HOPPER:
        return
    if not any(part in kernel for part in HOPPER_KERNELS):
        raise ConfigError(
            f'model.attention_backend = "auto": {name} runs {kernel}, which is none of Hopper\'s; install '
            'flash-attn 3 or a torch with cuDNN 9, or set "sdpa" to take what there is'
        )
