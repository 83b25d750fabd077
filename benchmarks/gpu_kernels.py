"""Parts of benchmarks/gpu.sh: attention, matrix products, optimisers and what a block keeps, each alone.

.venv/bin/python benchmarks/gpu_kernels.py attention|products|optimizers|activations [--rehearse]
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_session import Session, start_part
from benchmarks.saved_activations import Case, units
from config import Model
from models.attention import HOPPER, activate, check_backend
from models.attention import attention as rossby_attention
from models.vit import VisionTransformer
from parallelisms.attention_choice import BACKENDS, is_hopper_kernel
from planning.calibration import attention_flops, matmul_flops
from training.optimizers.build import build_adamw, parameter_groups, set_lr

Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]
ATTENTION_NAMES = ("flash", "fmha", "sdpa", "attention", "attn", "cudnn")
ADAM_BYTES = 28  # a parameter: four float32 tensors read, three written


# -- attention


def attention(session: Session) -> None:
    """TFLOP/s forward and backward at both head sizes, and the name of the kernel that ran."""
    sizes, device = session.sizes, session.device
    available = {name: kernel_of(name) for name in BACKENDS[device.type]}
    for patch in sizes.patches:
        for heads in sizes.heads:
            shape = (2, heads, sizes.tokens(patch), sizes.dim // heads)
            for name, kernel in available.items():
                what = f"{name}, {shape[2]} tokens, {heads} x {shape[3]}"
                session.attempt(what, partial(time_attention, session, what, name, kernel, shape))


def kernel_of(backend: str) -> Kernel:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        check_backend(backend, q.device.type, q.dtype)
        activate(backend)
        return rossby_attention(q, k, v, backend)

    return run


def time_attention(session: Session, what: str, name: str, kernel: Kernel, shape: tuple[int, ...]) -> None:
    """q, k and v lie in one tensor, as the model has them."""
    batch, heads, tokens, size = shape
    qkv = torch.randn(batch, tokens, heads, 3, size, dtype=torch.bfloat16, device=session.device)
    inputs = [x.detach().requires_grad_() for x in qkv.permute(3, 0, 2, 1, 4).unbind(0)]
    out = kernel(*inputs)
    gradient = torch.randn_like(out)

    def backward() -> Any:
        return torch.autograd.grad(out, inputs, gradient, retain_graph=True)

    runs = {"forward": lambda: kernel(*inputs), "backward": backward}
    for direction, run in runs.items():
        seconds = session.seconds(run, *session.sizes.steps)
        rate = attention_flops(batch, heads, tokens, size, direction == "backward") / seconds / 1e12
        kernels = longest_kernels(run, session.device)
        about = {"backend": name, "tokens": tokens, "head_dim": size, "direction": direction}
        session.add(f"{what}, {direction}", rate, "TFLOP/s", kernels=kernels, **about)
        if kernels:
            print(f"    {kernels[0][:100]}{'' if of_hopper(kernels) else '  NOT ONE OF HOPPER'}")


def longest_kernels(run: Callable[[], Any], device: torch.device, number: int = 3) -> list[str]:
    """Names of the kernels that a call spends most time in, the longest first; none on a CPU."""
    if device.type != "cuda":
        return []
    return [name for name, _ in kernel_seconds(run)[:number]]


def kernel_seconds(run: Callable[[], Any]) -> list[tuple[str, float]]:
    """(kernel, seconds) of one call on the GPU, the longest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        run()
        torch.cuda.synchronize()
    found = [(event.key, event.device_time_total / 1e6) for event in record.key_averages()]
    return sorted(found, key=lambda pair: -pair[1])


def attention_kernels(names: list[str]) -> list[str]:
    return [name for name in names if any(part in name.lower() for part in ATTENTION_NAMES)]


def of_hopper(kernels: list[str]) -> bool:
    """Whether the first is a kernel of Hopper's own; true on other GPUs, which have none."""
    if torch.cuda.get_device_capability() != HOPPER:
        return True
    return is_hopper_kernel(kernels[0])


# -- matrix products


def products(session: Session) -> None:
    """TFLOP/s of x w^T at the shapes of a block, in bf16 and in float8."""
    rows = session.sizes.rows
    for inputs, outputs in session.sizes.products:
        for precision, product in {"bf16": bf16_product, "float8": float8_product}.items():
            what = f"{precision}, M {rows}, K {inputs}, N {outputs}"

            def measure(shape=(rows, inputs, outputs), what=what, product=product) -> None:
                run = product(*shape, session.device)
                seconds = session.seconds(run, 3, 10)
                session.add(what, matmul_flops(*shape) / seconds / 1e12, "TFLOP/s", inputs=shape[1])

            session.attempt(what, measure)


def bf16_product(m: int, k: int, n: int, device: torch.device) -> Callable[[], Tensor]:
    x, w = (torch.randn(shape, dtype=torch.bfloat16, device=device) for shape in ((m, k), (n, k)))
    return lambda: x @ w.t()


def float8_product(m: int, k: int, n: int, device: torch.device) -> Callable[[], Tensor]:
    x, w = (torch.randn(shape, device=device).to(torch.float8_e4m3fn) for shape in ((m, k), (n, k)))
    one = torch.ones((), device=device)
    scaled_mm = torch.ops.aten._scaled_mm
    return lambda: scaled_mm(x, w.t(), one, one, None, None, torch.bfloat16, True)


# -- optimisers


def optimizers(session: Session) -> None:
    """Milliseconds of an update of some blocks' parameters, and what that takes for all of the model."""
    sizes = session.sizes
    fraction = sizes.optimizer_blocks / sizes.layers
    # On a CPU the compiler takes half a minute for the last.
    for name in ("fused", "8-bit (torchao)") if session.device.type == "cuda" else ("fused",):

        def measure(name=name) -> None:
            with torch.device(session.device):
                shape = Model("vit", sizes.patches[0], sizes.dim, sizes.optimizer_blocks, sizes.heads[0])
                model = VisionTransformer(sizes.variables, sizes.variables, sizes.grid, shape)
            optimizer = build(name, dict(model.named_parameters()))
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            seconds = session.seconds(optimizer.step, *sizes.steps)
            number = sum(p.numel() for p in model.parameters())
            rate = ADAM_BYTES * number / seconds / 1e9
            session.add(f"AdamW {name}, whole model", seconds / fraction, "s", gigabytes_per_second=rate)

        session.attempt(f"AdamW {name}", measure)


def build(name: str, parameters: dict[str, Any]) -> torch.optim.Optimizer:
    if "8-bit" in name:
        from torchao.optim import AdamW8bit

        return AdamW8bit(parameter_groups(parameters, 0.05), lr=1e-6)
    optimizer = build_adamw(parameters, (0.9, 0.95), 1e-8, 0.05)
    set_lr(optimizer, 1e-6)
    return optimizer


# -- activations


def activations(session: Session) -> None:
    """Units of T d that a block of vit1b's width keeps, compiled under autocast."""
    sizes = session.sizes
    for mode in ("none", "selective"):
        case = Case(max(sizes.dim, 64), 2, mode, compiled=sizes.compiled)
        what = f"units of T d kept, {mode}"

        def measure(case=case, what=what) -> None:
            session.add(what, units(case, session.device), "", stated=case.stated, planned=case.planned)

        session.attempt(what, measure)


if __name__ == "__main__":
    parts = {
        "activations": activations,
        "attention": attention,
        "products": products,
        "optimizers": optimizers,
    }
    start_part(__doc__, parts, sys.argv[1:])
