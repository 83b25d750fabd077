"""ViT and U-Net: parameters, padding, initialisation, FLOPs, windows, positions, kernels, convolutions."""

import math
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from config import Model
from models.attention import (
    FLASH4,
    Kernel,
    WindowedKernel,
    preferred_backend,
)
from models.embeddings import Rotary, crop_grid, pad_grid
from models.initialization import fill_with_nan, init_weights, initial_value
from models.noise import UNIT, branch_factors, hash64
from models.unet import ChannelNorm, GridConv2d, UNet
from models.vit import StochasticDepth, VisionTransformer


def build(grid=(8, 16), patch=(4, 4), layers=2, periodic=True, **options) -> VisionTransformer:
    with torch.device("meta"):
        model = VisionTransformer(5, 3, grid, Model("vit", patch, 32, layers, 4, **options), periodic)
    model.to_empty(device="cpu")
    fill_with_nan(model)
    init_weights(model, seed=0)
    return model


def count(patch: tuple[int, int], heads: int = 24) -> tuple[int, VisionTransformer]:
    with torch.device("meta"):
        model = VisionTransformer(17, 17, (1024, 2048), Model("vit", patch, 1536, 48, heads, mlp_dim=6144))
    return sum(p.numel() for p in model.parameters()), model


def test_vit1b_has_its_parameters():
    # qkv, projection, MLP up and down, two norms; 17 x 16 x 16 = 4352 values a patch
    block = 1536 * 4608 + 4608 + 1536 * 1536 + 1536 + 1536 * 6144 + 6144 + 6144 * 1536 + 1536 + 4 * 1536
    embedding, positions, head = 4352 * 1536 + 1536, 64 * 128 * 1536, 1536 * 4352 + 4352
    assert count((16, 16))[0] == 48 * block + embedding + positions + 2 * 1536 + head == 1_385_874_176


def test_vit1b_with_4096_tokens_and_with_12_heads():
    # 16 x 32 patches double embedding and head matrices (8704 values a patch) and halve the positions.
    embedding, head = 8704 * 1536 + 1536, 1536 * 8704 + 8704
    (parameters, model), (squares, other) = count((16, 32)), count((16, 16), heads=12)
    assert parameters == 1_359_912_960 + embedding + 4096 * 1536 + 3_072 + head == 1_392_956_416
    assert model.num_tokens == 4096 and squares == 1_385_874_176
    # The mission's TFLOP of a training step; heads change nothing.
    assert [round(3 * each.flops() / 1e12, 1) for each in (other, model)] == [126.8, 48.9]


WINDOWS = [{"attention_windows": windows} for windows in (((1, 0), (0, 2), (0, 0)), ((1, 2),))]


@pytest.mark.parametrize("grid", [(8, 16), (9, 14)])
@pytest.mark.parametrize("options", [*WINDOWS, {"mlp": "swiglu"}])
def test_flops_are_what_torch_counts(grid, options):
    model = build(grid, layers=4, attention_backend="math", **options)
    with FlopCounterMode(display=False) as counter:
        model.predict(torch.randn(1, 5, *grid))
    assert counter.get_total_flops() == model.flops()


def test_after_two_blocks_every_token_has_seen_all():
    """Bands, then strips: every cell of the input influences one of the output; of bands alone, a half."""
    x = torch.randn(1, 5, 8, 16, requires_grad=True)
    for windows, reached in [(((1, 0), (0, 1)), 1.0), (((1, 0),), 0.5)]:
        (gradient,) = torch.autograd.grad(build(attention_windows=windows).predict(x)[..., 0, 0].sum(), x)
        assert (gradient.abs().amax(dim=1) > 0).double().mean() == reached


def test_padding_replicates_latitude_and_wraps_longitude():
    x = torch.arange(12.0).view(1, 1, 3, 4)
    padded = pad_grid(x, (6, 6), periodic=True)
    assert padded[0, 0, :, 0].tolist() == [0, 0, 4, 8, 8, 8]  # one row above, two below
    assert padded[0, 0, 1].tolist() == [0, 1, 2, 3, 0, 1]
    assert pad_grid(x, (3, 6), periodic=False)[0, 0, 0].tolist() == [0, 1, 2, 3, 3, 3]
    assert torch.equal(crop_grid(padded, (3, 4)), x)


def test_initial_weights_depend_on_seed_and_name_alone():
    small, deep = build(layers=1), build(layers=3)
    same = "blocks.0.attention.qkv.weight"
    assert torch.equal(small.get_parameter(same), deep.get_parameter(same))
    other = "blocks.1.attention.qkv.weight"
    assert not torch.equal(deep.get_parameter(same), deep.get_parameter(other))
    init_weights(deep, seed=1)
    assert not torch.equal(deep.get_parameter(same), small.get_parameter(same))


