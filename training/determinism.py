"""What makes a run repeat itself to the bit."""

import os

import torch


def set_determinism(seed: int, rank: int, deterministic: bool, tf32: bool) -> None:
    """Seeds what is drawn during the run (stochastic depth); weights and samples have generators of their
    own.

    `deterministic` refuses kernels whose sums depend on the order in which threads arrive.
    """
    torch.manual_seed(seed * 1_000_003 + rank)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
        torch.use_deterministic_algorithms(True)
