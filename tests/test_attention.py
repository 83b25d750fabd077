"""The kernel of `model.attention_backend = "auto"`, by a table; kernels that a machine does not have."""

import math
from unittest.mock import patch

import pytest
import torch

from models.attention import (
    FLASH4,
    Kernel,
    WindowedKernel,
    preferred_backend,
)

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
