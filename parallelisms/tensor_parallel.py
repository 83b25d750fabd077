"""Tensor parallelism with sequence parallelism: two collectives a block forward, two backward.

Tokens are sharded between the matrices: a column-parallel matrix gathers them, the next row-parallel matrix
reduce-scatters them (Korthikanti et al. 2022). All other parameters are replicated DTensors on the same mesh,
which makes a single gradient norm possible.
"""

from functools import partial
from types import MethodType

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from models.lora import AdaptedLinear, adapted_product
from parallelisms.parameter_names import blocks_of

TOKENS, HEADS = 1, 1  # dim of tokens in (B, T, D), and of heads in (B, N, T, E)


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a ViT over the one axis of `mesh`; inputs and outputs of its modules are local tensors.

    Heads must be a multiple of the axis (parallelisms/degrees.py), tokens too (parallelisms/token_shards.py).
    """
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    plan: dict[str, ParallelStyle] = {
        "patch_embedding": ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(TOKENS)),
        "position": SequenceParallel(sequence_dim=TOKENS, use_local_output=True),
        "norm": SequenceParallel(sequence_dim=TOKENS, use_local_output=True),
        "head": RowwiseParallel(input_layouts=Shard(TOKENS), output_layouts=Shard(TOKENS)),
    }
    parallelize_module(model, mesh, {name: style for name, style in plan.items() if hasattr(model, name)})
    for block in blocks_of(model):
        parallelize_module(block, mesh, block_plan(block))
    for name in frozen:  # torch's SequenceParallel makes new parameters, which would be trained
        model.get_parameter(name).requires_grad_(False)


def block_plan(block: nn.Module) -> dict[str, ParallelStyle]:
    """Return the styles of a block's modules, those of LoRA for matrices with adapters.

    Rows of qkv are ordered by head, so that a slice of them is whole heads (models/vit.py).
    """
    norm = partial(SequenceParallel, use_local_output=True)
    shards, whole = Shard(TOKENS), Replicate()

    def is_adapted(name: str) -> bool:
        return isinstance(block.get_submodule(name), AdaptedLinear)

    def by_columns(name: str, tokens: Placement = shards) -> ParallelStyle:
        return (AdaptedColumns if is_adapted(name) else ColwiseParallel)(input_layouts=tokens)

    def by_rows(name: str) -> ParallelStyle:
        return (AdaptedRows if is_adapted(name) else RowwiseParallel)(output_layouts=shards)

    plan = {
        "attention_norm": norm(sequence_dim=TOKENS),
        "attention.qkv": by_columns("attention.qkv"),
        "attention.q_norm": norm(sequence_dim=HEADS),
        "attention.k_norm": norm(sequence_dim=HEADS),
        "attention.projection": by_rows("attention.projection"),
        "mlp_norm": norm(sequence_dim=TOKENS),
        "mlp.up": by_columns("mlp.up"),
        "mlp.down": by_rows("mlp.down"),
    }
    if block.get_submodule("mlp").gate is not None:  # two matrices have the same input: gather it once
        plan["mlp"] = PrepareModuleInput(input_layouts=(shards,), desired_input_layouts=(whole,))
        plan |= {name: by_columns(name, whole) for name in ("mlp.up", "mlp.gate")}
    return plan


# -- adapters


def _add_bias(placements: list[Placement], layer: nn.Linear, _inputs: object, output: Tensor) -> Tensor:
    """Forward hook after tensor parallelism's own: `output` is this rank's part, a local tensor."""
    return output + _local(layer.bias, placements).to(output.dtype)


class AdaptedColumns(ColwiseParallel):
    """Style that shards a matrix and its adapter's B by rows; A is replicated, tokens are gathered before.

    Each rank uses A only for its rows of B, so that its gradient of A is a partial sum.
    """

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters()):
            shard_parameter(module, key, parameter, device_mesh, Replicate() if key == "lora_a" else Shard(0))
        module.forward = MethodType(_product_by_columns, module)


class AdaptedRows(RowwiseParallel):
    """Style that shards a matrix and its adapter's A by columns; B is replicated.

    B (A x) and W x are partial sums, which are reduced together; the gradient of B is partial too. The bias
    is added after the reduction.
    """

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters()):
            placement = Shard(1) if key in ("weight", "lora_a") else Replicate()
            shard_parameter(module, key, parameter, device_mesh, placement)
        module.forward = MethodType(_product_by_rows, module)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        if module.bias is not None:
            module.register_forward_hook(partial(_add_bias, [Partial()]))
        return module


def shard_parameter(
    module: nn.Module, key: str, parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement
) -> None:
    """Replace a module's own parameter by a DTensor; a frozen one stays frozen."""
    sharded = distribute_tensor(parameter, mesh, [placement])
    module.register_parameter(key, nn.Parameter(sharded, requires_grad=parameter.requires_grad))


# These use local tensors, because DTensor's own matmuls would reduce B (A x) separately from W x.


def _product_by_columns(layer: AdaptedLinear, x: DTensor) -> DTensor:
    """x whole -> this rank's columns of the output, with their bias."""
    lora_a, lora_b = _local(layer.lora_a, [Partial()]), _local(layer.lora_b)
    local = x.to_local(grad_placements=[Partial()])
    output = adapted_product(local, _local(layer.weight), lora_a, lora_b, layer.factor)
    if layer.bias is not None:
        output = output + _local(layer.bias).to(output.dtype)
    return DTensor.from_local(output, x.device_mesh, [Shard(x.ndim - 1)], run_check=False)


def _product_by_rows(layer: AdaptedLinear, x: DTensor) -> DTensor:
    """This rank's columns of x -> its summand of the output."""
    lora_a, lora_b = _local(layer.lora_a), _local(layer.lora_b, [Partial()])
    output = adapted_product(x.to_local(), _local(layer.weight), lora_a, lora_b, layer.factor)
    return DTensor.from_local(output, x.device_mesh, [Partial()], run_check=False)


def _local(parameter: Tensor, grad_placements: list[Placement] | None = None) -> Tensor:
    """Return this rank's part; grad_placements: of its gradient, where they are not those of the part."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local(grad_placements=grad_placements)
