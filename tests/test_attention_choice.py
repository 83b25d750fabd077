"""The attention kernel chosen by measurement: the fastest, the same on all ranks, kept for a resumed run."""

import errno
import json
import sys

import pytest
import torch
from torch.nn.attention import register_flash_attention_impl
from torch.nn.attention._fa3 import register_flash_attention_fa3
from torch.nn.attention._fa4 import register_flash_attention_fa4

from config import Model
from errors import DataError
from models.attention import Kernel, activate, check_backend, preferred_backend
from models.vit import VisionTransformer
from parallelisms import attention_choice
from parallelisms.attention_choice import (
    choose_attention,
    fastest_backends,
    measure_attention,
    warn_about_kernel,
)
from parallelisms.degrees import Degrees

CPU = torch.device("cpu")


def vit() -> VisionTransformer:
    with torch.device("meta"):
        return VisionTransformer(3, 3, (16, 32), Model("vit", (4, 4), 64, 2, 4, attention_backend="auto"))


def choose(folder, batch=2, for_training=True, **degrees) -> str:
    file = folder / "attention.json"
    return choose_attention(vit(), batch, Degrees(**degrees), torch.float32, CPU, file, for_training)


def test_the_fastest_is_taken_for_all_blocks_and_kept(tmp_path, monkeypatch, one_rank):
    shapes = []

    def measured(shape, dtype, device):
        shapes.append(shape)
        return {"sdpa": 2.0, "math": 1.0} if len(shapes) == 1 else {"sdpa": 1.0, "math": 2.0}

    monkeypatch.setattr(attention_choice, "measure_attention", measured)
    model = vit()
    assert choose_attention(model, 2, Degrees(), torch.float32, CPU, tmp_path / "attention.json") == "math"
    assert {m.backend for m in model.modules() if isinstance(m, Kernel)} == {"math"}
    assert shapes == [(2, 4, 32, 16)]
    assert choose(tmp_path) == "math"  # a resumed run repeats it, though sdpa would now win
    assert choose(tmp_path, batch=4) == "sdpa"  # another shape is another question
    assert shapes[1:] == [(4, 4, 32, 16)]
    assert choose(tmp_path, tp=2) == "sdpa" and shapes[2:] == [(2, 2, 32, 16)]


def test_measuring_takes_what_runs_here():
    assert set(measure_attention((1, 2, 16, 8), torch.float32, CPU)) == {"sdpa", "math"}
    found = fastest_backends((1, 2, 16, 8), torch.bfloat16, CPU)
    assert list(found.values()) == sorted(found.values())


def test_a_forecast_uses_the_choice_of_the_run_and_writes_nothing(one_rank, tmp_path, monkeypatch):
    monkeypatch.setattr(attention_choice, "measure_attention", lambda *_: {"math": 1.0, "sdpa": 2.0})
    assert choose(tmp_path, batch=16) == "math"
    before = (tmp_path / "attention.json").read_bytes()
    monkeypatch.setattr(attention_choice, "measure_attention", lambda *_: {"sdpa": 1.0, "math": 2.0})
    assert choose(tmp_path, batch=8, for_training=False) == "math"  # another shape, and not measured again
    assert (tmp_path / "attention.json").read_bytes() == before
    (tmp_path / "empty").mkdir()
    assert choose(tmp_path / "empty", for_training=False) == "sdpa"
    assert not list((tmp_path / "empty").iterdir())


@pytest.mark.parametrize("for_training", [True, False])
def test_a_kernel_chosen_on_another_kind_of_device_is_no_choice(one_rank, tmp_path, for_training):
    """Such as a GPU's kernel in a forecast on a CPU."""
    file = tmp_path / "attention.json"
    file.write_text(json.dumps({"device": "NVIDIA H100", "backend": "cudnn", "shape": [2, 4, 32, 16]}))
    assert choose(tmp_path, for_training=for_training) in ("sdpa", "math")
    assert ("cudnn" in file.read_text()) != for_training


def test_long_sequences_do_not_try_plain_matmul(monkeypatch):
    monkeypatch.setattr(attention_choice, "MAX_SCORES", 1000)
    assert set(measure_attention((1, 2, 16, 8), torch.float32, CPU)) == {"sdpa"}


