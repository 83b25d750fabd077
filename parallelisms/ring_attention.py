"""Ring attention: keys and values are passed from rank to rank, so that no rank has those of all tokens.

Each rank keeps its queries. In cp steps it receives the keys and values of every rank; partial results are
merged by their log-sum-exp (Liu et al. 2023), and the next step's keys are sent while this step's are used.
Both directions are custom operators, which compile does not trace: in a graph it refuses sends.
Shapes: B batch, N heads, t tokens a rank, s valid keys of a chunk, E head size.
"""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, library
from torch.distributed.distributed_c10d import (
    _resolve_process_group,  # type: ignore[reportPrivateImportUsage]
)

BlockForward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # q, k, v -> out, log-sum-exp
BlockBackward = Callable[..., tuple[Tensor, Tensor, Tensor]]  # arguments of `math_backward`


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
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    return out, lse.float()


def cpu_flash_backward(*saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `math_backward`: the kernel recomputes the weights from the merged `lse`."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*saved, 0.0, False)


def cuda_flash_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False)
    return out, lse.float()


def cuda_flash_backward(*saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    backward, (_, q, k, *_) = torch.ops.aten._scaled_dot_product_flash_attention_backward, saved
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which is off
    offset = torch.zeros((), dtype=torch.uint64, device=q.device)
    return backward(*saved, None, None, q.shape[2], k.shape[2], 0.0, False, seed, offset)


def cudnn_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, False, False)
    return out, lse.squeeze(-1)  # from (B, N, t, 1)


