"""A training step of Rossby against the NERSC tutorial's and timm's ViT, on this machine's CPU.

    .venv/bin/python benchmarks/step_time.py --tutorial DIR [--dims 384 768] [--alternations 7]
    .venv/bin/python benchmarks/step_time.py windows [--tokens 2048 8192]

DIR holds github.com/NERSC/sc24-dl-tutorial (networks/, utils/); timm has to be importable, or it is left out.
The tutorial's task: 20 channels on 64 x 128, patch 8, 12 blocks, 8 heads, batch 16, its relative L2 loss; a
step goes from fields to updated weights. The others' steps are the tutorial's (autocast, loss, backward,
Adam, loss.item()), as it begins, and as it ends: compiled, with fused Adam. Rossby's cuts fields into
patches, clips, and uses fused AdamW; its process keeps freed memory, as train.py's does. Rossby and the
others have processes of their own and take turns; medians. Ends with 1 above what is asked: 0.95 x in
float32 and 0.75 x in bf16 of the fastest of the others.

windows: one block, forward and backward, in bands of rows, strips of columns and squares against all tokens,
in turn. Ends with 1 if bands and strips together are not 1.3 x as fast at 2,048 tokens and 2 x at 8,192.
"""

import argparse
import importlib.util
import math
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import Tensor, nn

from benchmarks.random_run import RandomRun
from benchmarks.results_file import clock, in_turns, parse, record, table
from config import Compile, Config, Model, Optimizer, Training
from models.attention import preferred_backend, use_backend
from models.embeddings import unpatchify
from models.initialization import init_weights
from models.vit import VisionTransformer
from planning.architecture import architecture_of
from tests.distributed import Ranks
from training.batches import Batch
from training.process_settings import retain_memory

GRID, PATCH, CHANNELS, LAYERS, HEADS, BATCH = (64, 128), (8, 8), 20, 12, 8, 16
COLUMNS = {"dim": ">4", "dtype": ">10", "side": ">33", "seconds": ">9.3f", "gflops": ">9.0f"}
COLUMNS |= {"ratio": ">9.2f", "limit": ">7.2f"}
LIMITS = {"float32": 0.95, "bfloat16": 0.75}
TAUGHT = ", compiled, fused Adam"  # the last rung of the tutorial
STEPS: dict[str, Callable[[], float]] = {}  # of this process: side -> a step, which gives its loss


class Rossby(RandomRun):
    """train.py's step without reading: fields, patches, forward, backward, norm, clipping, fused AdamW."""

    def __init__(self, dim: int, dtype: Any, backend: Any, compiled: bool) -> None:
        config = Config(
            model=Model("vit", PATCH, dim, LAYERS, HEADS, attention_backend=backend, predict="state"),
            optimizer=Optimizer(lr=1e-4, weight_decay=0.0),
            training=Training(local_batch_size=BATCH, mixed_precision_param=dtype, loss="relative_l2"),
            compile=Compile(compiled),
        )
        super().__init__(config, GRID, CHANNELS, torch.device("cpu"))
        self.batches = [Batch(torch.stack(batch(), dim=1), torch.zeros(BATCH, dtype=torch.int64))]


