"""Part of benchmarks/gpu.sh: vit1b as others write it: the way of a tutorial, and timm's.

    .venv/bin/python benchmarks/gpu_peers.py peers [--rehearse]

Their step is their habit: autocast, three layers for q, k and v, no compile, for-loop Adam, loss.item().
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu_session import Session, Sizes, start_part
from models.embeddings import unpatchify
from planning.architecture import vit_architecture
from training.metrics import peak_tflops

BATCHES = (4, 2, 1)  # the first that fits


class TutorialBlock(nn.Module):
    """Pre-norm block: three projections, SDPA, MLP."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v, self.proj = (nn.Linear(dim, dim) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (
            layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.proj(y)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class TutorialTrunk(nn.Module):
    """fields (B, C, H, W) -> tokens (B, T, D)."""

    def __init__(self, sizes: Sizes, patch: tuple[int, int]) -> None:
        super().__init__()
        self.embed = nn.Conv2d(sizes.variables, sizes.dim, patch, patch)
        self.position = nn.Parameter(torch.zeros(1, sizes.tokens(patch), sizes.dim))
        self.blocks = nn.Sequential(*(TutorialBlock(sizes.dim, sizes.heads[0]) for _ in range(sizes.layers)))
        self.norm = nn.LayerNorm(sizes.dim)

    def forward(self, fields: Tensor) -> Tensor:
        return self.norm(self.blocks(self.embed(fields).flatten(2).transpose(1, 2) + self.position))


class FieldsOut(nn.Module):
    """A trunk with a head that gives fields again."""

    def __init__(self, trunk: nn.Module, sizes: Sizes, patch: tuple[int, int]) -> None:
        super().__init__()
        self.trunk, self.grid, self.patch = trunk, sizes.grid, patch
        self.head = nn.Linear(sizes.dim, sizes.variables * patch[0] * patch[1])

    def forward(self, fields: Tensor) -> Tensor:
        return unpatchify(self.head(self.trunk(fields)), self.grid, self.patch)


class TimmTrunk(nn.Module):
    """timm's VisionTransformer without class token and pooling."""

    def __init__(self, sizes: Sizes, patch: tuple[int, int]) -> None:
        from timm.models.vision_transformer import VisionTransformer  # type: ignore[import-not-found]

        super().__init__()
        shape = {"img_size": sizes.grid, "patch_size": patch, "in_chans": sizes.variables}
        depth = {"embed_dim": sizes.dim, "depth": sizes.layers, "num_heads": sizes.heads[0]}
        self.vit = VisionTransformer(**shape, **depth, num_classes=0, class_token=False, global_pool="")

    def forward(self, fields: Tensor) -> Tensor:
        return self.vit.forward_features(fields)


def peers(session: Session) -> None:
    for name, trunk in {"tutorial's way": TutorialTrunk, "timm": TimmTrunk}.items():
        patch = session.sizes.patches[0]
        what = f"{name}, {session.sizes.tokens(patch)} tokens"
        session.attempt(what, partial(time_peer, session, what, trunk, patch))


def time_peer(session: Session, what: str, trunk: type[nn.Module], patch: tuple[int, int]) -> None:
    """The largest batch that fits counts."""
    sizes = session.sizes
    with session.device:
        model = FieldsOut(trunk(sizes, patch), sizes, patch)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5, foreach=False)
    for batch in BATCHES:
        try:
            seconds = time_batch(session, model, optimizer, batch)
        except torch.cuda.OutOfMemoryError:
            session.free()
            continue
        channels = (sizes.variables, sizes.variables)
        model_of = vit_architecture(sizes.grid, patch, *channels, sizes.dim, sizes.layers, sizes.heads[0])
        flops, peak = 3 * model_of.flops() * batch / seconds, peak_tflops(session.device) * 1e12
        about = {"mfu": flops / peak if peak else None, "batch": batch, "tokens": sizes.tokens(patch)}
        session.add(f"{what}, batch {batch}", batch / seconds, "samples/s", **about)
        return
    raise torch.cuda.OutOfMemoryError("a batch of one does not fit")


def time_batch(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> float:
    shape = (2, batch, session.sizes.variables, *session.sizes.grid)
    fields, target = torch.randn(shape, device=session.device)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(session.device.type, torch.bfloat16):
            loss = F.mse_loss(model(fields), target)
        loss.backward()
        optimizer.step()
        loss.item()

    return session.seconds(step, 1, 3)


if __name__ == "__main__":
    start_part(__doc__, {"peers": peers}, sys.argv[1:])
