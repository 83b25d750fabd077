"""Asynchronous tensor parallelism: inductor finds every product beside a gather or a scatter, and fuses both.

On the fake process group and a CPU: its pass is told that there are NCCL and symmetric memory, and nothing of
what it makes is run. That the numbers stay is in tests/test_parity.py.
"""

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from config import Model
from models.vit import VisionTransformer
from parallelisms import tensor_parallel
from parallelisms.compile import apply_compile

FUSED = {"symm_mem.fused_all_gather_matmul.default": 2, "symm_mem.fused_matmul_reduce_scatter.default": 2}


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    symmetric = "torch.distributed._symmetric_memory.is_symm_mem_enabled_for_group"
    monkeypatch.setattr(symmetric, lambda name: True)
    monkeypatch.setattr(tensor_parallel, "enable_async_tensor_parallel", lambda name: None)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()
    torch._dynamo.reset()


def fused_graphs(asynchronous: bool) -> list[Counter[str]]:
    """Of a block's forward and backward: what of each graph talks to other ranks after inductor's pass."""
    found: list[Counter[str]] = []

    def look(graph: torch.fx.GraphModule, inputs: Any, **_: Any) -> Any:
        fused = copy.deepcopy(graph)
        view_to_reshape(fused)
        micro_pipeline_tp_pass(fused.graph)
        names = [str(node.target) for node in fused.graph.nodes]
        found.append(Counter(n for n in names if n.startswith(("symm_mem.fused", "_c10d_functional."))))
        return graph.forward

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = VisionTransformer(2, 2, (4, 8), Model("vit", (1, 1), 32, 2, 2))
    tensor_parallel.apply_tensor_parallel(model, mesh, asynchronous=asynchronous)
    apply_compile(model, backend=lambda graph, inputs: compile_fx(graph, inputs, inner_compile=look))
    with torch.autocast("cpu", torch.bfloat16):
        output = model(torch.randn(2, 32, 2))
    output.sum().backward()
    return found


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
def test_all_four_matrices_are_fused_with_their_collectives(two_ranks: None) -> None:
    """Forward and backward, and no other collective is left."""
    assert fused_graphs(asynchronous=True) == [FUSED, FUSED]


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
def test_a_bias_inside_the_product_hides_it(two_ranks: None) -> None:
    """Why it is taken out: of what torch makes by itself nothing is fused forward."""
    forward, backward = fused_graphs(asynchronous=False)
    assert not FUSED.keys() & forward.keys() and backward == FUSED
