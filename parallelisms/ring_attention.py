"""Attention whose keys and values pass from rank to rank: nobody ever holds those of the whole sequence.

Each rank keeps its queries. In cp rounds the keys and values of every rank come by; partial results are
merged by their log-sum-exp (Liu et al. 2023), and the next round's keys travel while this round's are used.
Shapes: B batch, N heads, t tokens a rank, s valid keys of a chunk, E head size.
"""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

BlockForward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
BlockBackward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def math_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out (B, N, t, E) and log-sum-exp of the scores (B, N, t) in float32."""
    scores = (q @ k.transpose(-2, -1)).float() / math.sqrt(q.shape[-1])  # (B, N, t, s)
    lse = scores.logsumexp(dim=-1)
    return (scores - lse[..., None]).exp().to(v.dtype) @ v, lse


def math_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v for one chunk of keys, given the merged `out` and `lse` of all of them."""
    scale = 1 / math.sqrt(q.shape[-1])
    weights = ((q @ k.transpose(-2, -1)).float() * scale - lse[..., None]).exp()  # (B, N, t, s)
    inner = (grad * out).float().sum(dim=-1, keepdim=True)  # (B, N, t, 1)
    grad_scores = (weights * ((grad @ v.transpose(-2, -1)).float() - inner) * scale).to(q.dtype)
    return grad_scores @ k, grad_scores.transpose(-2, -1) @ q, weights.to(grad.dtype).transpose(-2, -1) @ grad


def cpu_flash_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """As `math_forward`, without the matrix of scores."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    return out, lse.float()


def cpu_flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As `math_backward`: the kernel recomputes the weights from `lse`, so that the merged one is what it
    needs.
    """
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(grad, q, k, v, out, lse, 0.0, False)


def cuda_flash_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False)
    return out, lse.float()


def cuda_flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of a dropout that there is not
    offset = torch.zeros((), dtype=torch.uint64, device=q.device)
    sizes = (None, None, q.shape[2], k.shape[2])
    return backward(grad, q, k, v, out, lse, *sizes, 0.0, False, seed, offset)


def block_kernels(backend: str, device_type: str) -> tuple[BlockForward, BlockBackward]:
    """The pair for a backend: flash kernels and plain matmuls give the log-sum-exp that merging needs."""
    if backend == "math":
        return math_forward, math_backward
    if device_type == "cuda":
        return cuda_flash_forward, cuda_flash_backward
    return cpu_flash_forward, cpu_flash_backward


class Ring:
    """Neighbours of a rank in a group, and how much of each rank's chunk is not padding."""

    def __init__(self, group: dist.ProcessGroup, num_tokens: int) -> None:
        self.group, self.num_tokens = group, num_tokens
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.following = dist.get_global_rank(group, (self.rank + 1) % self.size)
        self.preceding = dist.get_global_rank(group, (self.rank - 1) % self.size)

    def valid(self, turn: int, chunk: int) -> int:
        """Keys in the chunk that is here after `turn` rounds: it came from rank - turn."""
        return max(0, min(chunk, self.num_tokens - (self.rank - turn) % self.size * chunk))

    def pass_on(self, tensor: Tensor) -> tuple[Tensor, list[dist.Work]]:
        """Starts sending `tensor` to the next rank; what arrives from the last, and what to wait for."""
        arriving = torch.empty_like(tensor)
        send = dist.P2POp(dist.isend, tensor, self.following, self.group)
        receive = dist.P2POp(dist.irecv, arriving, self.preceding, self.group)
        return arriving, dist.batch_isend_irecv([send, receive])


class RingAttention(torch.autograd.Function):
    """q, k, v (B, N, t, E) of this rank -> out (B, N, t, E) over the keys of all ranks."""

    @staticmethod
    def forward(ctx, q, k, v, ring: Ring, kernels: tuple[BlockForward, BlockBackward]):  # type: ignore[override]
        held, chunk = torch.stack([k, v]), k.shape[2]
        out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        lse = torch.full(q.shape[:3], -math.inf, dtype=torch.float32, device=q.device)
        for turn in range(ring.size):
            arriving, work = ring.pass_on(held) if turn < ring.size - 1 else (held, [])
            if valid := ring.valid(turn, chunk):
                part, part_lse = kernels[0](q, held[0][:, :, :valid], held[1][:, :, :valid])
                merged = torch.logaddexp(lse, part_lse)
                out = out * (lse - merged).exp()[..., None] + part * (part_lse - merged).exp()[..., None]
                lse = merged
            for item in work:
                item.wait()
            held = arriving
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring, ctx.kernels = ring, kernels
        return out

    @staticmethod
    def backward(ctx, *grads):
        """Keys go round once more, and their gradients with them: after cp rounds they are home."""
        (grad,), (q, k, v, out, lse) = grads, ctx.saved_tensors
        ring, chunk = ctx.ring, k.shape[2]
        held = torch.stack([k, v])
        grad_held = torch.zeros(held.shape, dtype=torch.float32, device=q.device)
        grad_q = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        for turn in range(ring.size):
            arriving, work = ring.pass_on(held) if turn < ring.size - 1 else (held, [])
            if valid := ring.valid(turn, chunk):
                keys, values = held[0][:, :, :valid], held[1][:, :, :valid]
                part_q, part_k, part_v = ctx.kernels[1](grad.contiguous(), q, keys, values, out, lse)
                grad_q += part_q
                grad_held[0, :, :, :valid] += part_k
                grad_held[1, :, :, :valid] += part_v
            for item in work:
                item.wait()
            arriving_grad, work = ring.pass_on(grad_held)
            for item in work:
                item.wait()
            held, grad_held = arriving, arriving_grad
        return grad_q.to(q.dtype), grad_held[0].to(k.dtype), grad_held[1].to(v.dtype), None, None
