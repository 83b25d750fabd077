"""What makes a run repeat itself to the bit."""

import os

import torch


def seed_step(seed: int, step: int, dp_rank: int) -> None:
    """Makes what is drawn in a step (stochastic depth) a function of the step, and alike on all ranks that
    share a sample; so no generator has to be kept in a checkpoint. Weights and samples have their own.
    """
    torch.manual_seed(((seed * 1_000_003 + step) * 65_537 + dp_rank) % 2**63)


def set_determinism(deterministic: bool, tf32: bool) -> None:
    """`deterministic` refuses kernels whose sums depend on the order in which threads arrive."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
        torch.use_deterministic_algorithms(True)
