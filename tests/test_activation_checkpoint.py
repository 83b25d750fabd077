"""Activation checkpointing: bytes kept, work repeated, and the same gradients to the last bit."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from config import ActivationCheckpoint, Float8, Lora, Model
from models.initialization import init_weights
from models.lora import apply_lora
from models.vit import VisionTransformer
from parallelisms.activation_checkpoint import apply_activation_checkpoint
from parallelisms.compile import apply_compile
from parallelisms.degrees import Degrees
from parallelisms.float8 import apply_float8
from planning.memory import block_activations, unit_bytes
from planning.workload import Workload, architecture_of

RECOMPUTING = ("full", "every_n_blocks", "selective")
MODES = ("none", *RECOMPUTING)
B, T, D, HEADS = 2, 512, 128, 4
PRECISIONS = {
    "float32": (torch.float32, False),
    "bfloat16": (torch.bfloat16, False),
    "autocast": (None, True),
}


pytestmark = pytest.mark.usefixtures("no_compilations")


def build(mode: str, layers: int = 4, float8: bool = False, compiled: bool = False, **options):
    model = VisionTransformer(2, 2, (16, 32), Model("vit", (1, 1), D, layers, HEADS, **options))
    init_weights(model, seed=0)
    if float8:
        apply_float8(model, Float8(), "cpu")
    apply_activation_checkpoint(model, ActivationCheckpoint(mode), compiled=compiled)  # type: ignore[arg-type]
    return model


KEYS = torch.arange(B)  # of the samples, for stochastic depth


def patches(dtype: torch.dtype | None = None) -> Tensor:
    return torch.randn(B, T, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float32).to(dtype)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model(patches(), KEYS).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# -- bytes


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


def units_alive(mode: str, precision: str = "float32", **options) -> float:
    """A block's bytes in units of T d: the difference of six blocks and four, of which two are a segment."""
    dtype, autocast = PRECISIONS[precision]
    kept = [bytes_alive(build(mode, n, **options).to(dtype), patches(dtype), autocast, KEYS) for n in (6, 4)]
    return (kept[0] - kept[1]) / 2 / (B * T * D * (4 if precision == "float32" else 2))


def planned_units(mode: str, **options) -> float:
    """Planned activations of a block, in the same units."""
    model = architecture_of(Model("vit", (1, 1), D, 4, HEADS, **options), (16, 32), 2, 2)
    attention = options.get("attention_backend", "sdpa")
    work = Workload(model, Degrees(), B, B, ac_mode=mode, attention=attention)
    return block_activations(work, mode) / unit_bytes(work)


OTHERS: list[dict[str, Any]] = [{"mlp_dim": 2 * D}, {"qk_norm": True}, {"position": "rotary"}]
OTHERS += [{"stochastic_depth": 0.5}]
UNITS = [(mode, precision, {}) for precision in PRECISIONS for mode in MODES]
for storing in ("none", "selective"):
    UNITS += [
        (storing, each, {"attention_backend": "math"}) for each in ("float32", "autocast")
    ]  # its scores
    UNITS += [(storing, "float32", options) for options in OTHERS]


@pytest.mark.parametrize(("mode", "precision", "options"), UNITS)
def test_a_block_keeps_what_is_stated(mode: str, precision: str, options: dict[str, Any]) -> None:
    found, tolerance = units_alive(mode, precision, **options), 0.02 if options in OTHERS else 0.01
    assert found == pytest.approx(planned_units(mode, **options), rel=tolerance)


def test_outputs_of_adapters_are_computed_again() -> None:
    """They are as large as those of the matrices: with both, "selective" kept more than "none"."""

    def kept(layers: int) -> int:
        model = build("none", layers)
        apply_lora(model, Lora(rank=4))
        apply_activation_checkpoint(model, ActivationCheckpoint("selective"))
        return bytes_alive(model, patches(), False)

    units = (kept(4) - kept(2)) / 2 / (B * T * D * 4)
    assert units == pytest.approx(planned_units("selective"), abs=0.3)


def test_float8_keeps_one_unit_more() -> None:
    kept = planned_units("selective") + 1
    assert units_alive("selective", float8=True) == pytest.approx(kept, rel=0.01)


@pytest.mark.parametrize("mode", MODES)
def test_compiled_blocks_keep_the_same(mode: str) -> None:
    """Of what autograd saves, each storage once, without parameters."""

    def kept(layers: int) -> int:
        model, saved = build("none", layers), {}
        apply_activation_checkpoint(model, ActivationCheckpoint(mode), compiled=True)  # type: ignore[arg-type]
        torch._dynamo.reset()
        apply_compile(model, backend="aot_eager_decomp_partition")
        own = {p.untyped_storage()._cdata for p in model.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            saved[tensor.untyped_storage()._cdata] = tensor
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            model(patches())
        return sum(t.untyped_storage().nbytes() for key, t in saved.items() if key not in own)

    units = (kept(6) - kept(4)) / 2 / (B * T * D * 4)
    assert units == pytest.approx(planned_units(mode), rel=0.02)


# -- work


class Operations(TorchDispatchMode):
    """Operations of matmuls in units of T d^2, and calls of attention's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.matmuls, self.attentions = 0.0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]
        if name in ("aten::mm", "aten::addmm", "aten::bmm"):
            inner = args[-1].shape[-2]
            self.matmuls += 2 * out.numel() * inner / (B * T * D**2)
        self.attentions += name == "aten::_scaled_dot_product_flash_attention_for_cpu"
        return out


def backward_work(mode: str, layers: int, **options) -> tuple[float, int]:
    loss = build(mode, layers, **options)(patches(), KEYS).square().mean()
    with Operations() as operations:
        loss.backward()
    return operations.matmuls, operations.attentions


@pytest.mark.parametrize(
    ("mode", "matmuls", "attentions"),
    # A block's forward: 24 T d^2 in its four matrices; the last, 8, is not needed again.
    [("none", 0, 0), ("selective", 0, 0), ("full", 16, 1), ("every_n_blocks", (24 + 16) / 2, 1)],
)
@pytest.mark.parametrize("stochastic_depth", (0.0, 0.5))
def test_work_repeated_per_block(mode: str, matmuls: float, attentions: int, stochastic_depth: float) -> None:
    six, four = (backward_work(mode, n, stochastic_depth=stochastic_depth) for n in (6, 4))
    assert (six[0] - four[0]) / 2 - 48 == pytest.approx(matmuls)  # backward itself: twice 24
    assert (six[1] - four[1]) / 2 == attentions


def test_selective_repeats_no_matmul_of_math_attention_or_float8() -> None:
    for options in ({"attention_backend": "math"}, {"float8": True}):
        assert backward_work("selective", 2, **options) == backward_work("none", 2, **options)


# -- the same numbers


@pytest.mark.parametrize("mode", RECOMPUTING)
@pytest.mark.parametrize(
    "options", ({"stochastic_depth": 0.5}, {"attention_backend": "math", "qk_norm": True})
)
def test_gradients_are_those_without_it(mode: str, options: dict) -> None:
    """Bit-exact, with samples that blocks drop."""
    plain, recomputed = (gradients(build(m, layers=3, **options)) for m in ("none", mode))
    assert list(plain) == list(recomputed)
    for name in plain:
        assert torch.equal(plain[name], recomputed[name]), name
