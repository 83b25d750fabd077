"""What is measured when a run starts: `model.attention_backend = "auto"`, `float8.recipe = "auto"`.

Rank 0 measures on the shapes of this run and keeps what it found in the run's folder: a resumed run repeats
the bits of one that was not stopped, and a forecast takes the kernel and the recipes of the run.
"""

import json
import logging
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.profiler import ProfilerActivity, profile

from config import Float8
from errors import ConfigError, DataError
from jobs.durable_files import write_durably
from models.attention import HOPPER, activate, attention, check_backend, use_backend
from models.weather_model import TokenModel
from parallelisms.degrees import Degrees
from parallelisms.float8 import can_run, convert, float8_layers, mark_recipe
from parallelisms.mesh import from_first_rank
from parallelisms.tensor_parallel import block_plan

logger = logging.getLogger("rossby")
REPETITIONS, CALLS = 5, 4  # medians of so many timings, each of so many calls
Seconds = dict[str, float]  # candidate -> seconds of forward and backward


class Choices:
    """Where what was measured is kept: in `folder`, as <name>.json.

    fixed: what stands there counts whatever it was measured for, and nothing is written: a forecast's.
    """

    def __init__(self, folder: Path, fixed: bool = False) -> None:
        self.folder, self.fixed = folder, fixed

    def get(self, name: str, key: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What is kept, where it was measured for the same `key`, else what `measure` finds; on all ranks."""
        return from_first_rank(lambda: self._kept(name, key) or self._measured(name, key, measure))

    def _kept(self, name: str, key: dict[str, Any]) -> dict[str, Any] | None:
        found = read_choice(self.folder / f"{name}.json")
        same = found and {entry: found.get(entry) for entry in key} == key
        return found if same or self.fixed else None

    def _measured(
        self, name: str, key: dict[str, Any], measure: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        found = measure()
        if not self.fixed:
            write_durably(self.folder / f"{name}.json", json.dumps(key | found, indent=1) + "\n")
        return found


def read_choice(path: Path) -> dict[str, Any] | None:
    """Return a stored choice, None if there is none. Raises DataError if the file is damaged."""
    try:
        found = json.loads(path.read_text()) if path.exists() else {}
        if not isinstance(found, dict):
            raise ValueError("no JSON object")
    except (OSError, ValueError) as error:
        reason = f"is damaged or cannot be read ({error})"
        raise DataError(f"{path}: {reason}; remove it, and the next start measures again") from None
    return found or None


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleaved_medians(calls: dict[str, Callable[[], object]], device: torch.device) -> Seconds:
    """Seconds of each call, by turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(REPETITIONS):
        for name, call in calls.items():
            call()  # what changing from one to the other takes is not theirs
            wait(device)
            started = time.perf_counter()
            for _ in range(CALLS):
                call()
            wait(device)
            times[name].append((time.perf_counter() - started) / CALLS)
    return {name: statistics.median(found) for name, found in times.items()}


def described(seconds: Seconds) -> str:
    return ", ".join(f"{name} {1e3 * value:.3f} ms" for name, value in seconds.items())


# -- attention -----------------------------------------------------------------------------------------

BACKENDS = {"cpu": ("sdpa", "math"), "cuda": ("sdpa", "cudnn", "flash", "flash3", "flash4", "flash_attn")}
MAX_SCORES = 2**28  # bytes of the T x T scores that "math" may keep for each block
# In names of kernels of Hopper's own: cuDNN's, FlashAttention-3's and -4's; SDPA's flash is Ampere's.
HOPPER_KERNELS = ("cudnn", "sm90", "flash_fwd_hopper", "flash_attncute")
Heads = tuple[int, int, int, int]  # (B, N, T, E) of a rank


def choose_attention(
    model: TokenModel,
    batch: int,
    degrees: Degrees,
    dtype: torch.dtype,
    device: torch.device,
    choices: Choices,
) -> str:
    """Sets the kernel of all blocks, the same on all ranks, and returns its name."""
    head_dim = int(model.get_submodule("blocks.0.attention").head_dim)  # type: ignore[arg-type]
    heads = max(model.dim // head_dim // (degrees.tp * degrees.cp), 1)
    sequences, tokens = model.attention_shape
    shape = (batch * sequences, heads, tokens, head_dim)
    key = {"shape": list(shape), "dtype": str(dtype), "device": device_name(device)}
    found = choices.get("attention", key, lambda: fastest_backend(shape, dtype, device))
    check_backend(found["backend"], device.type, dtype)
    use_backend(model, found["backend"])
    return found["backend"]


def fastest_backend(shape: Heads, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """The fastest backend, and seconds of all. Warns where it is not what a Hopper should run."""
    seconds = measure_attention(shape, dtype, device)
    name = min(seconds, key=lambda backend: seconds[backend])
    logger.info(f"attention: {name} ({described(seconds)}, of {' x '.join(map(str, shape))})")
    if device.type == "cuda":
        kernel = kernel_name(name, shape, dtype, device)
        logger.info(f"attention: kernel {kernel}")
        if dtype != torch.float32:  # for which Hopper has no kernel of its own
            warn_of(kernel, name, device)
    return {"backend": name, "seconds": seconds}


def measure_attention(shape: Heads, dtype: torch.dtype, device: torch.device) -> Seconds:
    """Of the backends that this machine has and that take these inputs."""
    inputs = [torch.randn(shape, dtype=dtype, device=device).requires_grad_() for _ in range(3)]
    calls: dict[str, Callable[[], object]] = {}
    for name in BACKENDS[device.type]:
        if name == "math" and math.prod(shape[:3]) * shape[2] * inputs[0].element_size() > MAX_SCORES:
            continue
        call = attention_call(name, inputs)
        try:
            check_backend(name, device.type, dtype)
            call()
        except (ConfigError, RuntimeError, ImportError) as error:  # RuntimeError: "no available kernel"
            logger.info(f"attention: {name} does not run here: {str(error).splitlines()[0]}")
            continue
        calls[name] = call
    return interleaved_medians(calls, device)


def attention_call(name: str, inputs: list[Tensor]) -> Callable[[], object]:
    def call() -> object:
        activate(name)
        q, k, v = inputs
        out = attention(q, k, v, name)
        return torch.autograd.grad(out, inputs, torch.ones_like(out))

    return call


def kernel_name(name: str, shape: Heads, dtype: torch.dtype, device: torch.device) -> str:
    """What the profiler calls the longest CUDA kernel of a forward pass."""
    q = torch.randn(shape, dtype=dtype, device=device)
    activate(name)
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        attention(q, q, q, name)
        wait(device)
    kernels = sorted(record.key_averages(), key=lambda event: event.device_time_total)
    return kernels[-1].key if kernels else "unknown"


def warn_of(kernel: str, name: str, device: torch.device) -> None:
    """On Hopper only cuDNN and FlashAttention-3 or later come near its rate."""
    if torch.cuda.get_device_capability(device) >= HOPPER and not is_of_hopper(kernel):
        logger.warning(
            f'model.attention_backend = "auto": the fastest here, {name}, runs {kernel}, which is none of '
            "Hopper's; FlashAttention-3 or a torch with cuDNN 9 would be faster"
        )


def is_of_hopper(kernel: str) -> bool:
    return any(part in kernel.lower() for part in HOPPER_KERNELS)


# -- float8 --------------------------------------------------------------------------------------------

RECIPES = ("tensorwise", "rowwise")
PLAIN = "none"  # the matrix stays as it is
LEAST_GAIN = 0.02  # of forward and backward over the plain matrix's: less is noise, and float8 costs accuracy
Matrix = tuple[int, int, int]  # rows, features in, features out, of a rank


def choose_float8(
    model: TokenModel,
    batch: int,
    degrees: Degrees,
    float8: Float8,
    compiled: bool,
    dtype: torch.dtype,
    device: torch.device,
    choices: Choices,
) -> dict[str, str]:
    """Marks the matrices that `apply_float8` swaps with their recipes; returns name -> recipe.

    `batch`: samples that a rank takes through the model at once. Where float8 is emulated there is nothing to
    gain: all matrices are tensorwise.
    """
    names = float8_layers(model, float8.filter_min_features, degrees.tp)
    rows = batch * math.ceil(model.num_tokens / degrees.cp)
    shapes = {name: rank_shape(model, name, rows, degrees.tp) for name in names}
    key = {"shapes": [list(shape) for shape in sorted(set(shapes.values()))], "compiled": compiled}
    key |= {"dtype": str(dtype), "device": device_name(device), "emulated": float8.emulate}

    def measure() -> dict[str, Any]:
        if float8.emulate:
            logger.info('float8: nothing to measure, it is emulated; "tensorwise" for all matrices')
            return {"recipes": dict.fromkeys(names, "tensorwise")}
        return fastest_recipes(shapes, compiled, dtype, device)

    recipes = choices.get("float8", key, measure)["recipes"]
    for name, recipe in recipes.items():
        mark_recipe(model, name, recipe)
    if set(recipes.values()) == {PLAIN}:
        logger.warning("float8: no matrix gains from it here: all stay as they are")
    return recipes


def rank_shape(model: nn.Module, name: str, rows: int, tensor_parallel_degree: int) -> Matrix:
    """What a rank multiplies: rows, and its part of the features in and out."""
    features_out, features_in = model.get_submodule(name).weight.shape  # type: ignore[union-attr, misc]
    by_columns = isinstance(block_plan()[name.split(".", 2)[2]], ColwiseParallel)
    tp_in, tp_out = (1, tensor_parallel_degree) if by_columns else (tensor_parallel_degree, 1)
    return rows, int(features_in) // tp_in, int(features_out) // tp_out


def fastest_recipes(
    shapes: dict[str, Matrix], compiled: bool, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """The recipe of each matrix, measured once for each shape."""
    chosen: dict[Matrix, str] = {}
    for shape in sorted(set(shapes.values())):
        seconds = measure_float8(shape, compiled, dtype, device)
        chosen[shape] = worthwhile(seconds)
        logger.info(f"float8: {' x '.join(map(str, shape))}: {chosen[shape]} ({described(seconds)})")
    return {"recipes": {name: chosen[shape] for name, shape in shapes.items()}}


def worthwhile(seconds: Seconds) -> str:
    """The fastest recipe whose gain is worth it."""
    name = min(seconds, key=lambda recipe: seconds[recipe])
    return name if seconds[PLAIN] / seconds[name] - 1 > LEAST_GAIN else PLAIN


def measure_float8(
    shape: Matrix, compiled: bool, dtype: torch.dtype, device: torch.device, emulate: bool = False
) -> Seconds:
    """Of the recipes that run here.

    A matrix alone, without what compile would fuse its scaling with in the model: rather too little gain.
    """
    x, gradient = (torch.randn(shape[0], n, dtype=dtype, device=device) for n in shape[1:])
    calls: dict[str, Callable[[], object]] = {}
    for recipe in (PLAIN, *(name for name in RECIPES if emulate or can_run(name, device.type))):
        try:
            layer = build_layer(shape, recipe, dtype, device, emulate)
            call = matrix_call(layer, compiled, x, gradient)
            call()
            calls[recipe] = call
        except RuntimeError as error:  # torch's, of a shape that a float8 matmul does not take
            if recipe == PLAIN:
                raise
            logger.info(f"float8: {recipe} does not run on {shape}: {str(error).splitlines()[0]}")
    seconds = interleaved_medians(calls, device)
    if compiled:
        torch._dynamo.reset()  # these compilations count towards the limit of those to come
    return seconds


def build_layer(
    shape: Matrix, recipe: str, dtype: torch.dtype, device: torch.device, emulate: bool
) -> nn.Module:
    holder = nn.Sequential(nn.Linear(*shape[1:], device=device, dtype=dtype))
    if recipe != PLAIN:
        convert(holder, ["0"], recipe, emulate)
    return holder[0]


def matrix_call(layer: nn.Module, compiled: bool, x: Tensor, gradient: Tensor) -> Callable[[], object]:
    def forward(x: Tensor) -> Tensor:  # the layer itself is torch's code, which its compiler passes over
        return layer(x)

    product = torch.compile(forward, fullgraph=True, dynamic=False) if compiled else forward
    x = x.requires_grad_()
    return lambda: torch.autograd.grad(product(x), [x, *layer.parameters()], gradient)