class Peer:
    """A model on fields, with the tutorial's loop around it; `taught`: with compile and fused Adam."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Tensor],
        fields: Tensor,
        target: Tensor,
        dtype: str,
        taught: bool,
    ) -> None:
        self.model, self.loss = torch.compile(model) if taught else model, loss
        self.fields, self.target = fields, target
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-5, betas=(0.9, 0.95), fused=taught)
        self.autocast = torch.autocast(fields.device.type, torch.bfloat16, enabled=dtype == "bfloat16")

    def __call__(self) -> float:
        self.optimizer.zero_grad()
        with self.autocast:
            loss = self.loss(self.model(self.fields), self.target)
        loss.backward()
        self.optimizer.step()
        return loss.item()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    fields, target = torch.randn(2, BATCH, CHANNELS, *GRID, generator=generator)
    return fields, target


def tutorial(folder: str, dim: int, dtype: str, taught: bool) -> Peer:
    sys.path.insert(0, folder)
    from networks import vit  # type: ignore[import-not-found]
    from utils import comm  # type: ignore[import-not-found]
    from utils.loss import l2_loss  # type: ignore[import-not-found]

    comm._COMM_GROUPS.clear()
    shape = {"img_size": list(GRID), "n_in_channels": CHANNELS, "n_out_channels": CHANNELS}
    shape |= {"patch_size": PATCH[0], "embed_dim": dim, "depth": LAYERS, "num_heads": HEADS}
    torch.manual_seed(0)
    return Peer(vit.ViT(SimpleNamespace(**shape, dropout=0.0)), l2_loss, *batch(), dtype, taught)


class TimmViT(nn.Module):
    """timm's VisionTransformer at equal size, with a head that gives fields (B, C, H, W) from such fields."""

    def __init__(self, grid: Any, patch: Any, channels: int, dim: int, layers: int, heads: int) -> None:
        from timm.models.vision_transformer import VisionTransformer as Timm  # type: ignore[import-not-found]

        super().__init__()
        self.grid, self.patch = grid, patch
        shape = {"img_size": grid, "patch_size": patch, "in_chans": channels, "embed_dim": dim}
        shape |= {"depth": layers, "num_heads": heads, "num_classes": 0}
        self.trunk = Timm(**shape, class_token=False, global_pool="")
        self.head = nn.Linear(dim, channels * patch[0] * patch[1])

    def forward(self, fields: Tensor) -> Tensor:
        return unpatchify(self.head(self.trunk.forward_features(fields)), self.grid, self.patch)


def relative_l2(output: Tensor, target: Tensor) -> Tensor:
    return torch.mean((output - target).flatten(1).norm(dim=1) / target.flatten(1).norm(dim=1))


def build_peers(folder: str, dim: int, dtype: str) -> list[str]:
    torch.set_num_threads(os.cpu_count() or 2)
    for taught in (False, True):
        STEPS["tutorial" + TAUGHT * taught] = tutorial(folder, dim, dtype, taught)
        if importlib.util.find_spec("timm"):
            torch.manual_seed(0)
            model = TimmViT(GRID, PATCH, CHANNELS, dim, LAYERS, HEADS)
            STEPS["timm" + TAUGHT * taught] = Peer(model, relative_l2, *batch(), dtype, taught)
    return list(STEPS)


def build_rossby(_: str, dim: int, dtype: str) -> list[str]:
    """Build Rossby's with each of the CPU's attention backends, compiled and not."""
    torch.set_num_threads(os.cpu_count() or 2)
    retain_memory(torch.device("cpu"))
    for backend in ("sdpa", "math"):
        for compiled in (False, True):
            name = f"rossby, {backend}{', compiled' if compiled else ''}"
            STEPS[name] = Rossby(dim, dtype, backend, compiled).loss
    return list(STEPS)


def time_step(name: str) -> float:
    return clock(STEPS[name])


WINDOW_COLUMNS = {"tokens": ">6", "dtype": ">10", "window": ">10", "keys": ">6", "seconds": ">9.3f"}
WINDOW_COLUMNS |= {"faster": ">8.2f"}
FASTER = {2048: 1.3, 8192: 2.0}  # asked of bands and strips, one after the other


