"""Updates while backward goes on: the same training run, bad steps left out, no gradient left over."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from errors import ConfigError
from tests.parity import Layout, SmallRun, cp, difference, full, replicate, tp
from training.config_checks import load_checked
from training.update import UpdateInBackward

LAYOUTS = {
    "one": Layout(1),
    "one, compile": Layout(1, compile="inductor"),
    "fsdp": Layout(2),
    "fsdp, bf16": Layout(2, dtype="bfloat16"),
    "tp": Layout(2, tp()),
    "ring": Layout(2, cp("ring")),
    "hsdp": Layout(4, replicate()),
}
BAD = 2  # the step, counted from 1, whose loss is not finite


def train(layout: Layout, in_backward: bool, name: str = "AdamW") -> dict[str, Any]:
    """Four steps, one of them bad: losses, norms, weights, and moments of the optimiser."""
    small = SmallRun(layout, max_norm=0.0, in_backward=in_backward, name=name)
    number, plain = 0, small.objective.loss_part

    def loss_part(output: Tensor, target: Tensor, weights: Tensor) -> Tensor:
        ruined = number == BAD and dist.get_rank() == 0  # all have to hear of it
        return plain(output, target, weights) * (torch.nan if ruined else 1.0)

    where = "plain_loss_part" if isinstance(small.update, UpdateInBackward) else "loss_part"
    setattr(small.update, where, loss_part)
    losses, norms, parameters = [], [], small.model.parameters
    for number in range(1, 5):
        loss, norm = small.step(number - 1)
        assert bool(small.gradients) != in_backward  # none is left over
        losses.append(loss)
        norms.append(norm)
    moments = {
        f"{name} {key}": full(value)
        for name, p in parameters.items()
        for key, value in small.run.optimizer.state[p].items()
    }
    weights = {name: full(p) for name, p in parameters.items()}
    bad = small.run.bad_steps.bad
    return {"losses": losses, "norms": norms, "moments": moments, "weights": weights, "bad": bad}


RARE = ("hsdp",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in RARE else []) for name in LAYOUTS]
)
def test_it_is_the_same_run(ranks, one_rank, name: str) -> None:
    """The same kernels on the same numbers, a parameter at a time: the same bits."""
    layout = LAYOUTS[name]
    expected, found = (
        ranks(layout.ranks).run(train, layout, in_backward)[0]
        if layout.ranks > 1
        else train(layout, in_backward)
        for in_backward in (False, True)
    )
    assert found["bad"].nonzero().flatten().tolist() == [BAD] and torch.equal(found["bad"], expected["bad"])
    assert np.array_equal(found["losses"], expected["losses"], equal_nan=True)
    assert found["norms"] == pytest.approx(
        expected["norms"], rel=1e-6, nan_ok=True
    )  # summed in another order
    for what in ("moments", "weights"):
        assert difference(found[what], expected[what])[0] == 0.0, what


def test_sgd(one_rank) -> None:
    expected, found = (train(Layout(1), in_backward, name="SGD") for in_backward in (False, True))
    assert difference(found["weights"], expected["weights"])[0] == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], r"training.max_norm = 1.0: .*set it to 0"),
        (["--training.mixed_precision_param=float16"], "mixed_precision_param = 'float16'"),
        (["--parallelism.cpu_offload=true"], "cpu_offload"),
    ],
)
def test_what_needs_all_gradients_is_refused(arguments: list[str], message: str) -> None:
    norm = ["--training.max_norm=0"] if arguments else []
    with pytest.raises(ConfigError, match=message):
        load_checked(["--optimizer.in_backward=true", *norm, *arguments])


def test_replicas_are_refused(monkeypatch) -> None:
    monkeypatch.setenv("NGPU", "2")
    argv = ["--optimizer.in_backward=true", "--training.max_norm=0"]
    load_checked(argv)
    degrees = ["--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=1"]
    with pytest.raises(ConfigError, match="replicate_degree = 2: .*data_parallel_shard_degree = 2"):
        load_checked([*argv, *degrees])


def test_accumulation_is_refused(one_rank) -> None:
    with pytest.raises(ConfigError, match="made of 2 micro-batches a rank"):
        SmallRun(Layout(1, accumulation=2), max_norm=0.0, in_backward=True)


class Casts(TorchDispatchMode):
    """How many matrices are cast from float32 to bfloat16, by shape."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dtype == torch.bfloat16:
            self.shapes.append(tuple(args[0].shape))
        return out


def casts_of_a_step(layout: Layout) -> int:
    """Of a block's first MLP matrix, which has a shape of its own."""
    small = SmallRun(layout)
    shapes = [tuple(p.shape) for name, p in small.model.parameters.items() if name.endswith("mlp.up.weight")]
    small.watch = casts = Casts()
    small.step(0)
    return casts.shapes.count(shapes[0]) // len(shapes)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_weights_are_cast_once_a_step(one_rank, checkpointing: str) -> None:
    layout = Layout(1, accumulation=4, dtype="bfloat16", activation_checkpoint=checkpointing)
    assert casts_of_a_step(layout) == 1
