"""The U-Net: parameter count, FLOPs, any grid, the seam of longitudes, initialisation."""

import pytest
import torch
import torch.nn.functional as F

from config import Model
from models.initialization import fill_with_nan, init_weights
from models.unet import ChannelNorm, GridConv2d, UNet


def build(grid=(33, 36), width=8, levels=2, dtype=torch.float32, **options) -> UNet:
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
    model, regional = build(dtype=torch.float64), build(dtype=torch.float64, periodic=False)
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
    model = build((32, 64), width=16, levels=3)
    assert 0.8 < model.blocks["encoder0"](torch.randn(2, 16, 32, 64)).std() < 1.5
    std = model.initial_std("blocks.encoder0.conv1.weight")
    assert std == pytest.approx((16 * 9) ** -0.5)
    assert model.initial_std("blocks.encoder0.norm1.weight") is model.initial_std("stem.bias") is None
