"""Adapters: what they compute and train, what a run with them starts from, and merged, plain weights."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import forecast
from checkpoints.files import read_tensors, stored_tensors
from config import Lora, Model
from datasets.grid import global_grid
from errors import ConfigError
from models.initialization import init_weights
from models.lora import AdaptedLinear, apply_lora, merge_lora, trained
from models.registry import build_model
from models.weather_model import WeatherModel
from planning.dry_run import dry_run
from tests.parity import TABLE, Layout, SmallRun, difference, full, reference_of
from tests.planned import run_export, run_forecast, run_train
from tests.started_jobs import write_config
from training.config_checks import load_checked


def plain_model() -> WeatherModel:
    return build_model(Model(dim=32, num_layers=2, num_heads=2), 3, 2, (8, 16), True)


def adapted(**lora) -> WeatherModel:
    """A small model with adapters that are not zero, on the CPU."""
    model = plain_model()
    apply_lora(model, Lora(rank=4, **lora))  # type: ignore[arg-type]
    model.to_empty(device="cpu")
    init_weights(model, seed=1)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b"):
            parameter.data.normal_(std=0.05)
    return model


def test_it_computes_what_the_merged_matrices_compute() -> None:
    """The model without adapters, its matrices W + 2 B A written out."""
    model, fields = adapted(), torch.randn(2, 5, 8, 16)
    twin = plain_model().to_empty(device="cpu")
    stored = dict(model.named_parameters())
    for name, parameter in twin.named_parameters():
        value = stored[name].detach()
        adapter = name.replace("weight", "lora_a")
        if adapter != name and adapter in stored:
            value = value + 2 * stored[name.replace("weight", "lora_b")] @ stored[adapter]
        parameter.data.copy_(value)
    expected = twin.predict(fields)
    torch.testing.assert_close(model.predict(fields), expected, atol=1e-5, rtol=1e-5)
    merge_lora(model)
    assert not any(isinstance(module, AdaptedLinear) for module in model.modules())
    torch.testing.assert_close(model.predict(fields), expected, atol=1e-5, rtol=1e-5)


def test_it_trains_what_is_asked_for_and_starts_as_the_base() -> None:
    model = adapted()
    names = trained(dict(model.named_parameters()))
    assert {name.rpartition(".")[2] for name in names} == {"lora_a", "lora_b"}
    more = trained(dict(adapted(also_train=("head", "norms")).named_parameters()))
    assert "head.weight" in more and "blocks.1.mlp_norm.bias" in more and "patch_embedding.weight" not in more
    fresh, base, fields = plain_model(), plain_model(), torch.randn(1, 5, 8, 16)
    apply_lora(fresh, Lora(rank=8))
    for each in (fresh, base):
        init_weights(each.to_empty(device="cpu"), seed=1)
    torch.testing.assert_close(fresh.predict(fields), base.predict(fields))


SETTINGS = {"Muon": {"name": "Muon"}, "LAMB": {"name": "LAMB"}, "averages": {"ema_decay": 0.9}}


def weights_after(layout: Layout, settings: dict) -> dict[str, np.ndarray]:
    """Trained parameters after three steps."""
    small = SmallRun(layout, **settings)
    for step in range(3):
        small.step(step)
    own = trained(small.model.parameters)
    averages = small.state.average.averages if small.state.average else {}
    assert averages.keys() == (own.keys() if averages else set())
    return {name: full(p) for name, p in own.items()} | {f"ema.{n}": full(t) for n, t in averages.items()}


@pytest.mark.parametrize("name", SETTINGS)
def test_ways_to_update_under_hsdp(ranks, name: str) -> None:
    """Equal to one process."""
    layout = replace(TABLE["lora, hsdp 2 x 2"], model=(("dim", 128),))
    expected = ranks(1).run(weights_after, reference_of(layout), SETTINGS[name])[0]
    got = ranks(4).run(weights_after, layout, SETTINGS[name])[0]
    assert difference(got, expected)[0] < 1e-4


def test_a_dry_run_counts_moments_of_what_trains_alone() -> None:
    options = ["--job.config_file", "train_configs/demo.toml", "--lora.rank", "2"]
    options += ["--checkpoint.initial_load_path", "elsewhere", "--model.dim=192", "--optimizer.name=AdamW"]
    found = dry_run(load_checked(options), 2, global_grid((32, 64)), 7)
    adapters = 4 * 4 * 2 * 17 * 192 // 2  # bytes: layers x rank x features in and out, of every second rank
    assert found.gradients == adapters and 2 * adapters <= found.optimizer < 2.1 * adapters


# -- runs


SHORT = ["--training.steps", "4", "--training.ema_decay", "0.9"]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> list[str]:
    """Options of a short run that has ended, in the folder of its configuration."""
    folder = tmp_path_factory.mktemp("base")
    options = ["--job.config_file", str(write_config(folder))]
    run_train(*options, "--job.dump_folder", str(folder / "base"), *SHORT)
    return options


def adapted_options(base: list[str], folder: Path, *options: str) -> list[str]:
    """Of a run of 4 steps from the base."""
    start = str(Path(base[1]).parent / "base")
    chosen = ["--job.dump_folder", str(folder), "--checkpoint.initial_load_path", start, "--lora.rank", "2"]
    return [*base, *chosen, *SHORT, *options]


def adapt(base: list[str], folder: Path, *options: str) -> list[str]:
    """The same, and the run has taken them."""
    chosen = adapted_options(base, folder, *options)
    run_train(*chosen)
    return chosen


def refused(options: list[str], message: str) -> None:
    """A run that starts its ranks and ends in one line."""
    with pytest.raises(ConfigError, match=message):
        run_train(*options)


def tensors(run: Path, step: int = 4) -> dict[str, Tensor]:
    folder = run / f"checkpoints/step-{step:08d}"
    stored = stored_tensors(folder)
    found = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in stored.items()}
    read_tensors(folder, found)
    return found


def forecast_of(options: list[str], target: Path) -> np.ndarray:
    period = ["--forecast.period", '["2020-01-07", "2020-01-07T00"]', "--forecast.num_steps", "3"]
    return run_forecast(options, target, *period)["10m_u_component_of_wind"].values


def test_a_run_keeps_its_base_and_goes_on_to_the_bit(base, tmp_path: Path) -> None:
    options = adapt(base, tmp_path / "run")
    theirs, ours = tensors(Path(base[1]).parent / "base"), tensors(tmp_path / "run")
    name = "blocks.1.mlp.up.weight"
    # Averaged weights are what a run is used with, and so what is adapted.
    assert torch.equal(ours[f"model.{name}"], theirs[f"ema.{name}"])
    assert torch.equal(ours["model.head.weight"], theirs["ema.head.weight"])
    assert ours["model.blocks.0.attention.qkv.lora_b"].abs().max() > 0
    kept = {each.split(".")[-2] for each in ours if each.startswith("optimizer.")}
    assert kept == {"lora_a", "lora_b"} == {each.split(".")[-1] for each in ours if each.startswith("ema.")}
    run_train(*options, "--training.steps", "7")
    adapt(base, tmp_path / "whole", "--training.steps", "7")
    stopped, through = tensors(tmp_path / "run", 7), tensors(tmp_path / "whole", 7)
    assert stopped.keys() == through.keys()
    for each in stopped:
        torch.testing.assert_close(stopped[each], through[each], rtol=0, atol=0, equal_nan=True, msg=each)


def test_averages_of_parts_that_train_from_now_on_start_from_their_weights(base, tmp_path: Path) -> None:
    """They started from random ones, which every validation, export and forecast took."""
    options = adapt(base, tmp_path / "run", "--training.ema_decay", "0.999")
    run_train(*options, "--training.steps", "5", "--lora.also_train", '["head"]')
    before, after = tensors(tmp_path / "run"), tensors(tmp_path / "run", 5)
    head = "head.weight"
    assert (after[f"ema.{head}"] - before[f"model.{head}"]).norm() < 0.05 * before[f"model.{head}"].norm()
    assert not torch.equal(after[f"model.{head}"], before[f"model.{head}"])


def test_other_adapters_do_not_resume(base, tmp_path: Path) -> None:
    options = adapt(base, tmp_path / "run")
    refused([*options, "--training.steps", "6", "--lora.rank=3"], "lora.rank")


def test_merged_it_is_a_plain_model_with_the_same_forecasts(base, tmp_path: Path) -> None:
    options = adapt(base, tmp_path / "run", "--optimizer.lr", "0.05")
    run_export(options, tmp_path / "merged")
    plain = [*base, "--job.dump_folder", str(tmp_path / "merged")]
    expected = forecast_of(options, tmp_path / "adapted.zarr")
    got = forecast_of(plain, tmp_path / "merged.zarr")
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
    unadapted = [*base, "--job.dump_folder", str(Path(base[1]).parent / "base")]
    started = forecast_of(unadapted, tmp_path / "base.zarr")
    assert np.abs(got - started).max() > 0.01  # of metres a second: the adapters have learned something
    with safe_open(tmp_path / "merged/model.safetensors", "pt") as file:
        assert not any("lora" in name for name in file.keys())
    # Training goes on from it, and from nothing else that a run with adapters leaves.
    more = ["--training.steps", "1", "--job.dump_folder", str(tmp_path / "on")]
    run_train(*base, *more, "--checkpoint.initial_load_path", str(tmp_path / "merged"))
    more[-1] = str(tmp_path / "refused")
    unmerged = ["--checkpoint.initial_load_path", str(tmp_path / "run")]
    refused([*base, *more, *unmerged], "its weights need their adapters")
    with pytest.raises(ConfigError, match="--export .*merged"):
        forecast.export(load_checked(options), tmp_path / "merged")


def test_new_variables_need_the_layers_that_learn_them(base, tmp_path: Path) -> None:
    more = ["--data.forcings", '["sin_local_time"]']
    start = adapted_options(base, tmp_path / "run", *more)
    refused(start, 'has no sin_local_time.*add "patch_embedding" to lora.also_train')
    adapt(base, tmp_path / "run", *more, "--lora.also_train", '["patch_embedding"]')
    assert "optimizer.patch_embedding.weight.exp_avg" in tensors(tmp_path / "run")
    deeper = adapted_options(base, tmp_path / "deeper", "--model.num_layers", "3")
    refused(deeper, "has no blocks.2.*would keep its random values")
