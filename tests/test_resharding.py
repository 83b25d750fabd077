"""Any layout loads what any other saved: a part of benchmarks/layout_parity.py --reshard."""

from pathlib import Path

import pytest

from checkpoints.checkpointer import Checkpointer
from config import Checkpoint
from tests.parity import Layout, SmallRun
from tests.resharding import KINDS, differences, load, save, tolerance
from training.run_folder import Restart
from training.run_folder import load as load_step

MODES = (
    "async",
    "disabled",
    "async_with_pinned_mem",
    "async",
    "disabled",
    "async",
)  # a process takes seconds
PAIRS = [
    ("fsdp 2 x tp 2", "pp 2 x fsdp 2"),
    ("pp 2 x fsdp 2", "zero-1 2"),
    ("zero-1 2", "hsdp 2 x 2"),
    ("hsdp 2 x 2", "fsdp 2, float8 gathered"),
    ("fsdp 2, float8 gathered", "fsdp 2 x ring 2, ac selective"),
    ("fsdp 2 x ring 2, ac selective", "fsdp 2 x tp 2"),
]


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """Of a kind of layout: folder, tensors, next losses; saved when first asked for."""
    made = {}

    def get(name: str):
        if name not in made:
            folder = tmp_path_factory.mktemp("checkpoints")
            mode = MODES[len(made)]
            made[name] = (folder, *ranks(KINDS[name].ranks).run(save, KINDS[name], folder, mode)[0])
        return made[name]

    return get


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_saved_by_one_and_loaded_by_another(ranks, saved, source: str, target: str) -> None:
    folder, tensors, losses = saved(source)
    loaded, next_losses = ranks(KINDS[target].ranks).run(load, KINDS[target], folder)[0]
    assert len(tensors) == 282 and not differences(tensors, loaded)
    assert next_losses == pytest.approx(losses, rel=tolerance(KINDS[source], KINDS[target]))


@pytest.mark.slow
def test_muon(ranks, tmp_path) -> None:
    """Matrices with a momentum, others with Adam's moments: the same layout goes on to the bit."""
    source, target = KINDS["fsdp 2 x tp 2"], KINDS["pp 2 x fsdp 2"]
    tensors, losses = ranks(4).run(save, source, tmp_path, "disabled", "Muon")[0]
    for layout, tolerated in ((source, 0.0), (target, 1e-5)):
        loaded, next_losses = ranks(4).run(load, layout, tmp_path, "Muon")[0]
        assert not differences(tensors, loaded)
        assert next_losses == pytest.approx(losses, rel=tolerated, abs=0.0)


def losses_after_going_back(layout: Layout, folder: Path) -> tuple[float, float]:
    """Loss of step 2, and of step 2 after two further steps and going back."""
    small = SmallRun(layout)
    checkpointer = Checkpointer(folder, Checkpoint(async_mode="disabled"), "", {})
    small.step(0)
    checkpointer.save(1, small.state.state_dict())
    expected = small.step(1)[0]
    small.step(2)
    load_step(checkpointer, 1, small.state)
    Restart(checkpointer, small.state)
    again = small.step(1)[0]
    checkpointer.close()
    return expected, again


@pytest.mark.parametrize("name", ["fsdp 2, float8 gathered", "zero-1 2"])
def test_going_back_takes_the_scales_of_float8_along(ranks, tmp_path, name):
    for expected, again in ranks(2).run(losses_after_going_back, KINDS[name], tmp_path):
        assert again == expected
