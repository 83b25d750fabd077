"""AdamW whose moments rest in 16 or 8 bits between steps: `optimizer.state_dtype`.

A step takes the moments of one matrix at a time to float32, updates with torch's fused kernel, and rounds
them again. torchao's AdamW8bit has its own kernel, which compiles for every shape and does not look at a bad
step; its blocks are cut from what a rank holds, so that another layout could not load them. Here a block is
64 neighbours in a row of the whole matrix: codes and scales are plain tensors, sharded as the matrix is.
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from errors import ConfigError
from training.optimizers.fused_adamw import adamw_step, update
from training.optimizers.shards import MOMENTS, local, moments_of, with_gradient, zeros_like

STORED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.uint8}  # int8: codes of a table
BLOCK = 64  # numbers with one scale, whose 4 B are 6 % on top of 64 codes


class CompactAdamW(torch.optim.AdamW):
    """AdamW (Loshchilov & Hutter 2019) with moments of matrices in `state_dtype`, of all else in float32.

    "int8" is Dettmers et al. 2022 (arXiv:2110.02861): 8-bit codes of a non-linear table, scaled block by
    block. A bad step (`found_inf`) changes nothing, to the bit.
    """

    def __init__(self, groups: list[dict], state_dtype: str, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, lr=0.0, betas=betas, eps=eps, fused=True)
        self.state_dtype = state_dtype
        self.tables = code_tables() if state_dtype == "int8" else {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nobody here has a closure
        bad = getattr(self, "found_inf", None)
        for group in self.param_groups:
            parameters = with_gradient(group)
            for parameter in parameters:
                self._allocate(parameter)
            adamw_step(self, [p for p in parameters if not is_compact(p, self.state_dtype)], group, bad)
            for parameter in parameters:
                if is_compact(parameter, self.state_dtype):
                    self._step_compact(parameter, group, bad)

    def _step_compact(self, parameter: nn.Parameter, group: dict, bad: Tensor | None) -> None:
        moments = [self._load(parameter, name) for name in MOMENTS]
        update(self, [parameter], [[moment] for moment in moments], group, bad)
        for name, moment in zip(MOMENTS, moments, strict=True):
            self._store(parameter, name, moment, bad)

    def _allocate(self, parameter: nn.Parameter) -> None:
        state = self.state[parameter]
        if state:
            return
        compact = is_compact(parameter, self.state_dtype)
        dtype = STORED[self.state_dtype] if compact else torch.float32
        state["step"] = torch.zeros((), device=parameter.device)
        for moment in MOMENTS:
            state[moment] = zeros_like(parameter, dtype)
            if dtype == torch.uint8:
                state[f"{moment}_scale"] = zero_scales(parameter)  # whatever its codes say, a moment of 0

    def _load(self, parameter: nn.Parameter, moment: str) -> Tensor:
        """A moment in float32, of what this rank has of the parameter."""
        state = self.state[parameter]
        stored = local(state[moment])
        if stored.dtype != torch.uint8:
            return stored.float()
        values, _ = self._tables(moment, stored.device)
        return decode(stored, local(state[f"{moment}_scale"]), values)

    def _store(self, parameter: nn.Parameter, name: str, moment: Tensor, bad: Tensor | None) -> None:
        state = self.state[parameter]
        stored = local(state[name])
        if stored.dtype != torch.uint8:
            stored.copy_(moment)  # after a bad step they are what they were: nothing to round
            return
        _, codes = self._tables(name, stored.device)
        for old, new in zip((stored, local(state[f"{name}_scale"])), encode(moment, codes), strict=True):
            old.copy_(new if bad is None else torch.where(bad.to(new.device).bool(), old, new))

    def _tables(self, moment: str, device: torch.device) -> tuple[Tensor, Tensor]:
        if self.tables[moment][0].device != device:
            values, codes = self.tables[moment]
            self.tables[moment] = values.to(device), codes.to(device)
        return self.tables[moment]


def is_compact(parameter: Tensor, state_dtype: str) -> bool:
    """Matrices. For "int8" whole blocks must fill their rows, whatever part of them a rank has."""
    if state_dtype == "float32" or parameter.ndim < 2:
        return False
    return state_dtype != "int8" or parameter[0].numel() % BLOCK == 0


def empty_moment(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, name: str, dtype: torch.dtype
) -> Tensor:
    """What `optimizer.state[parameter][name]` is loaded into, sharded like the parameter.

    ConfigError: it was saved in another `optimizer.state_dtype`, or by another optimiser. AdamW and LAMB go
    on from each other's.
    """
    if name.removesuffix("_scale") not in moments_of(optimizer, parameter):
        own = type(optimizer).__name__.removeprefix("Compact")
        raise ConfigError(
            f'optimizer.name = "{own}": the states to go on from are another optimiser\'s ("{name}"); set it '
            "back, or start from weights alone: checkpoint.initial_load_path, in a new job.dump_folder"
        )
    if name == "step":  # the fused kernel wants it where the weights are
        return torch.zeros((), dtype=dtype, device=parameter.device)
    asked = getattr(optimizer, "state_dtype", "float32")
    is_scale = name.endswith("_scale")
    wanted = STORED[asked] if is_compact(parameter, asked) and not is_scale else torch.float32
    if dtype != wanted or (is_scale and asked != "int8"):
        saved = "int8" if is_scale else {v: k for k, v in STORED.items()}.get(dtype, str(dtype))
        raise ConfigError(
            f'optimizer.state_dtype = "{asked}": the states to go on from are {saved}; set it to "{saved}"'
        )
    return zero_scales(parameter) if is_scale else zeros_like(parameter, dtype)


def zero_scales(parameter: Tensor) -> Tensor:
    """One number a block: (rows, blocks in a row), sharded like the parameter."""
    part = local(parameter)
    scales = torch.zeros(len(part), blocks_in_row(part), device=part.device)
    if not isinstance(parameter, DTensor):
        return scales
    whole = torch.Size((len(parameter), parameter.shape[1:].numel() // BLOCK))
    result = DTensor.from_local(
        scales,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=whole,
        stride=(whole[1], 1),
    )
    return result.to(parameter.device)  # from_local moved it to the mesh's device; offloaded, it is not there


def blocks_in_row(part: Tensor) -> int:
    columns = part.shape[1:].numel()
    assert columns % BLOCK == 0, f"a rank has {columns} numbers of a row"  # config_checks has looked
    return columns // BLOCK


def code_tables() -> dict[str, tuple[Tensor, Tensor]]:
    """Moment -> the 256 values of its codes (rising, at most 1), and the code nearest to any bfloat16 number.

    Looked up: a search in the values takes 20 times as long. A second moment above 0 never becomes 0: the
    next update would be divided by eps alone.
    """
    from torchao.optim.quant_utils import create_dynamic_map  # late: torchao takes seconds

    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    tables = {}
    for moment, signed in zip(MOMENTS, (True, False), strict=True):
        values = torch.tensor(create_dynamic_map(signed=signed))
        bounds = (values[1:] + values[:-1]) / 2
        if not signed:
            bounds[0] = 0.0
        tables[moment] = values, torch.bucketize(numbers, bounds).to(torch.uint8)
    return tables


def encode(moment: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (uint8, shape of `moment`) and scales (rows, blocks): the largest of a block becomes 1."""
    blocks = moment.reshape(len(moment), blocks_in_row(moment), BLOCK)
    scales = blocks.abs().amax(dim=2)
    shares = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(2)
    bits = shares.bfloat16().view(torch.int16).int() & 0xFFFF  # as an unsigned number
    return codes.index_select(0, bits.flatten()).view_as(moment), scales


def decode(codes: Tensor, scales: Tensor, values: Tensor) -> Tensor:
    blocks = values.index_select(0, codes.flatten().int()).view(*scales.shape, BLOCK)
    return (blocks * scales.unsqueeze(2)).view(codes.shape)
