"""The transform against closed forms, the dynamics against exact solutions, the record as users see it."""

import logging
import math
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

from config import Data
from datasets import convert, simulated
from datasets.archive import TrainingStore, open_archive
from datasets.simulated import (
    DEFAULTS,
    GRAVITY,
    LATITUDE,
    RADIUS,
    ROTATION,
    SphericalHarmonics,
    TwoLayerModel,
    simulate,
)
from errors import ConfigError

INVISCID = replace(  # motion only: the tendencies of all other processes are exactly zero
    DEFAULTS,
    mountains=(),
    radiation_time=math.inf,
    drag_time=math.inf,
    diffusion_time=math.inf,
    evaporation_time=math.inf,
    condensation_time=math.inf,
)


@pytest.fixture(scope="module")
def model() -> TwoLayerModel:
    return TwoLayerModel(INVISCID, torch.float64)


@pytest.fixture(scope="module")
def record() -> xr.Dataset:
    """Two years of six days after a spin-up long enough for eddies."""
    return simulate(2, 6, seed=3, parameters=replace(DEFAULTS, spin_up_days=20))


def project(model: TwoLayerModel, grid: np.ndarray) -> torch.Tensor:
    """Return the spectrum (C, N, 1, 1) of one field (W, H) on the Gaussian grid."""
    return model.transform.analyze(torch.from_numpy(grid)[:, :, None, None] * model.cos2)[0]


def test_synthesis_at_other_latitudes_and_derivatives_in_closed_form(model: TwoLayerModel) -> None:
    """f = sin(lat) cos2(lat) sin(2 lon), harmonic (3, 2): known slopes, and the Laplacian is -12 f / a2."""
    lat, lon = np.radians(LATITUDE)[None], np.radians(simulated.LONGITUDE)[:, None]
    spectrum = project(model, np.sin(2 * lon) * model.mu * (1 - model.mu**2))
    output = SphericalHarmonics(np.sin(lat[0]), lon[:, 0], simulated.TRUNCATION)
    zero, laplacian = torch.zeros_like(spectrum), model.transform.laplacian[:, None, None]
    value, waves = np.sin(lat) * np.cos(lat) ** 2, np.sin(2 * lon)
    slope = np.cos(lat) ** 2 * (np.cos(lat) ** 2 - 2 * np.sin(lat) ** 2)
    for tensor, expected in (
        (output.synthesize(spectrum), value * waves),
        (output.synthesize(model.transform.differentiate(spectrum)), 2 * value * np.cos(2 * lon)),
        (output.synthesize(zero, spectrum), slope * waves),
        (output.synthesize(spectrum * laplacian) * RADIUS**2, -12 * value * waves),
    ):
        np.testing.assert_allclose(tensor[:, :, 0, 0].numpy(), expected, atol=1e-10)


def test_balanced_flow_stays_for_a_day(model: TwoLayerModel) -> None:
    """The exact steady state (C, N, 7, 1) u = U cos(latitude) in each layer, depths in gradient balance."""
    mu = model.mu
    bowl = [-(RADIUS * ROTATION * speed + speed**2 / 2) * mu**2 for speed in (40.0, 10.0)]  # phi, m2 s-2
    depth_upper = DEFAULTS.depth_upper + (bowl[0] - bowl[1]) / (GRAVITY * (1 - DEFAULTS.density_ratio))
    depth_lower = DEFAULTS.depth_upper + DEFAULTS.depth_lower + bowl[0] / GRAVITY - depth_upper
    vorticity = [2 * speed / RADIUS * mu for speed in (40.0, 10.0)]
    fields = [*vorticity, 0 * mu, 0 * mu, depth_upper, depth_lower, 0 * mu]
    start = torch.cat([project(model, np.tile(field, (64, 1))) for field in fields], dim=2)
    *_, end = model.run(start, num_steps=32)
    drift = model.transform.synthesize(end - start).abs().amax(dim=(0, 1, 3))
    assert drift[:4].max() < 1e-14  # s-1, of 1e-5
    assert drift[4:6].max() < 1e-6  # m, of 8000


def test_mass_is_conserved_without_forcing_and_total_mass_with_it(model: TwoLayerModel) -> None:
    """And with forcing radiation only moves it from one layer to the other."""
    forced = TwoLayerModel(DEFAULTS, torch.float64)
    state = forced.create_state(1, seed=0)
    *_, end = model.run(state, num_steps=32)
    torch.testing.assert_close(end[0, 0, 4:6], state[0, 0, 4:6], rtol=1e-14, atol=0)
    *_, end = forced.run(state, num_steps=32)
    torch.testing.assert_close(end[0, 0, 4:6].sum(0), state[0, 0, 4:6].sum(0), rtol=1e-14, atol=0)


