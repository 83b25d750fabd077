"""The attention kernel chosen by measurement: the fastest, the same on all ranks, kept for a resumed run."""

import json

import pytest
import torch

from config import Model
from models.attention import Kernel
from models.vit import VisionTransformer
from parallelisms import measured_choices
from parallelisms.degrees import Degrees
from parallelisms.measured_choices import (
    Choices,
    check_hopper,
    choose_attention,
    fastest_backend,
    measure_attention,
)

CPU = torch.device("cpu")


def vit() -> VisionTransformer:
    with torch.device("meta"):
        return VisionTransformer(3, 3, (16, 32), Model("vit", (4, 4), 64, 2, 4, attention_backend="auto"))


def choose(folder, batch=2, **degrees) -> str:
    return choose_attention(vit(), batch, Degrees(**degrees), torch.float32, CPU, Choices(folder))


@pytest.fixture
def one_rank():
    from parallelisms.mesh import start_ranks

    start_ranks("gloo", 60)
    yield
    torch.distributed.destroy_process_group()


def test_the_fastest_is_taken_for_all_blocks_and_kept(tmp_path, monkeypatch, one_rank):
    shapes = []

    def measured(shape, dtype, device):
        shapes.append(shape)
        return {"sdpa": 2.0, "math": 1.0} if len(shapes) == 1 else {"sdpa": 1.0, "math": 2.0}

    monkeypatch.setattr(measured_choices, "measure_attention", measured)
    model = vit()
    assert choose_attention(model, 2, Degrees(), torch.float32, CPU, Choices(tmp_path)) == "math"
    assert {m.backend for m in model.modules() if isinstance(m, Kernel)} == {"math"}
    assert shapes == [(2, 4, 32, 16)]
    assert choose(tmp_path) == "math"  # a resumed run repeats it, though sdpa would now win
    assert choose(tmp_path, batch=4) == "sdpa"  # another shape is another question
    assert shapes[1:] == [(4, 4, 32, 16)]
    assert choose(tmp_path, tp=2) == "sdpa" and shapes[2:] == [(2, 2, 32, 16)]


def test_measuring_takes_what_runs_here():
    assert set(measure_attention((1, 2, 16, 8), torch.float32, CPU)) == {"sdpa", "math"}
    found = fastest_backend((1, 2, 16, 8), torch.bfloat16, CPU)
    assert found["backend"] == min(found["seconds"], key=found["seconds"].get)


def test_what_was_measured_for_something_else_is_measured_again(one_rank, tmp_path):
    choices, key = Choices(tmp_path), {"shape": [1, 2]}
    assert choices.get("choice", key, lambda: {"backend": "math"}) == {"backend": "math"}
    assert choices.get("choice", key, lambda: {"backend": "sdpa"})["backend"] == "math"
    assert choices.get("choice", {"shape": [1, 3]}, lambda: {"backend": "sdpa"})["backend"] == "sdpa"
    assert json.loads((tmp_path / "choice.json").read_text()) == {"shape": [1, 3], "backend": "sdpa"}


def test_a_forecast_takes_what_the_run_has_chosen_and_writes_nothing(one_rank, tmp_path):
    Choices(tmp_path).get("choice", {"batch": 16}, lambda: {"backend": "math"})
    fixed, before = Choices(tmp_path, fixed=True), (tmp_path / "choice.json").read_bytes()
    assert fixed.get("choice", {"batch": 8}, lambda: {"backend": "sdpa"})["backend"] == "math"
    assert fixed.get("another", {}, lambda: {"backend": "sdpa"})["backend"] == "sdpa"
    assert (tmp_path / "choice.json").read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_long_sequences_do_not_try_plain_matmul(monkeypatch):
    monkeypatch.setattr(measured_choices, "MAX_SCORES", 1000)
    assert set(measure_attention((1, 2, 16, 8), torch.float32, CPU)) == {"sdpa"}


def test_a_slow_kernel_on_hopper_is_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_hopper("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "cudnn", CPU)
    with pytest.raises(ValueError, match="none of Hopper's"):
        check_hopper("pytorch_flash::flash_fwd_kernel", "sdpa", CPU)
