"""Tensor parallelism with sequence parallelism: two collectives a block forward, two backward.

Between the matrices tokens are sharded; a column-parallel matrix gathers them, the row-parallel one after it
reduces and scatters (Korthikanti et al. 2022). Everything else holds replicated DTensors on the same mesh, so
that one gradient norm exists.
"""

from functools import partial
from types import MethodType

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from models.lora import AdaptedLinear, adapted_product
from parallelisms.parameter_names import blocks_of

TOKENS, HEADS = 1, 1  # dim of tokens in (B, T, D), and of heads in (B, N, T, E)


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, *, asynchronous: bool = False) -> None:
    """Shards a ViT over the one axis of `mesh`; inputs and outputs of its modules are local tensors.

    asynchronous: compile overlaps the blocks' gathers and scatters with the products beside them.
    Heads must be a multiple of the axis (parallelisms/degrees.py), tokens too (parallelisms/token_shards.py).
    """
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    plan: dict[str, ParallelStyle] = {
        "patch_embedding": ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(TOKENS)),
        "modulation": PartsOfGradient(),
        "position": SequenceParallel(sequence_dim=TOKENS, use_local_output=True),
        "norm": SequenceParallel(sequence_dim=TOKENS, use_local_output=True),
        "head": RowwiseParallel(input_layouts=Shard(TOKENS), output_layouts=Shard(TOKENS)),
    }
    parallelize_module(model, mesh, {name: style for name, style in plan.items() if hasattr(model, name)})
    for block in blocks_of(model):
        parallelize_module(block, mesh, adapted_plan(block))
        if asynchronous:
            for name, style in block_plan().items():
                if isinstance(style, ColwiseParallel | RowwiseParallel):
                    add_bias_outside(block.get_submodule(name), by_columns=isinstance(style, ColwiseParallel))
    for name in frozen:  # torch's SequenceParallel makes new parameters, which would train
        model.get_parameter(name).requires_grad_(False)
    if asynchronous:
        enable_async_tensor_parallel(mesh.get_group().group_name)


class PartsOfGradient(ParallelStyle):
    """A module that every rank has whole, of inputs that all have alike. What it gives a rank uses on its own
    tokens: the gradient of it there is a summand.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, None, _replicated_input, _local_output)  # type: ignore[arg-type]


def _replicated_input(_: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[DTensor, ...]:
    return tuple(DTensor.from_local(each, mesh, [Replicate()], run_check=False) for each in inputs)


def _local_output(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
    return output.to_local(grad_placements=[Partial()])


def enable_async_tensor_parallel(group_name: str) -> None:
    """Compile may split a gather and its matrix product, and run one's parts while the other's are sent.

    Wang et al. 2023, as torch's inductor does it over symmetric memory; for CUDA, before the blocks are
    compiled.
    """
    from torch._inductor import config as inductor_config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    inductor_config._micro_pipeline_tp = True
    enable_symm_mem_for_group(group_name)  # type: ignore[arg-type]  # 2.13 gives the name a type of its own


def add_bias_outside(layer: nn.Module, by_columns: bool) -> None:
    """Of a plain matrix: the bias is added to this rank's shard of its output.

    torch's inductor knows a gather or a scatter beside a product alone, not beside one that adds a bias too;
    to a row-parallel product's summands no bias could be added but in parts.
    """
    if type(layer) is not nn.Linear or layer.bias is None:  # float8's adds it outside by itself
        return
    layer.forward = MethodType(_product, layer)
    # Each rank adds it to its own tokens: its gradient is a summand.
    layer.register_forward_hook(partial(_plus_bias, [Shard(0) if by_columns else Partial()]))


def _product(layer: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight)


def _plus_bias(placements: list[Placement], layer: nn.Linear, _inputs: object, output: Tensor) -> Tensor:
    """The hook after tensor parallelism's own: `output` is this rank's part, a local tensor."""
    assert isinstance(layer.bias, DTensor)
    return output + layer.bias.to_local(grad_placements=placements).to(output.dtype)


def adapted_plan(block: nn.Module) -> dict[str, ParallelStyle]:
    """`block_plan`, with the styles of LoRA for the matrices that have adapters."""
    plan = block_plan()
    for name, style in plan.items():
        if isinstance(block.get_submodule(name), AdaptedLinear):
            columns = isinstance(style, ColwiseParallel)
            rows = AdaptedRows(output_layouts=Shard(TOKENS))
            plan[name] = AdaptedColumns(input_layouts=Shard(TOKENS)) if columns else rows
    return plan


class AdaptedColumns(ColwiseParallel):
    """A matrix and its adapter's B by rows; A whole on every rank, whose tokens are all here by then.

    Each rank uses A for its own rows of B: the gradient there is a summand.
    """

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters()):
            place(module, key, parameter, device_mesh, Replicate() if key == "lora_a" else Shard(0))
        module.forward = MethodType(_product_by_columns, module)


class AdaptedRows(RowwiseParallel):
    """A matrix and its adapter's A by columns; B whole on every rank, for B (A x) is a summand as W x is, and
    both are reduced at once. The gradient of B is a summand too. The bias is added when all are.
    """

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters()):
            place(
                module, key, parameter, device_mesh, Shard(1) if key in ("weight", "lora_a") else Replicate()
            )
        module.forward = MethodType(_product_by_rows, module)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        if module.bias is not None:
            module.register_forward_hook(partial(_plus_bias, [Partial()]))
        return module


def place(module: nn.Module, key: str, parameter: nn.Parameter, mesh: DeviceMesh, where: Placement) -> None:
    """Puts a DTensor in the place of a module's own parameter; what is frozen stays so."""
    placed = nn.Parameter(distribute_tensor(parameter, mesh, [where]), requires_grad=parameter.requires_grad)
    module.register_parameter(key, placed)


