"""The ring's operators: what they send is what they say, and gradients travel while others are computed.

That they give what one process gives is in tests/test_parity.py, compiled too.
"""

from collections import Counter
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from parallelisms import ring_attention
from parallelisms.degrees import Degrees
from parallelisms.ring_attention import GRADIENTS, Ring, attend, attend_backward
from planning.dry_run import Recorder
from planning.network import Collective
from tests.distributed import shared_mesh

SHAPE = (2, 3, 5, 8)  # B, N, t, E


def inputs(number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(SHAPE, generator=generator) for _ in range(number)]


def recorded(sent: torch.dtype, as_operators: bool) -> Counter[Collective]:
    """What forward and backward send, as the operators say or as their code does it."""
    mesh = shared_mesh(Degrees(cp=dist.get_world_size()))
    around = (SHAPE[2] * dist.get_world_size() - 2, "math", sent, mesh.group("cp").group_name)
    forward, backward = attend, attend_backward
    if as_operators:
        forward, backward = ring_attention.ring_attention, ring_attention.ring_attention_backward
    q, k, v, grad = inputs(4)
    with Recorder(mesh) as record:
        out, lse = forward(q, k, v, *around)
        backward(grad, q, k, v, out, lse, *around)
    return record.calls


def test_operators_say_what_they_send(ranks) -> None:
    for sent in (torch.float32, torch.bfloat16):
        done, said = (ranks(2).run(recorded, sent, as_operators) for as_operators in (False, True))
        assert done == said
        values = 2 * 2 * 3 * 5 * 8  # keys and values
        keys, gradients = Counter({4 * values: 2}), Counter({sent.itemsize * values: 2})
        assert done[0] == {Collective("send", "cp", size): n for size, n in (keys + gradients).items()}


def order_of_backward() -> list[str]:
    """What backward does on this rank: what it sends, when it computes, what it waits for."""
    seen: list[str] = []
    pass_on, wait_for = Ring.pass_on, ring_attention.wait_for
    forward, backward = ring_attention.block_kernels("math", "cpu", torch.float32)
    on_gpu = ring_attention.block_kernels("flash", "cuda", torch.float32)  # which no other kernel takes
    assert on_gpu == (forward, backward)
    names: dict[int, str] = {}  # of what is waited for

    def passing(ring: Ring, tensor: Tensor, tag: int) -> tuple[Tensor, list[dist.Work]]:
        arriving, works = pass_on(ring, tensor, tag)
        names[id(works)] = "gradients" if tag == GRADIENTS else "keys"
        seen.append(f"send {names[id(works)]}")
        return arriving, works

    def waiting(works: list[dist.Work]) -> None:
        if works:
            seen.append(f"wait for {names[id(works)]}")
        wait_for(works)

    def computing(*arguments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        seen.append("compute")
        return backward(*arguments)

    mesh = shared_mesh(Degrees(cp=dist.get_world_size()))
    around = (SHAPE[2] * dist.get_world_size(), "math", torch.float32, mesh.group("cp").group_name)
    q, k, v, grad = inputs(4)
    out, lse = attend(q, k, v, *around)
    with (
        patch.object(Ring, "pass_on", passing),
        patch.object(ring_attention, "wait_for", waiting),
        patch.object(ring_attention, "block_kernels", lambda *_: (forward, computing)),
    ):
        attend_backward(grad, q, k, v, out, lse, *around)
    return seen


def test_gradients_travel_while_others_are_computed(ranks) -> None:
    for seen in ranks(2).run(order_of_backward):
        assert seen == [
            *("send keys", "compute", "send gradients", "wait for keys"),
            *("compute", "wait for gradients", "send gradients", "wait for gradients"),
        ]
