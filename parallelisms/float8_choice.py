"""`float8.recipe = "auto"`: for each shape of matrix the recipe that is fastest here, or none."""

import logging
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel

from config import Compile, Float8
from models.vit import VisionTransformer
from parallelisms.float8 import can_run, convert, float8_layers, mark_recipe
from parallelisms.measured_choice import device_name, kept_or_measured, wait
from parallelisms.mesh import Mesh, from_first_rank
from parallelisms.tensor_parallel import block_plan

logger = logging.getLogger("rossby")
CANDIDATES = ("tensorwise", "rowwise")
PLAIN = "none"  # the matrix stays as it is
LEAST_GAIN = 0.02  # of forward and backward over the plain matrix's: less is noise, and float8 costs accuracy
REPETITIONS, CALLS = 5, 4  # medians of so many timings, each of so many calls
Shape = tuple[int, int, int]  # rows, features in, features out, of a rank
Seconds = dict[str, float]  # recipe -> seconds


def choose_float8(
    model: nn.Module,
    batch: int,
    mesh: Mesh,
    float8: Float8,
    compile: Compile,
    dtype: torch.dtype,
    device: torch.device,
    folder: Path,
) -> dict[str, str]:
    """Marks the matrices that `apply_float8` swaps with their recipes, on all ranks alike; returns name ->
    recipe.

    `batch`: samples that a rank takes through the model at once. Rank 0 measures. Where float8 is emulated
    there is nothing to gain: all matrices are tensorwise. Does nothing where "auto" is not asked for.
    """
    if not float8.enable or float8.recipe != "auto":
        return {}
    assert isinstance(model, VisionTransformer)  # config_checks has looked
    names = float8_layers(model, float8.filter_min_features, mesh.degrees.tp)
    rows = batch * math.ceil(model.num_tokens / mesh.degrees.cp)
    shapes = {name: rank_shape(model, name, rows, mesh.degrees.tp) for name in names}
    if float8.emulate:
        logger.info('float8: nothing to measure, it is emulated; "tensorwise" for all matrices')
        chosen = dict.fromkeys(shapes.values(), "tensorwise")
    else:
        distinct = sorted(set(shapes.values()))
        key = {"shapes": [list(shape) for shape in distinct], "compiled": compile.enable}
        key |= {"dtype": str(dtype), "device": device_name(device)}
        path = folder / "float8.json"
        found = from_first_rank(
            lambda: kept_or_measured(path, key, lambda: choose(distinct, compile.enable, dtype, device))
        )
        chosen = dict(zip(distinct, found["recipes"], strict=True))
    for name, shape in shapes.items():
        mark_recipe(model, name, chosen[shape])
    if set(chosen.values()) == {PLAIN}:
        logger.warning("float8: no matrix gains from it here: all stay as they are")
    return {name: chosen[shape] for name, shape in shapes.items()}


def rank_shape(model: nn.Module, name: str, rows: int, tensor_parallel_degree: int) -> Shape:
    """What a rank multiplies: rows, and its part of the features in and out."""
    features_out, features_in = model.get_submodule(name).weight.shape  # type: ignore[union-attr, misc]
    by_columns = isinstance(block_plan()[name.split(".", 2)[2]], ColwiseParallel)
    tp_in, tp_out = (1, tensor_parallel_degree) if by_columns else (tensor_parallel_degree, 1)
    return rows, int(features_in) // tp_in, int(features_out) // tp_out


def choose(shapes: list[Shape], compiled: bool, dtype: torch.dtype, device: torch.device) -> dict[str, list]:
    """The recipe of each shape, and seconds of all."""
    seconds = [measure(shape, compiled, dtype, device) for shape in shapes]
    recipes = [fastest(found) for found in seconds]
    for shape, found, recipe in zip(shapes, seconds, recipes, strict=True):
        times = ", ".join(f"{name} {1e3 * value:.3f} ms" for name, value in found.items())
        logger.info(f"float8: {' x '.join(map(str, shape))}: {recipe} ({times}, forward and backward)")
    return {"recipes": recipes, "seconds": seconds}


def fastest(seconds: Seconds) -> str:
    """The fastest recipe whose gain is worth it."""
    name = min(seconds, key=lambda recipe: seconds[recipe])
    return name if seconds[PLAIN] / seconds[name] - 1 > LEAST_GAIN else PLAIN


def measure(
    shape: Shape, compiled: bool, dtype: torch.dtype, device: torch.device, emulate: bool = False
) -> Seconds:
    """Seconds of forward and backward, medians of interleaved repetitions, of the recipes that run here.

    A matrix alone, without what compile would fuse its scaling with in the model: rather too little gain.
    """
    x, gradient = (torch.randn(shape[0], n, dtype=dtype, device=device) for n in shape[1:])
    calls: dict[str, Callable[[], object]] = {}
    for recipe in (PLAIN, *(name for name in CANDIDATES if emulate or can_run(name, device.type))):
        try:
            layer = build_layer(shape, recipe, dtype, device, emulate)
            call = forward_backward(layer, compiled, x, gradient)
            seconds_of(call, device)  # compiles
            calls[recipe] = call
        except RuntimeError as error:  # torch's, of a shape that a float8 matmul does not take
            if recipe == PLAIN:
                raise
            logger.info(f"float8: {recipe} does not run on {shape}: {str(error).splitlines()[0]}")
    times: dict[str, list[float]] = {recipe: [] for recipe in calls}
    for _ in range(REPETITIONS):
        for recipe, call in calls.items():
            times[recipe].append(seconds_of(call, device))
    if compiled:
        torch._dynamo.reset()  # these compilations count towards the limit of those to come
    return {recipe: statistics.median(found) for recipe, found in times.items()}


def build_layer(
    shape: Shape, recipe: str, dtype: torch.dtype, device: torch.device, emulate: bool
) -> nn.Module:
    holder = nn.Sequential(nn.Linear(*shape[1:], device=device, dtype=dtype))
    if recipe != PLAIN:
        convert(holder, ["0"], recipe, emulate)
    return holder[0]


def forward_backward(layer: nn.Module, compiled: bool, x: Tensor, gradient: Tensor) -> Callable[[], object]:
    def forward(x: Tensor) -> Tensor:  # the layer itself is torch's code, which its compiler passes over
        return layer(x)

    product = torch.compile(forward, fullgraph=True, dynamic=False) if compiled else forward
    x = x.requires_grad_()
    return lambda: torch.autograd.grad(product(x), [x, *layer.parameters()], gradient)


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    wait(device)
    started = time.perf_counter()
    for _ in range(CALLS):
        call()
    wait(device)
    return (time.perf_counter() - started) / CALLS