def test_energy_is_conserved_as_steps_become_short() -> None:
    """Two days of a disturbed jet lose 8e-6 of their energy (4e-4 with the default step and filter)."""
    model = TwoLayerModel(replace(INVISCID, step=300.0, filter_strength=0.005), torch.float64)
    state = model.create_state(1, seed=0)
    *_, end = model.run(state, num_steps=2 * 86400 // 300)
    assert energy(model, end) == pytest.approx(energy(model, state), rel=1.5e-5)


def energy(model: TwoLayerModel, state: torch.Tensor) -> float:
    """J m-2 over the lower layer's density: kinetic, and potential of both layers above the ground."""
    depth, u, v = model.transform.compute_winds(state[:, :, 4:6], state[:, :, :2], state[:, :, 2:4])
    ratio, (h1, h2) = DEFAULTS.density_ratio, depth.unbind(dim=2)
    speed = ((u**2 + v**2) / model.cos2).unbind(dim=2)
    kinetic = (ratio * h1 * speed[0] + h2 * speed[1]) / 2
    potential = GRAVITY * (ratio * h1 * (h2 + h1 / 2) + h2**2 / 2)
    total = (kinetic + potential).unsqueeze(2) * model.cos2
    return (model.transform.analyze(total)[0][0, 0] / math.sqrt(2)).item()


def test_schema(record: xr.Dataset) -> None:
    assert record.sizes == {"time": 48, "level": 2, "latitude": 32, "longitude": 64}
    for name in ("geopotential", "u_component_of_wind", "v_component_of_wind"):
        assert record[name].dims == ("time", "level", "latitude", "longitude")
    assert record.total_column_water_vapour.dims == ("time", "latitude", "longitude")
    assert record.geopotential_at_surface.dims == record.land_sea_mask.dims == ("latitude", "longitude")
    for variable in record.data_vars.values():
        assert variable.dtype == np.float32 and np.isfinite(variable).all() and variable.attrs["units"]
    np.testing.assert_array_equal(record.latitude, np.arange(-87.1875, 90, 5.625))
    np.testing.assert_array_equal(record.longitude, np.arange(0, 360, 5.625))
    assert str(record.time.values[0])[:13] == "2001-01-01T00"
    assert str(record.time.values[24])[:13] == "2002-01-01T00"  # the next year, after a gap
    assert set(np.diff(record.time[:24])) == {np.timedelta64(6, "h")}


def test_fields_are_weather(record: xr.Dataset) -> None:
    jet = record.u_component_of_wind.sel(level=300).mean(["time", "longitude"])
    core = float(jet.idxmax("latitude"))
    assert 20 < jet.max() < 60 and abs(core) > 25
    assert abs(record.u_component_of_wind).max() < 120
    height = record.geopotential.sel(level=300)
    assert 70_000 < height.min() and height.max() < 105_000
    assert record.total_column_water_vapour.min() >= 0 and record.total_column_water_vapour.max() < 80
    land = record.land_sea_mask > 0.5
    assert 0.03 < land.mean() < 0.4 and record.geopotential_at_surface.where(land).min() > 1000


def test_the_record_has_no_noise_at_the_grid_scale(record: xr.Dataset) -> None:
    power = np.abs(np.fft.rfft(record.v_component_of_wind, axis=-1)).mean((0, 2)) ** 2
    assert (power[:, 16:22] < 0.01 * power.max(axis=1, keepdims=True)).all()
    assert (power[:, 22:] < 1e-8 * power.max(axis=1, keepdims=True)).all()


def test_a_seed_is_a_record() -> None:
    short = replace(DEFAULTS, spin_up_days=0)
    first, again, other = (simulate(1, 1, seed, short) for seed in (0, 0, 1))
    assert first.identical(again)
    assert not first.geopotential.equals(other.geopotential)


def test_the_record_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    for name, value in (("NUM_YEARS", 1), ("NUM_DAYS", 2), ("DEFAULTS", replace(DEFAULTS, spin_up_days=0))):
        monkeypatch.setattr(simulated, name, value)
    path = tmp_path / "new" / "simulated.zarr"
    with caplog.at_level(logging.INFO, logger="datasets.convert"):
        callers = [threading.Thread(target=convert.write_simulated, args=(path,)) for _ in range(3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert len(caplog.records) == 1
    assert sorted(entry.name for entry in path.parent.iterdir()) == [".simulated.zarr.lock", "simulated.zarr"]
    assert isinstance(open_archive(str(path)), TrainingStore)
    with monkeypatch.context() as patch:  # on a disk that is only read
        patch.setattr(convert.fcntl, "flock", lambda *_: pytest.fail("locked"))
        convert.write_simulated(path)
        patch.setattr(convert, "VERSION", -1)  # of a store that this version does not read
        with pytest.raises(ConfigError, match="written by an earlier version; remove it"):
            convert.write_simulated(path)
    monkeypatch.setattr(simulated, "DEFAULTS", replace(DEFAULTS, spin_up_days=0, saturation=20.0))
    with pytest.raises(ConfigError, match="was begun with source"):  # other parameters
        convert.write_simulated(path)


def test_the_record_lies_where_the_configuration_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its message named data.store_path, which was not asked."""
    for name, value in (("NUM_YEARS", 1), ("NUM_DAYS", 2), ("DEFAULTS", replace(DEFAULTS, spin_up_days=0))):
        monkeypatch.setattr(simulated, name, value)
    path = tmp_path / "simulated.zarr"
    archive = convert.open_source(Data(variables=("geopotential:300",), store_path=str(path)))
    assert isinstance(archive, TrainingStore) and archive.path == str(path)