def compare_windows(tokens: int, dtype: str, dim: int, alternations: int) -> list[dict[str, Any]]:
    """Time blocks on h x 2 h tokens: an eighth of the rows, or of the columns, or a fourth of both."""
    rows = math.isqrt(tokens // 2)
    shapes = {"all": (0, 0), "bands": (rows // 8, 0), "strips": (0, rows // 4)}
    shapes["squares"] = (rows // 4, rows // 2)
    x = torch.randn(1, tokens, dim, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def step(block: nn.Module) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            return clock(lambda: block(x).sum().backward())

    steps, keys = {}, {}  # keys of a query
    for name, window in shapes.items():
        settings = Model("vit", (1, 1), dim, 1, 12, attention_windows=(window,))
        model = VisionTransformer(1, 1, (rows, 2 * rows), settings)
        init_weights(model, 0)
        keys[name] = math.prod(model.windows[0])
        use_backend(model, preferred_backend(x.device, getattr(torch, dtype), keys[name], dim // 12))
        steps[name] = partial(step, model.blocks["0"])
    seconds = {name: statistics.median(found) for name, found in in_turns(alternations, steps, 1).items()}
    same = {"tokens": tokens, "dtype": dtype}
    results = [same | {"window": n, "keys": keys[n], "seconds": seconds[n]} for n in steps]
    return [row | {"faster": seconds["all"] / row["seconds"]} for row in results]


def windows(options: argparse.Namespace) -> int:
    torch.set_num_threads(os.cpu_count() or 2)
    retain_memory(torch.device("cpu"))
    rows, missed = [], 0
    for tokens, dtype in product(options.tokens, options.dtypes):
        found = compare_windows(tokens, dtype, options.dims[-1], options.alternations)
        rows += found
        both = 2 / sum(1 / row["faster"] for row in found if row["window"] in ("bands", "strips"))
        missed += both < FASTER.get(tokens, 0.0)
        print(f"{tokens} tokens, {dtype}: bands and strips {both:.2f} x as fast as all", flush=True)
    record("step_time_windows", rows)
    print(table(rows, **WINDOW_COLUMNS))
    return int(missed > 0)


def main() -> int:
    sizes: dict[str, Any] = {"dims": (384, 768), "dtypes": tuple(LIMITS), "tokens": tuple(FASTER)}
    options = parse(__doc__, ("peers", "windows"), tutorial="", alternations=7, **sizes)
    return windows(options) if options.command == "windows" else peers(options)


def peers(options: argparse.Namespace) -> int:
    rows: list[dict[str, Any]] = []
    for dim in options.dims:
        for dtype in options.dtypes:
            rows += compare(options.tutorial, dim, dtype, options.alternations)
    record("step_time", rows)
    print(table(rows, **COLUMNS))
    compared = [row for row in rows if row["ratio"] is not None]
    missed = sum(row["ratio"] > row["limit"] for row in compared)
    print(f"\n{missed} of {len(compared)} comparisons above what was asked")
    return 1 if missed else 0


def compare(folder: str, dim: int, dtype: str, alternations: int) -> list[dict[str, Any]]:
    groups, steps = (Ranks(1), Ranks(1)), {}
    for group, build in zip(groups, (build_peers, build_rossby), strict=True):
        for name in group.run(build, folder, dim, dtype, timeout=600)[0]:
            steps[name] = lambda n=name, g=group: g.run(time_step, n, timeout=600)[0]
    found = in_turns(alternations, steps, warm_up=1)
    seconds = {name: statistics.median(times) for name, times in found.items()}
    for group in groups:
        group.stop()  # what was built takes memory
    model = architecture_of(Model("vit", PATCH, dim, LAYERS, HEADS), GRID, CHANNELS, CHANNELS)
    flops = 3 * BATCH * model.flops
    ours = min((name for name in steps if name.startswith("rossby")), key=lambda name: seconds[name])
    peer, rows = min(seconds[name] for name in steps if not name.startswith("rossby")), []
    for name, taken in seconds.items():
        row = {"dim": dim, "dtype": dtype, "limit": LIMITS[dtype], "side": name}
        row |= {
            "seconds": taken,
            "gflops": flops / taken / 1e9,
            "ratio": taken / peer if name == ours else None,
        }
        rows.append(row)
    print(table(rows, **COLUMNS), flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
