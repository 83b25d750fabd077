"""Settings that make a run bit-exact when it is repeated."""

import os

import torch


def seed_step(seed: int, step: int, dp_rank: int) -> None:
    """Seed the random numbers of a step (stochastic depth), equally on ranks that share a sample.

    So no generator has to be saved in a checkpoint. Initial weights and sample order have seeds of their own.
    """
    torch.manual_seed(((seed * 1_000_003 + step) * 65_537 + dp_rank) % 2**63)


def set_determinism(deterministic: bool) -> None:
    """Allow TF32; with `deterministic`, refuse kernels with sums that depend on the order of threads."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
        torch.use_deterministic_algorithms(True)
