"""The attention kernel of `model.attention_backend = "auto"`: the fastest one, measured when a run starts.

Rank 0 measures on the shape of this run and stores the choice in the run's folder: a resumed run is then
bit-exact, and a forecast uses the kernel of the training.
"""

import json
import logging
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from errors import DataError
from jobs.durable_files import write_durably
from models.attention import HOPPER, activate, attention, check_backend, use_backend
from models.weather_model import TokenModel
from parallelisms.degrees import Degrees
from parallelisms.mesh import from_first_rank

logger = logging.getLogger("rossby")
BACKENDS = {"cpu": ("sdpa", "math"), "cuda": ("sdpa", "cudnn", "flash", "flash3", "flash4", "flash_attn")}
REPETITIONS, CALLS = 5, 4  # medians of so many timings, each of so many calls
MAX_SCORES = 2**28  # bytes of the T x T scores that "math" may save for each block
# In names of kernels for Hopper: cuDNN's, FlashAttention-3's and -4's; SDPA's flash is for Ampere.
HOPPER_KERNELS = ("cudnn", "sm90", "flash_fwd_hopper", "flash_attncute")
Shape = tuple[int, int, int, int]  # (B, N, T, E) of a rank


def choose_attention(
    model: TokenModel,
    batch: int,
    degrees: Degrees,
    dtype: torch.dtype,
    device: torch.device,
    file: Path,
    for_training: bool = True,
) -> str:
    """Set the kernel of all blocks, equal on all ranks, and return its name.

    A training uses the choice in `file` if it was measured for the same shape, type and device, else it
    measures and writes the file. A forecast, which may have another shape, only asks for the same device, and
    writes nothing: a kernel of another kind of device is no choice.
    """
    head_dim = int(model.get_submodule("blocks.0.attention").head_dim)  # type: ignore[arg-type]
    heads = max(model.dim // head_dim // (degrees.tp * degrees.cp), 1)
    shape = (batch, heads, model.num_tokens, head_dim)
    key: dict[str, Any] = {"device": device_name(device)}
    if for_training:
        key |= {"shape": list(shape), "dtype": str(dtype)}

    def stored_or_measured() -> str:
        stored = read_choice(file)
        if stored and all(stored.get(entry) == value for entry, value in key.items()):
            return stored["backend"]
        seconds = fastest_backends(shape, dtype, device)
        backend = next(iter(seconds))
        if for_training:
            write_durably(file, json.dumps(key | {"backend": backend, "seconds": seconds}, indent=1) + "\n")
        return backend

    backend = from_first_rank(stored_or_measured)
    check_backend(backend, device.type, dtype)
    use_backend(model, backend)
    return backend


def read_choice(path: Path) -> dict[str, Any] | None:
    """Return a stored choice, None if there is none. Raises DataError if the file is damaged."""
    try:
        choice = json.loads(path.read_text()) if path.exists() else {}
        if not isinstance(choice, dict) or (choice and "backend" not in choice):
            raise ValueError("no JSON object with a backend")
    except (OSError, ValueError) as error:
        reason = f"is damaged or cannot be read ({error})"
        raise DataError(f"{path}: {reason}; remove it, and the next start measures again") from None
    return choice or None


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def fastest_backends(shape: Shape, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Return seconds of each backend, the fastest first. Warns if it is not a kernel for a Hopper GPU."""
    seconds = measure_attention(shape, dtype, device)
    seconds = dict(sorted(seconds.items(), key=lambda item: item[1]))
    name, times = next(iter(seconds)), ", ".join(f"{n} {1e3 * s:.3f} ms" for n, s in seconds.items())
    logger.info(f"attention: {name} ({times}, of {' x '.join(map(str, shape))})")
    if device.type == "cuda":
        kernel = kernel_name(name, shape, dtype, device)
        logger.info(f"attention: kernel {kernel}")
        if dtype != torch.float32:  # for which Hopper has no kernel of its own
            warn_about_kernel(kernel, name, device)
    return seconds


def measure_attention(shape: Shape, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Return seconds of forward and backward of the backends that run on this machine with these inputs."""
    inputs = [torch.randn(shape, dtype=dtype, device=device).requires_grad_() for _ in range(3)]
    times: dict[str, list[float]] = {}
    for name in BACKENDS[device.type]:
        if name == "math" and math.prod(shape[:3]) * shape[2] * inputs[0].element_size() > MAX_SCORES:
            continue
        try:
            check_backend(name, device.type, dtype)
            forward_backward(name, inputs)
        except Exception as error:  # of torch or of a package whose version does not fit torch's
            logger.info(f"attention: {name} does not run here: {(str(error).splitlines() or [''])[0]}")
            continue
        times[name] = []
    for _ in range(REPETITIONS):  # interleaved, so that drift of the clock affects all alike
        for name, seconds in times.items():
            forward_backward(name, inputs)  # the cost of switching is not part of the time
            started = synchronized_time(device)
            for _ in range(CALLS):
                forward_backward(name, inputs)
            seconds.append((synchronized_time(device) - started) / CALLS)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def synchronized_time(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def forward_backward(name: str, inputs: list[Tensor]) -> None:
    activate(name)
    q, k, v = inputs
    out = attention(q, k, v, name)
    torch.autograd.grad(out, inputs, torch.ones_like(out))


def kernel_name(name: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> str:
    """Return the profiler's name of the longest CUDA kernel of a forward pass."""
    q = torch.randn(shape, dtype=dtype, device=device)
    activate(name)
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        attention(q, q, q, name)
        torch.cuda.synchronize(device)
    kernels = sorted(record.key_averages(), key=lambda event: event.device_time_total)
    return kernels[-1].key if kernels else "unknown"


def warn_about_kernel(kernel: str, name: str, device: torch.device) -> None:
    """On Hopper only cuDNN and FlashAttention-3 or later come near its peak."""
    if torch.cuda.get_device_capability(device) >= HOPPER and not is_hopper_kernel(kernel):
        logger.warning(
            f'model.attention_backend = "auto": the fastest here, {name}, runs {kernel}, which is no kernel '
            "for Hopper; FlashAttention-3 or a torch with cuDNN 9 would be faster"
        )


def is_hopper_kernel(kernel: str) -> bool:
    return any(part in kernel.lower() for part in HOPPER_KERNELS)