def cudnn_backward(*saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    backward, (*tensors, lse) = torch.ops.aten._scaled_dot_product_cudnn_attention_backward, saved
    seed = torch.zeros((), dtype=torch.int64, device=lse.device)  # of dropout, which is off
    sizes = (None, None, None, saved[1].shape[2], saved[2].shape[2])  # no bias, no lengths of samples
    return backward(*tensors, lse[..., None], seed, seed, *sizes, 0.0, False)


def block_kernels(backend: str, device_type: str, dtype: torch.dtype) -> tuple[BlockForward, BlockBackward]:
    """Return the pair for a backend, with the log-sum-exp that merging needs.

    torch's flash kernel is FlashAttention-3 or -4 after `activate` (models/attention.py). On CUDA neither it
    nor cuDNN takes float32.
    """
    if device_type == "cuda" and dtype == torch.float32:
        backend = "math"
    flash = {
        "cuda": (cuda_flash_forward, cuda_flash_backward),
        "cpu": (cpu_flash_forward, cpu_flash_backward),
    }
    kernels = {"math": (math_forward, math_backward), "cudnn": (cudnn_forward, cudnn_backward)}
    return kernels.get(backend, flash[device_type])


KEYS, GRADIENTS = 0, 1  # tags, because both are sent at the same time


class Ring:
    """Neighbours of a rank in a group, and the number of valid keys of each rank's chunk."""

    def __init__(self, group_name: str, num_tokens: int) -> None:
        self.group = _resolve_process_group(group_name)  # type: ignore[reportArgumentType]
        self.num_tokens = num_tokens
        self.size, self.rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        self.following = dist.get_global_rank(self.group, (self.rank + 1) % self.size)
        self.preceding = dist.get_global_rank(self.group, (self.rank - 1) % self.size)

    def valid(self, step: int, chunk: int) -> int:
        """Return the number of keys of the chunk of `step`, which is that of rank - step."""
        return max(0, min(chunk, self.num_tokens - (self.rank - step) % self.size * chunk))

    def pass_on(self, tensor: Tensor, tag: int) -> tuple[Tensor, list[dist.Work]]:
        """Start to send `tensor` to the next rank; return the tensor to be received, and pending works."""
        arriving = torch.empty_like(tensor)
        send = dist.P2POp(dist.isend, tensor, self.following, self.group, tag)
        receive = dist.P2POp(dist.irecv, arriving, self.preceding, self.group, tag)
        return arriving, dist.batch_isend_irecv([send, receive])

    def pass_keys(self, chunk: Tensor, step: int) -> tuple[Tensor, list[dist.Work]]:
        """Start to send keys and values, except in the last step, when every rank has received all."""
        return self.pass_on(chunk, KEYS) if step < self.size - 1 else (chunk, [])


def wait_for(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def attend(
    q: Tensor, k: Tensor, v: Tensor, num_tokens: int, backend: str, sent: torch.dtype, group_name: str
) -> tuple[Tensor, Tensor]:
    """q, k, v (B, N, t, E) of this rank -> out (B, N, t, E) over all keys, its log-sum-exp (B, N, t).

    num_tokens: of all ranks, without padding; backend: of the block kernels; sent: type of gradients of keys
    and values in messages, which are added in float32. All ranks of the group call this together.
    """
    ring, (forward, _) = Ring(group_name, num_tokens), block_kernels(backend, q.device.type, q.dtype)
    keys_values, chunk = torch.stack([k, v]), k.shape[2]
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.full(q.shape[:3], -math.inf, dtype=torch.float32, device=q.device)
    for step in range(ring.size):
        arriving, works = ring.pass_keys(keys_values, step)
        if valid := ring.valid(step, chunk):
            keys, values = keys_values[:, :, :, :valid].unbind(0)
            part, part_lse = forward(q, keys, values)
            merged = torch.logaddexp(lse, part_lse)
            out = out * (lse - merged).exp()[..., None] + part * (part_lse - merged).exp()[..., None]
            lse = merged
        wait_for(works)
        keys_values = arriving
    return out.to(q.dtype), lse


def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    num_tokens: int,
    backend: str,
    sent: torch.dtype,
    group_name: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of q, k, v. Keys are passed around once more, and their gradients one step later.

    The gradient sum of the previous ranks for a chunk arrives while this rank computes its part; after cp
    steps each gradient is on the rank of its keys.
    """
    ring, (_, backward) = Ring(group_name, num_tokens), block_kernels(backend, q.device.type, q.dtype)
    keys_values, chunk = torch.stack([k, v]), k.shape[2]
    grad_q = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    grad_before, grad_works = torch.zeros(keys_values.shape, dtype=sent, device=q.device), []
    for step in range(ring.size):
        arriving, works = ring.pass_keys(keys_values, step)
        grad_here = torch.zeros(keys_values.shape, dtype=torch.float32, device=q.device)
        if valid := ring.valid(step, chunk):
            keys, values = keys_values[:, :, :, :valid].unbind(0)
            grad_q_here, grad_keys, grad_values = backward(grad, q, keys, values, out, lse)
            grad_q += grad_q_here
            grad_here[0, :, :, :valid] = grad_keys
            grad_here[1, :, :, :valid] = grad_values
        # What the rank before has added to the gradients of these keys, which have come from there.
        wait_for(grad_works)
        grad_here += grad_before
        grad_before, grad_works = ring.pass_on(grad_here.to(sent), GRADIENTS)
        wait_for(works)
        keys_values = arriving
    wait_for(grad_works)
    grad_k, grad_v = (grad.to(k.dtype, copy=True) for grad in grad_before)  # operators may not give views
    return grad_q.to(q.dtype), grad_k, grad_v


ring_attention = library.custom_op("rossby::ring_attention", attend, mutates_args=())
ring_attention_backward = library.custom_op(
    "rossby::ring_attention_backward", attend_backward, mutates_args=()
)


@ring_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *ring: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


@ring_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.ring = inputs[3:]


def _backward(ctx, grad: Tensor, grad_lse: Tensor) -> tuple:
    """Return gradients of the inputs; the log-sum-exp has none."""
    return *ring_attention_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.ring), *[None] * len(ctx.ring)


ring_attention.register_autograd(_backward, setup_context=_save)


def sends(k: Tensor, v: Tensor, group_name: str) -> list[int]:
    """Return the bytes of each tensor that `ring_attention` sends, for a recorder, of fake ranks too."""
    size = dist.get_world_size(_resolve_process_group(group_name))  # type: ignore[reportArgumentType]
    return [k.nbytes + v.nbytes] * (size - 1)


def sends_backward(k: Tensor, v: Tensor, sent: torch.dtype, group_name: str) -> list[int]:
    """Return the bytes of each tensor that `ring_attention_backward` sends: keys, then gradients."""
    keys = sends(k, v, group_name)
    return keys + [(k.numel() + v.numel()) * sent.itemsize] * (len(keys) + 1)