def test_rotary_multiplies_by_complex_numbers():
    """Written out in complex float64, for a chunk of tokens that is padded beyond the last row."""
    rotary = Rotary((3, 8), 16, periodic=True)
    rotary.first_token = 5
    q, k = torch.randn(2, 2, 4, 21, 16)
    turned = rotary(q, k)
    for got, x in zip(turned, (q, k), strict=True):
        for token in range(21):
            row, column = divmod(token + 5, 8)
            waves = (1, 2, 3, 4)  # 4 ** (j / 3), rounded
            angles = [row * 100 ** (-j / 4) for j in range(4)] + [2 * math.pi * m * column / 8 for m in waves]
            numbers = torch.complex(x[..., token, :8].double(), x[..., token, 8:].double())
            expected = numbers * torch.exp(1j * torch.tensor(angles, dtype=torch.float64))
            parts = torch.cat([expected.real, expected.imag], dim=-1).float()
            torch.testing.assert_close(got[..., token, :], parts, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("position", "periodic"), [("rotary", True), ("rotary", False), ("learned", True)])
@torch.no_grad()
def test_a_rotary_model_rolls_with_its_fields(position, periodic):
    """In longitude, where the grid goes round and nothing but the turns tells tokens apart."""
    model = build(grid=(16, 32), position=position, periodic=periodic)
    for name, parameter in model.named_parameters():
        if name.endswith(("qkv.weight", "projection.weight")):
            parameter.mul_(30)  # so that attention chooses among tokens, and its choice counts
    fields = torch.randn(2, 5, 16, 32)
    out = model.predict(fields)
    along, across = (
        (model.predict(fields.roll(8, dims=dim)) - out.roll(8, dims=dim)).abs().max() / out.abs().max()
        for dim in (-1, -2)
    )
    assert across > 0.01
    assert along < 1e-5 if position == "rotary" and periodic else along > 0.01


def test_stochastic_depth_drops_its_rate_and_keeps_the_mean():
    """Rates rise from 0 in the first block; each sample, block and branch has a number of its own."""
    keys = hash64(torch.arange(4000), 7)
    factors = branch_factors(keys, range(0, 3), 0.125)  # (L, 2, B, 1, 1)
    for block, rate in enumerate((0.0, 0.125, 0.25)):
        for branch in factors[block]:
            assert (branch == 0).double().mean() == pytest.approx(rate, abs=0.02)
            assert branch.double().mean() / UNIT == pytest.approx(1.0, abs=0.03)
    dropped = (factors[1:] == 0).view(4, -1).double()
    assert torch.corrcoef(dropped).fill_diagonal_(0).abs().max() < 0.05
    assert torch.equal(branch_factors(keys[1:2], range(2, 3), 0.125), factors[2:, :, 1:2])
    out = StochasticDepth()(torch.ones(2, 5, 3, dtype=torch.bfloat16), factors[2, 0, :2])
    assert out.dtype == torch.bfloat16 and StochasticDepth()(out, None) is out


def test_weights_are_cut_normal_and_no_function_of_threads():
    """A normal distribution cut at two deviations has 0.8796 of its own deviation, by integration."""
    shape, threads = torch.Size((300, 1001)), torch.get_num_threads()
    try:
        values = []
        for number in (1, 2):
            torch.set_num_threads(number)
            values.append(initial_value("blocks.0.mlp.up.weight", shape, 0.02, 1))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*values)
    assert float(values[0].abs().max()) <= 0.04 + 1e-9
    assert abs(float(values[0].mean())) < 2e-4
    assert float(values[0].std()) == pytest.approx(0.8796 * 0.02, rel=5e-3)
    assert not torch.equal(values[0], initial_value("blocks.1.mlp.up.weight", shape, 0.02, 1))


# -- kernels


CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("capability", "dtype", "tokens", "installed", "expected"),
    [
        (None, torch.bfloat16, 128, "", "math"),
        (None, torch.bfloat16, 2048, "", "sdpa"),
        (None, torch.float16, 128, "", "sdpa"),
        (None, torch.float32, 128, "", "sdpa"),
        ((8, 0), torch.bfloat16, 4096, "", "flash"),
        ((8, 0), torch.float32, 4096, "", "sdpa"),
        ((9, 0), torch.bfloat16, 4096, "", "cudnn"),
        ((9, 0), torch.bfloat16, 4096, "flash_attn_interface", "flash_attn"),
        ((9, 0), torch.bfloat16, 4096, "flash_attn", "cudnn"),  # written for Ampere
        ((10, 0), torch.float16, 4096, "flash_attn.cute", "flash4"),
        ((7, 0), torch.float16, 4096, "", "sdpa"),
    ],
)
def test_the_kernel_by_device_type_and_tokens(capability, dtype, tokens, installed, expected):
    device = GPU if capability else CPU
    with (
        patch("torch.cuda.get_device_capability", lambda device: capability),
        patch("models.attention._is_installed", lambda module: module == installed),
        patch("torch.backends.cudnn.is_available", lambda: True),
        patch("models.attention.version", lambda package: FLASH4),
    ):
        assert preferred_backend(device, dtype, tokens, 64) == expected
        assert preferred_backend(device, dtype, tokens, 256) == ("sdpa" if capability else expected)


