"""Windows of a Swin transformer: what attends to what, round the globe, at the poles, and what it costs."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from config import Model
from errors import ConfigError
from models.build import build_model
from models.initialization import fill_with_nan, init_weights
from models.swin import SwinTransformer, WindowKernel
from tests.test_dry_run import run as dry_run
from tests.test_train import archive, config_file, losses, run  # noqa: F401 (two are fixtures)

TOKENS, WINDOW = (7, 12), (4, 6)  # two windows round the globe; rows that they do not divide


def build(grid=(16, 24), window=(4, 4), layers=2, periodic=True, **options) -> SwinTransformer:
    """float64, patches of 1 x 2 points; nothing is added to tokens that says where they lie."""
    shape = {"patch_size": (1, 2), "dim": 16, "num_layers": layers, "num_heads": 2}
    settings = {**shape, "window_size": window, **options}
    model = build_model(Model("swin", **settings), 3, 0, grid, periodic).to_empty(device="cpu")
    fill_with_nan(model)
    init_weights(model, 0)
    for name, parameter in model.named_parameters():
        if "attention" in name and parameter.dim() == 2:
            parameter.data.mul_(20)  # attention is far from uniform
        if name == "position.embedding":
            parameter.data.zero_()
    return model.double()  # type: ignore[return-value]


def windows_of(shift: tuple[int, int], periodic: bool) -> Tensor:
    """(T, T) whether two tokens share a window, by their rows and columns."""
    row, column = torch.arange(math.prod(TOKENS)) // TOKENS[1], torch.arange(math.prod(TOKENS)) % TOKENS[1]
    column = (column - shift[1]) % TOKENS[1] if periodic else column - shift[1]
    row, column = (row - shift[0]) // WINDOW[0], column // WINDOW[1]  # rounded down, below 0 too
    return (row[:, None] == row) & (column[:, None] == column)


@pytest.mark.parametrize("backend", ["sdpa", "math"])
@pytest.mark.parametrize("periodic", [True, False])
@pytest.mark.parametrize("shift", [(0, 0), (2, 3)])
def test_windows_are_dense_attention_with_a_mask(shift: tuple, periodic: bool, backend: str) -> None:
    """A softmax written here over all tokens, those of other windows at minus infinity."""
    num_tokens, padding = math.prod(TOKENS), 3
    kernel = WindowKernel(backend, TOKENS, WINDOW, shift, periodic)
    mask = windows_of(shift, periodic)
    generator = torch.Generator().manual_seed(0)
    shape = (2, 3, num_tokens + padding, 4)
    q, k, v = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(3))
    k, v = k[:, :, :num_tokens], v[:, :, :num_tokens]
    found = kernel(q, k, v)
    scores = torch.einsum("bnqe,bnke->bnqk", q[:, :, :num_tokens], k) / 2
    expected = torch.einsum("bnqk,bnke->bnqe", scores.masked_fill(~mask, -math.inf).softmax(-1), v)
    torch.testing.assert_close(found[:, :, :num_tokens], expected, rtol=1e-12, atol=1e-12)
    assert not found[:, :, num_tokens:].any()
    assert kernel.num_scores == mask.sum()


def test_gradients_are_those_of_differences() -> None:
    kernel = WindowKernel("math", (3, 4), (2, 2), (1, 1), True)
    inputs = [torch.randn(1, 2, 12, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(kernel, inputs)


@pytest.mark.parametrize(("position", "tolerance"), [("learned", 1e-12), ("rotary", 1e-4)])
def test_a_globe_that_is_turned_by_whole_windows_gives_a_turned_forecast(
    position: str, tolerance: float
) -> None:
    """Rotary angles are float32."""
    model = build(layers=3, position=position)
    fields = torch.randn(1, 3, 16, 24, dtype=torch.float64)
    window = 4 * 2  # columns of points
    predicted = model.predict(fields)
    for turns in (1, 2):
        turned = model.predict(fields.roll(turns * window, dims=3))
        expected = predicted.roll(turns * window, dims=3)
        torch.testing.assert_close(turned, expected, rtol=tolerance, atol=tolerance)
    assert not torch.allclose(model.predict(fields.roll(2, dims=3)), predicted.roll(2, dims=3))


def reached(model: SwinTransformer, row: int, column: int) -> Tensor:
    """(H, W) which points the forecast of one point depends on."""
    fields = torch.randn(1, 3, *model.grid_shape, dtype=torch.float64, requires_grad=True)
    model.predict(fields)[0, :, row, column].sum().backward()
    assert fields.grad is not None
    return fields.grad[0].abs().sum(0) > 0


def test_what_a_forecast_depends_on_goes_on_round_the_globe_and_ends_at_the_poles() -> None:
    """Two blocks: a window of four rows, and halves of two such windows; eight points a window's columns."""
    north, middle = reached(build(), 0, 0), reached(build(), 8, 0)
    assert torch.equal(north.any(1).nonzero().flatten(), torch.arange(4))  # no row of the other pole
    assert torch.equal(middle.any(1).nonzero().flatten(), torch.arange(4, 12))
    assert torch.equal(north[0].nonzero().flatten(), torch.cat([torch.arange(8), torch.arange(16, 24)]))