def test_a_slow_kernel_on_hopper_is_a_warning(monkeypatch, caplog):
    """A run that cannot be as fast as its GPU is a run all the same."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    warn_about_kernel("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "cudnn", CPU)
    warn_about_kernel("void cutlass::device_kernel<flash::FlashAttnFwdSm90<...", "flash3", CPU)
    assert not caplog.records
    warn_about_kernel("pytorch_flash::flash_fwd_kernel", "sdpa", CPU)
    assert "no kernel for Hopper" in caplog.text


def test_what_is_not_measured_comes_from_a_table(monkeypatch):
    """cuDNN from Hopper on, torch's own choice before it, in float32 and on a CPU."""
    gpu, half = torch.device("cuda"), torch.bfloat16
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    for capability, expected in {(8, 0): "sdpa", (9, 0): "cudnn", (10, 0): "cudnn"}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert preferred_backend(gpu, half) == expected
    assert preferred_backend(gpu, torch.float32) == preferred_backend(CPU, half) == "sdpa"
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    assert preferred_backend(gpu, half) == "sdpa"


def test_flash_attention_3_and_4_are_switched_on_and_off(monkeypatch):
    """Through torch's own switch, which holds for the process: whoever else runs gets its own kernel back."""
    changes = []

    class Handle:
        def __init__(self, name: str) -> None:
            self.name = name
            changes.append(f"{name} on")

        def remove(self) -> None:
            changes.append(f"{self.name} off")

    for name in ("FA3", "FA4"):
        register_flash_attention_impl(name, register_fn=lambda name=name: Handle(name))
    try:
        for backend in ("flash3", "flash3", "flash4", "cudnn", "flash"):
            activate(backend)
    finally:
        register_flash_attention_impl("FA3", register_fn=register_flash_attention_fa3)
        register_flash_attention_impl("FA4", register_fn=register_flash_attention_fa4)
    assert changes == ["FA3 on", "FA3 off", "FA4 on", "FA4 off"]


@pytest.mark.parametrize("backend", ("flash3", "flash4"))
def test_packages_that_are_missing_are_named(backend):
    with pytest.raises(ValueError, match=f'"{backend}": needs a CUDA device'):
        check_backend(backend, "cpu", torch.bfloat16)
    with pytest.raises(ValueError, match=f'"{backend}": the package with flash_attn.* is not installed'):
        check_backend(backend, "cuda", torch.bfloat16)


def test_flash_attn_4_alone_is_not_flash_attn(tmp_path, monkeypatch):
    """Its package is a folder in flash_attn, which has no code then."""
    (tmp_path / "flash_attn/cute").mkdir(parents=True)
    (tmp_path / "flash_attn/cute/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    check_backend("flash4", "cuda", torch.bfloat16)
    with pytest.raises(ValueError, match="flash-attn is not installed"):
        check_backend("flash_attn", "cuda", torch.bfloat16)
    sys.modules.pop("flash_attn")


def test_a_package_that_does_not_fit_is_not_chosen(monkeypatch, caplog):
    """FlashAttention-4 of a later version returns more than torch unpacks: a ValueError."""

    def fail(name, inputs):
        if name == "math":
            raise ValueError("too many values to unpack (expected 2)")

    monkeypatch.setattr(attention_choice, "forward_backward", fail)
    with caplog.at_level("INFO", "rossby"):
        assert list(measure_attention((1, 2, 8, 4), torch.float32, CPU)) == ["sdpa"]
    assert "math does not run here: too many values" in caplog.text


@pytest.mark.parametrize("content", ["", "[1]", '{"backend"', None])
def test_a_damaged_file_is_one_line_that_names_it(tmp_path, one_rank, content):
    path = tmp_path / "attention.json"
    path.mkdir() if content is None else path.write_text(content)
    with pytest.raises(DataError, match=r"attention.json: is damaged .*; remove it"):
        choose(tmp_path)


def test_a_full_disk_leaves_no_empty_file(tmp_path, one_rank, monkeypatch):
    def refuse(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("jobs.durable_files.os.fsync", refuse)
    with pytest.raises(OSError, match="No space left"):
        choose(tmp_path)
    assert not list(tmp_path.iterdir())
