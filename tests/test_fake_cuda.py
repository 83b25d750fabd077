"""Precisions and devices of forward and update as on a GPU: with fake CUDA tensors, which need no GPU.

A fake backward does not run without one: torch's engine looks for the device. Where tensors are changed in
place torch has to be built for CUDA.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore

from config import Model, Training
from models.attention import Kernel
from models.vit import LayerNorm, VisionTransformer
from training.bad_steps import BadSteps
from training.gradients import LossScaler
from training.state import Progress, TrainState
from training.step import update_weights

HALF = torch.bfloat16
BUILT = torch.backends.cuda.is_built()
in_place = pytest.mark.skipif(not BUILT, reason="changes fake CUDA tensors in place: needs a torch for CUDA")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTensorMode]:
    """Tensors are fake, and autocast believes that there is a GPU."""
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        yield fake


@pytest.fixture
def two_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def dtypes(model: nn.Module, kinds: tuple[type, ...], inputs: Tensor) -> dict[str, set[torch.dtype]]:
    """Of what goes into modules of these kinds and comes out of them, by name, in a pass under autocast."""
    found: dict[str, set[torch.dtype]] = {}

    def watch(name: str, module: nn.Module) -> None:
        def note(_: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            found[name] = {tensor.dtype for tensor in (*arguments, output)}

        module.register_forward_hook(note)

    for name, module in model.named_modules():
        if isinstance(module, kinds):
            watch(name, module)
    with torch.no_grad(), torch.autocast("cuda", HALF):
        model(inputs)
    return found


@pytest.mark.parametrize("qk_norm", (False, True))
def test_attention_and_norms_see_one_precision(gpu: FakeTensorMode, qk_norm: bool) -> None:
    """FlashAttention refuses a mixture of float32 and bf16; between ranks float32 is twice the bytes."""
    with torch.device("meta"), unset_fake_temporarily():
        model = VisionTransformer(3, 2, (8, 16), Model("vit", (4, 4), 32, 2, 2, qk_norm=qk_norm))
    found = dtypes(
        model.to_empty(device="cuda").requires_grad_(False),
        (Kernel, LayerNorm),
        torch.empty(2, 8, 48, device="cuda"),
    )
    assert len(found) == 2 * (5 if qk_norm else 3) + 1
    assert set(map(frozenset, found.values())) == {frozenset({HALF})}, found


@in_place
@pytest.mark.parametrize("spike_threshold", (0.0, 5.0))
def test_an_update_whose_gradients_are_on_the_host(
    two_ranks: None, gpu: FakeTensorMode, spike_threshold: float
) -> None:
    """parallelism.cpu_offload: the loss is on the device, and so is what is logged beside it."""
    device, host = torch.device("cuda"), torch.device("cpu")
    parameter = nn.Parameter(torch.empty(4, 4, device=host), requires_grad=False)
    parameter.grad = torch.empty(4, 4, device=host)
    optimizer = torch.optim.AdamW([parameter], lr=0.0, fused=True)
    bad_steps = BadSteps(Training(spike_threshold=spike_threshold), device)
    state = TrainState({"weight": parameter}, optimizer, LossScaler(False), None, Progress(), bad_steps)
    model = SimpleNamespace(parameters={"weight": parameter}, pipeline_group=None, after_update=lambda: None)
    run: Any = SimpleNamespace(assembly=SimpleNamespace(model=model), state=state, max_norm=1.0)
    run.learning_rate, run.checkpointer = lambda step: 1e-3, None
    loss = torch.empty((), device=device)
    norm = update_weights(run, 1, loss)
    assert norm.device == loss.device  # training/metrics.py stacks them
    assert optimizer.found_inf.device == host  # type: ignore[attr-defined]
    assert {tensor.device.type for tensor in bad_steps.window.values()} == {"cuda"}
