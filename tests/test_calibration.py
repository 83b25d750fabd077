"""Calibration: what is measured, how it is read between shapes, and the file it lies in."""

import dataclasses
import json
import math
import time
from pathlib import Path

import pytest
import torch

from planning import calibration as module
from planning.architecture import vit_architecture
from planning.calibration import (
    Calibration,
    Timing,
    calibrate,
    calibrated,
    in_turns,
    load_calibration,
    processor_name,
    save_calibration,
    torch_version,
    undisturbed,
    work_of,
)
from planning.clusters import load_cluster

CPU = torch.device("cpu")
TINY = [(2, vit_architecture((32, 1), (1, 1), 1, 1, 64, 1, 4, mlp_dim=128))]
ELEMENTWISE = {"copy", "cast", "add", "sum", "gelu", "gelu_backward", "layer_norm", "layer_norm_backward"}


def timing(kind: str, dtype: str, sizes: tuple[int, ...], rate: float) -> Timing:
    return Timing(kind, dtype, sizes, work_of(kind, sizes) / rate)


MADE = Calibration(
    torch_version=torch_version(),
    device_type="cpu",
    device_name="cpu",
    processor=processor_name(),
    cores=4,
    threads=2,
    memory=8_000_000_000,
    timings=(
        timing("matmul/forward", "float32", (128, 64, 64), 100e9),
        timing("matmul/forward", "float32", (128, 64, 256), 400e9),
        timing("matmul/input_gradient", "float32", (128, 256, 64), 200e9),
        timing("matmul/weight_gradient", "float32", (256, 128, 64), 50e9),
        timing("matmul/forward", "bfloat16", (128, 64, 64), 1e12),
        timing("attention/sdpa/forward", "bfloat16", (2, 4, 64, 32), 300e9),
        timing("attention/sdpa/backward", "bfloat16", (2, 4, 64, 32), 150e9),
        timing("elementwise/copy", "float32", (2**20,), 10e9),
    ),
)


# -- between shapes


def test_products_between_the_shapes_that_were_measured() -> None:
    """A measured shape takes what it took; between two the rate is their geometric mean; far ones stay
    between the rates measured; backward is two products.
    """

    def seconds(*sizes: int, backward: bool = False) -> float:
        return MADE.linear_seconds(*sizes, "float32", backward)  # type: ignore[misc]

    assert [seconds(*row.sizes) for row in MADE.timings[:2]] == [
        pytest.approx(row.seconds) for row in MADE.timings[:2]
    ]
    assert 2 * 128 * 64 * 128 / seconds(128, 64, 128) == pytest.approx(200e9)
    assert 100e9 < 2 * 4096**3 / seconds(4096, 4096, 4096) < 400e9
    both = MADE.timings[2].seconds + MADE.timings[3].seconds
    assert seconds(128, 64, 256, backward=True) == pytest.approx(both)


# -- the file


def test_the_file_has_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "calibration.json"
    save_calibration(MADE, path)
    assert load_calibration(path) == MADE and list(path.parent.iterdir()) == [path]
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ValueError, match="cannot be used"):
        load_calibration(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"torch_version": "1.0"}, f"measured with torch 1.0, this is {torch_version()}"),
        ({"processor": "Z80, 1 cores"}, "measured on Z80, 1 cores, this is"),
        ({"surprise": 0}, "cannot be used"),
        ({"timings": [{"kind": "matmul"}]}, "cannot be used"),
    ],
)
def test_stale_and_broken_files_end_in_one_line(tmp_path: Path, change: dict[str, object], said: str) -> None:
    path = tmp_path / "calibration.json"
    save_calibration(MADE, path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError) as error:
        load_calibration(path)
    assert said in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).endswith("measure with plan.py --calibrate again")


def test_a_gpu_s_calibration_can_be_read_elsewhere(tmp_path: Path) -> None:
    there = dataclasses.replace(MADE, device_type="cuda", device_name="NVIDIA H200", processor="another")
    save_calibration(there, tmp_path / "calibration.json")
    cluster = load_cluster("thisx16", calibration=tmp_path / "calibration.json")
    assert (cluster.name, cluster.device.name, cluster.devices) == ("this", "h200, calibrated", 16)
    assert cluster.device.peak["bf16"] == 989e12
    assert cluster.rates == dataclasses.replace(there, float8=1402 / 790)  # products of clusters.toml


# -- on the cluster


def test_a_calibrated_cpu() -> None:
    """Four cores and two threads a rank: two ranks have the measured rates, one has twice them."""
    cluster = calibrated(load_cluster("cpu"), MADE)
    device = cluster.device
    assert (cluster.devices, cluster.devices_per_node, device.memory) == (2, 4, 4_000_000_000)
    assert device.peak == {"fp32": pytest.approx(400e9), "bf16": pytest.approx(1e12)}
    assert cluster.rates == MADE
    one = calibrated(load_cluster("cpu"), MADE, devices=1)
    assert one.device.memory == 2 * device.memory and one.device.peak["bf16"] == 2 * device.peak["bf16"]


# -- measuring


def test_repetitions_that_are_disturbed_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert undisturbed([1.0, 1.1, 1.2, 8.0, 8.0, 8.0, 9.0]) == 1.1
    assert undisturbed([1.0, 1.02, 1.04]) == 1.02
    monkeypatch.setattr(module, "REPETITIONS", (3, 25))
    calls: list[int] = []

    def run() -> None:
        calls.append(1)
        time.sleep(0.01)

    (timing,) = in_turns([module.Operation("slow", "float32", (1,), run)], CPU, seconds=0.0)
    assert len(calls) == 2 + 3  # two to find out how long it takes, and no fewer than three
    assert 0.01 <= timing.seconds < 0.1


def test_a_backend_without_a_kernel_here() -> None:
    """cuDNN has none for float32; here it has none at all, and blocks take another."""
    with pytest.raises(ValueError, match='model.attention_backend = "cudnn"'):
        calibrate(TINY, ["cudnn"], CPU, threads=1)
    kinds = {operation.kind for operation in module.operations(TINY, ["cudnn", "sdpa"], CPU)}
    assert "blocks/sdpa" in kinds and not any("cudnn" in kind for kind in kinds)


def test_all_operations_are_measured(tmp_path: Path) -> None:
    """In both precisions; the file and the cluster of it; threads are given back."""
    before = torch.get_num_threads()
    found = calibrate(TINY, ["sdpa", "math"], CPU, threads=before + 1, seconds=0.0)
    assert torch.get_num_threads() == before
    kinds = {(row.kind, row.dtype) for row in found.timings}
    for dtype in ("float32", "bfloat16"):
        assert {f"elementwise/{name}" for name in ELEMENTWISE} <= {k for k, d in kinds if d == dtype}
        for way in ("forward", "backward"):
            assert {(f"attention/{backend}/{way}", dtype) for backend in ("sdpa", "math")} <= kinds
            assert found.attention_seconds(2, 4, 32, 16, dtype, way == "backward", "sdpa") > 0
        assert found.linear_seconds(64, 64, 128, dtype, backward=True) > 0
    assert {("elementwise/adamw", "float32"), ("blocks/sdpa", "bfloat16")} <= kinds
    assert all(0 < row.seconds and math.isfinite(row.rate) for row in found.timings)
    save_calibration(found, tmp_path / "calibration.json")
    assert load_calibration(tmp_path / "calibration.json") == found
