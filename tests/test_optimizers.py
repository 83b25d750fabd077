"""Tables of optimizers and schedules against config.py, and states that a checkpoint may not have."""

from dataclasses import replace
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import nn

from config import LrScheduler, Optimizer
from errors import ConfigError
from training.optimizers.build import build_optimizer
from training.optimizers.lr_schedules import DECAYS, SCALINGS, learning_rate
from training.optimizers.shards import empty_moment
from training.optimizers.trust_ratios import SharedSums


def choices(section: type, key: str) -> tuple[str, ...]:
    return get_args(get_type_hints(section)[key])


def build(name: Any) -> torch.optim.Optimizer:
    parameters: dict[str, nn.Parameter] = dict(nn.Linear(4, 3).named_parameters())
    sums = SharedSums(list(parameters), parameters, 1, torch.device("cpu"))
    return build_optimizer(parameters, Optimizer(name=name), sums, torch.float32)


@pytest.mark.parametrize("name", choices(Optimizer, "name"))
def test_every_optimizer_of_the_configuration_is_built(name: str) -> None:
    assert type(build(name)).__name__ == name


def test_schedules_have_every_choice_of_the_configuration() -> None:
    assert set(DECAYS) == set(choices(LrScheduler, "decay_type"))
    assert set(SCALINGS) == set(choices(Optimizer, "lr_scaling"))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="optimizer.name = 'Lion': no such optimizer"):
        build("Lion")
    unknown: Any = "exponential"
    with pytest.raises(ConfigError, match="lr_scheduler.decay_type = 'exponential': no such decay"):
        learning_rate(Optimizer(), replace(LrScheduler(), decay_type=unknown), 10, 8, 1)
    with pytest.raises(ConfigError, match="optimizer.lr_scaling = 'exponential': no such scaling"):
        learning_rate(replace(Optimizer(), lr_scaling=unknown), LrScheduler(), 10, 8, 1)


def test_moments_in_few_bits_are_refused() -> None:
    """Earlier versions saved them in bfloat16, or as codes with scales."""
    optimizer = build("AdamW")
    parameter = optimizer.param_groups[0]["params"][0]
    assert empty_moment(optimizer, parameter, "exp_avg", torch.float32).shape == parameter.shape
    for name, dtype in (("exp_avg", torch.bfloat16), ("exp_avg_scale", torch.float32)):
        with pytest.raises(ConfigError, match='optimizer.name = "AdamW": .* 16 or 8 bits, of an earlier'):
            empty_moment(optimizer, parameter, name, dtype)
