"""models/registry.py: what is known of a model before it is built is what it then is; what it cannot do is
refused in one line.
"""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from checkpoints.files import write_manifest
from checkpoints.identity import Identity, meaning, plain
from config import Config, Model, Parallelism
from errors import ConfigError
from models.initialization import fill_with_nan, init_weights
from models.registry import CONTEXT, HARMLESS, MODELS, Registered, build_model
from models.weather_model import GridModel, TokenModel, WeatherModel
from tests.parity import cp, pp, tp
from tests.planned import run_forecast, run_train
from tests.started_jobs import run_options, write_config
from training.config_checks import check, load_checked

GRID = (13, 30)  # neither patches nor levels divide it
SMALL: dict[str, Any] = {"dim": 32, "num_layers": 2, "num_heads": 2, "width": 4, "levels": 2}
SMALL |= {"attention_backend": "math"}


@pytest.fixture(params=MODELS)
def built(request: pytest.FixtureRequest) -> tuple[Registered, WeatherModel]:
    """Of five channels in, three of them variables, with weights."""
    model = build_model(Model(request.param, **SMALL), 3, 2, GRID, True).to_empty(device="cpu")
    fill_with_nan(model)
    init_weights(model, 0)
    return MODELS[request.param], model  # type: ignore[return-value]


def test_a_model_is_what_is_registered(built: tuple[Registered, WeatherModel]) -> None:
    known, model = built
    assert isinstance(model, TokenModel if known.has_tokens else GridModel)
    assert set(known.splits) <= {"tp", "pp", "tiles", *CONTEXT}
    assert set(known.unused) < {field.name for field in fields(Model)}
    assert model.grid_shape == GRID and model.in_channels == 5


def test_a_model_gives_fields_and_learns_with_all_its_weights(built: tuple[Registered, WeatherModel]) -> None:
    """From every cell; its FLOPs are those that torch counts."""
    _, model = built
    fields = torch.randn(2, 5, *GRID, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        predicted = model.predict(fields)
    assert counter.get_total_flops() == 2 * model.flops()
    assert predicted.shape == (2, 3, *GRID) and predicted.isfinite().all()
    predicted.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert fields.grad is not None and fields.grad.abs().amax(dim=(0, 1)).all()
    assert torch.equal(model.to_fields(model.from_fields(fields)), fields)


def test_every_key_of_a_model_is_part_of_its_identity() -> None:
    """A key that no model's identity has would let a checkpoint resume as another model."""
    meanings = [key for known in MODELS.values() for key in known.settings]
    assert {field.name for field in fields(Model)} - set(meanings) == {"name", *HARMLESS}
    for name in MODELS:
        identity = meaning(plain(Config(model=Model(name))))  # type: ignore[arg-type]
        assert {f"model.{key}" for key in ("name", *MODELS[name].settings)} <= identity.keys()


OTHER: dict[str, Any] = {"patch_size": (2, 2), "dim": 64, "num_layers": 3, "num_heads": 4, "mlp_dim": 8}
OTHER |= {"position": "rotary", "qk_norm": True, "attention_windows": ((0, 1),)}
OTHER |= {"mlp": "swiglu", "width": 8, "levels": 1}


@pytest.mark.parametrize("name", MODELS)
def test_unused_keys_change_nothing(name: Any) -> None:
    def shapes(**changes: Any) -> dict[str, torch.Size]:
        model = build_model(replace(Model(name, **SMALL), **changes), 3, 2, GRID, True)
        return {key: parameter.shape for key, parameter in model.named_parameters()}

    for key in MODELS[name].unused:
        assert shapes(**{key: OTHER.get(key, True)}) == shapes(), key


def test_keys_that_name_a_model_are_unused_by_the_others() -> None:
    """Else a run of another model would be refused where they differ."""
    for field in fields(Model):
        label = field.metadata["help"].partition(":")[0]
        for name, known in MODELS.items() if label in ("ViT", "U-Net") else ():
            is_known = label in known.label or field.name in (*HARMLESS, *known.unused)
            assert is_known, f"{field.name} of a {label}: not among those that {name} does not use"


def test_a_checkpoint_of_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[model]\nname = "swin"\n')
    write_manifest(tmp_path, {}, {})
    with pytest.raises(ConfigError, match=r"its model.name = 'swin'.*vit") as caught:
        Identity.of(tmp_path).check(Config(), "")
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


OUTSIDE = """
import torch
from torch import nn
from models.weather_model import GridModel


class Pointwise(GridModel):
    def __init__(self, channels_in, channels_out, grid_shape):
        super().__init__()
        self.grid_shape, self.in_channels = grid_shape, channels_in
        self.padded_shape, self.multiple = grid_shape, 1
        self.blocks = nn.ModuleDict({"0": nn.Conv2d(channels_in, channels_out, 1)})

    def from_fields(self, fields, with_zeros=False):
        return fields

    def to_fields(self, output):
        return output

    def forward(self, fields):
        return self.blocks["0"](fields)

    def initial_std(self, name):
        return 0.1 if name.endswith("weight") else None

    def flops(self):
        return 1


def build(channels_in, channels_out, grid_shape, model, periodic):
    return Pointwise(channels_in, channels_out, grid_shape)


build.splits = ("ulysses",)


def build_linear(channels_in, channels_out, grid_shape, model, periodic):
    return nn.Linear(channels_in, channels_out)
"""


def test_a_model_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It trains, forecasts, is part of the identity, and cannot be split in ways that it does not name."""
    (tmp_path / "their_models.py").write_text(OUTSIDE)
    monkeypatch.syspath_prepend(tmp_path)
    words = run_options(write_config(tmp_path), tmp_path / "run")
    words += ["--data.validation_period", '["2020-01-10", "2020-01-10"]']
    words += ["--model.name", "their_models:build", "--training.steps", "3"]
    run_train(*words)
    run_forecast(words, tmp_path / "f.zarr", "--forecast.num_steps", "1")
    for name, reason in (
        ("their_models:other", "no attribute 'other'"),
        ("no_models:build", "No module named"),
        ("vitt", "did you mean vit"),
    ):
        with pytest.raises(ConfigError, match=reason):
            load_checked([*words, "--model.name", name])
    monkeypatch.setenv("NGPU", "2")
    for layout, fix in ((tp(), "set this to 1"), (pp(), "set this to 1"), (cp("ring"), "valid: ulysses")):
        with pytest.raises(ConfigError, match=f"their_models:build cannot be split so; {fix}"):
            check(replace(load_checked(words), parallelism=Parallelism(**layout)))
    with pytest.raises(ConfigError, match="a Linear, not a GridModel"):
        build_model(Model("their_models:build_linear"), 3, 2, GRID, True)