def _product_by_columns(layer: AdaptedLinear, x: DTensor) -> DTensor:
    """x whole -> this rank's columns of the output, with their bias."""
    lora_a, lora_b = _own(layer.lora_a, [Partial()]), _own(layer.lora_b)
    output = _local_product(layer, x.to_local(grad_placements=[Partial()]), lora_a, lora_b)
    if layer.bias is not None:
        output = output + _own(layer.bias).to(output.dtype)
    return DTensor.from_local(output, x.device_mesh, [Shard(x.ndim - 1)], run_check=False)


def _product_by_rows(layer: AdaptedLinear, x: DTensor) -> DTensor:
    """This rank's columns of x -> its summand of the output."""
    lora_a, lora_b = _own(layer.lora_a), _own(layer.lora_b, [Partial()])
    output = _local_product(layer, x.to_local(), lora_a, lora_b)
    return DTensor.from_local(output, x.device_mesh, [Partial()], run_check=False)


def _local_product(layer: AdaptedLinear, x: Tensor, lora_a: Tensor, lora_b: Tensor) -> Tensor:
    """Of what this rank has. DTensor's own products would reduce B (A x) by itself, beside W x."""
    scale = None if layer.weight_scale is None else _own(layer.weight_scale)
    return adapted_product(x, _own(layer.weight), scale, lora_a, lora_b, factor=layer.factor)


def _own(parameter: Tensor, gradient: list[Placement] | None = None) -> Tensor:
    """This rank's part; `gradient`: what that of the part is of the whole's, where it is no part as well."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local(grad_placements=gradient)


def block_plan() -> dict[str, ParallelStyle]:
    """qkv's rows are ordered by head, so that a slice of them is whole heads (models/vit.py)."""
    return {
        "attention_norm": SequenceParallel(sequence_dim=TOKENS, use_local_output=True),
        "attention.qkv": ColwiseParallel(input_layouts=Shard(TOKENS)),
        "attention.q_norm": SequenceParallel(sequence_dim=HEADS, use_local_output=True),
        "attention.k_norm": SequenceParallel(sequence_dim=HEADS, use_local_output=True),
        "attention.projection": RowwiseParallel(output_layouts=Shard(TOKENS)),
        "mlp_norm": SequenceParallel(sequence_dim=TOKENS, use_local_output=True),
        "mlp.up": ColwiseParallel(input_layouts=Shard(TOKENS)),
        "mlp.down": RowwiseParallel(output_layouts=Shard(TOKENS)),
    }
