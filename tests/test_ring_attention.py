"""The ring's operators: what they send is what they say, and gradients travel while others are computed.

That they give what one process gives is in tests/test_parity.py, compiled too.
"""

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

from parallelisms import ring_attention
from parallelisms.degrees import Degrees
from parallelisms.ring_attention import attend, attend_backward
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