@pytest.mark.parametrize("window", [(2, 8), (4, 2), (2, 4), (1, 1)])
@pytest.mark.parametrize("backend", ["sdpa", "math"])
def test_a_token_attends_to_those_of_its_window(window, backend):
    """Against all tokens with a mask in float64, of 4 x 8 tokens and 3 padded ones; q, k, v as the ViT's."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 35, 3, 3, 16).permute(3, 0, 2, 1, 4).unbind(0)
    k, v = (x[:, :, :32].requires_grad_() for x in (k, v))
    found = WindowedKernel(Kernel(backend), (4, 8), window)(q, k, v)
    rows, columns = torch.arange(32) // 8 // window[0], torch.arange(32) % 8 // window[1]
    apart = (rows[:, None] != rows) | (columns[:, None] != columns)
    scores = q[:, :, :32].double() @ k.double().mT / math.sqrt(16)
    exact = scores.masked_fill(apart, -math.inf).softmax(-1) @ v.double()
    assert found.shape == q.shape and not found[:, :, 32:].any()
    torch.testing.assert_close(found[:, :, :32].double(), exact, rtol=1e-5, atol=1e-6)
    weights = torch.randn(2, 3, 32, 16)
    expected = torch.autograd.grad((exact * weights).sum(), (k, v))
    got = torch.autograd.grad((found[:, :, :32] * weights).sum(), (k, v))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


# -- the U-Net


def build_unet(grid=(33, 36), width=8, levels=2, dtype=torch.float32, **options) -> UNet:
    with torch.device("meta"):
        model = UNet(5, 3, grid, Model(width=width, levels=levels), **options)
    model.to_empty(device="cpu")
    fill_with_nan(model)
    init_weights(model, seed=0)
    return model.to(dtype)


def test_the_default_has_its_parameters():
    # block of n to n channels: two 3 x 3 convolutions 2 (9 n n + n), two norms 4 n: 18 n^2 + 6 n
    same = {64: 74_112, 128: 295_680, 256: 1_181_184, 512: 4_721_664, 1024: 18_880_512}
    # block of 3 n to n: convolutions 27 n n + n + 9 n n + n, norms 6 n + 2 n, shortcut 3 n n + n:
    # 39 n^2 + 11 n
    merging = {64: 160_448, 128: 640_384, 256: 2_558_720, 512: 10_229_248}
    # 2 x 2 convolutions of n to 2 n: 8 n^2 + 2 n
    down = 32_896 + 131_328 + 524_800 + 2_098_176
    stem, head = 65 * 9 * 64 + 64, 64 * 65 + 65
    with torch.device("meta"):
        model = UNet(65, 65, (721, 1440), Model())
    counted = sum(p.numel() for p in model.parameters())
    assert counted == sum(same.values()) + sum(merging.values()) + down + stem + head == 41_570_881
    assert (model.padded_shape, model.multiple) == ((736, 1440), 16)


def test_a_turned_globe_gives_the_turned_forecast():
    """By whole coarse cells, 4 columns: seen from the model, no meridian is the first."""
    fields = torch.randn(2, 5, 33, 36, dtype=torch.float64)
    model, regional = build_unet(dtype=torch.float64), build_unet(dtype=torch.float64, periodic=False)
    for shift in (4, 16):
        turned = model.predict(fields.roll(shift, dims=3))
        torch.testing.assert_close(turned, model.predict(fields).roll(shift, dims=3), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(regional.predict(fields.roll(4, 3)), regional.predict(fields).roll(4, 3))


@pytest.mark.parametrize(("kernel", "stride"), [(1, 1), (2, 2), (3, 1), (3, 2), (4, 2), (5, 1)])
@pytest.mark.parametrize("periodic", [True, False])
def test_a_convolution_pads_as_torch_does(kernel, stride, periodic):
    conv, x = GridConv2d(2, 3, kernel, stride, periodic), torch.randn(1, 2, 8, 12)
    before, after = (kernel - stride + 1) // 2, (kernel - stride) // 2
    padded = F.pad(x, (before, after, 0, 0), mode="circular" if periodic else "replicate")
    padded = F.pad(padded, (0, 0, before, after), mode="replicate")
    out = conv(x)
    assert out.shape == (1, 3, 8 // stride, 12 // stride)
    torch.testing.assert_close(out, F.conv2d(padded, conv.weight, conv.bias, stride))


def test_the_norm_sees_one_cell():
    norm, x = ChannelNorm(6), torch.randn(2, 6, 4, 5)
    out = norm(x)
    torch.testing.assert_close(out.mean(1), torch.zeros(2, 4, 5), atol=1e-6, rtol=0)
    torch.testing.assert_close(out[:, :, 1:2, 2:3], norm(x[:, :, 1:2, 2:3]))
    with torch.autocast("cpu", torch.bfloat16):
        low = norm(x.bfloat16())
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), out, atol=0.05, rtol=0.05)


def test_initial_weights_keep_the_size_of_fields():
    model = build_unet((32, 64), width=16, levels=3)
    assert 0.8 < model.blocks["encoder0"](torch.randn(2, 16, 32, 64)).std() < 1.5
    std = model.initial_std("blocks.encoder0.conv1.weight")
    assert std == pytest.approx((16 * 9) ** -0.5)
    assert model.initial_std("blocks.encoder0.norm1.weight") is model.initial_std("stem.bias") is None