def test_a_region_ends_at_its_edges() -> None:
    assert torch.equal(reached(build(periodic=False), 0, 0)[0].nonzero().flatten(), torch.arange(8))


@pytest.mark.parametrize("periodic", [True, False])
@pytest.mark.parametrize("window", [(4, 4), (3, 6), (16, 12)])
def test_flops_are_those_that_are_counted(window: tuple[int, int], periodic: bool) -> None:
    model = build(window=window, layers=3, periodic=periodic, attention_backend="math")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.predict(torch.zeros(1, 3, 16, 24, dtype=torch.float64))
    assert counter.get_total_flops() == model.flops()


def test_a_window_of_the_whole_grid_is_a_vit() -> None:
    model = build(window=(16, 12), layers=1)
    vit = build_model(Model("vit", (1, 2), 16, 1, 2), 3, 0, (16, 24), True).to_empty(device="cpu")
    vit.double().load_state_dict(model.state_dict())
    fields = torch.randn(2, 3, 16, 24, dtype=torch.float64)
    torch.testing.assert_close(model.predict(fields), vit.predict(fields), rtol=1e-12, atol=1e-12)
    assert model.flops() == vit.flops()


def test_windows_go_round_the_globe_in_whole_ones() -> None:
    with pytest.raises(ConfigError, match=r"window_size = \[4, 5\]: 12 columns .* do: \[4, 6\]|\[3, 4, 6\]"):
        build(window=(4, 5))
    build(window=(4, 5), periodic=False)


def test_a_dry_run_measures_what_windows_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 x 8 tokens; the kernel "math" keeps a score, in float32, of every pair that attends."""
    options = ["--model.attention_backend=math", "--model.num_heads=8", "--training.local_batch_size=16"]
    whole = dry_run(monkeypatch, *options)
    windows = dry_run(monkeypatch, *options, "--model.name=swin", "--model.window_size=[2,4]")
    assert windows.total_parameters == whole.total_parameters and windows.calls == whole.calls
    straight, shifted = 4 * 8**2, (1**2 + 2**2 + 1**2) * (4**2 + 4**2)  # pairs; two blocks of each
    saved = 4 * 16 * 8 * (4 * 32**2 - 2 * straight - 2 * shifted)
    assert whole.peak["Activation"] - windows.peak["Activation"] == saved


def test_a_run_resumes_to_the_bit(config_file, tmp_path) -> None:  # noqa: F811
    """12 x 16 points: 3 x 4 tokens, two windows round the globe."""
    options = ["--model.name=swin", "--model.window_size=[2,2]", "--lr_scheduler.decay_type=constant"]
    options += ["--checkpoint.enable", "--checkpoint.interval=4", "--optimizer.lr=1e-2"]
    whole = run(config_file, tmp_path / "whole", *options)
    run(config_file, tmp_path / "part", *options, "--training.steps=8")
    resumed = run(config_file, tmp_path / "part", *options)
    assert losses(resumed) == losses(whole) and losses(whole)[-1] < 0.7 * losses(whole)[0]
    with pytest.raises(ConfigError, match=r"window_size = \[3, 2\]: .* was trained with \[2, 2\]"):
        run(config_file, tmp_path / "part", *options, "--model.window_size=[3,2]")
