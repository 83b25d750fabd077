"""Global means that a model keeps, against integrals known in closed form."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from datasets.channels import Channels
from datasets.conditions import Conditions
from datasets.grid import Grid, area_weights, global_grid
from datasets.normalization import Normalizer
from datasets.statistics import Statistics
from errors import DataError
from tests.parity import fields_of
from training.conservation import build_conservation
from verification.rollout import rollout

NAMES = ["total_column_water_vapour", "2m_temperature", "surface_pressure"]
MEAN, STD, CHANGE = np.array([[18.0, 279.0, 96_700.0], [16.0, 21.0, 9_500.0], [2.4, 2.3, 240.0]])
HOUR = 3600
CHANNELS = Channels(tuple(NAMES))


def statistics(shape: tuple[int, int]) -> Statistics:
    """About those of ERA5, for 6 h."""
    return replace(fields_of(shape).statistics, mean=MEAN, std=STD, change_std=CHANGE)


def normalizer_of(grid: Grid, *quantities: str) -> Normalizer:
    known, rows = statistics(grid.shape), area_weights(grid.latitude)
    return Normalizer(known, "change", CHANNELS, build_conservation(quantities, NAMES, known, rows))


def global_means(fields: Tensor, grid: Grid) -> np.ndarray:
    """(..., V, H, W) -> (..., V), in float64."""
    weights = area_weights(grid.latitude)[:, None] / grid.shape[1]
    return (fields.double().numpy() * weights).sum((-2, -1)) / grid.shape[0]


def weather(grid: Grid, batch: int = 2) -> Tensor:
    """Physical states (B, 3, H, W)."""
    noise = torch.randn(batch, 3, *grid.shape, generator=torch.Generator().manual_seed(0))
    return (noise * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]).float()


def test_dry_mass_of_fields_with_known_integrals():
    """Over the sphere sin^2(latitude) has the mean 1/3, cos(latitude) pi/4: rows of a degree know that."""
    grid = Grid(np.linspace(90, -90, 181), np.arange(8) * 45.0)
    latitude = torch.deg2rad(torch.tensor(grid.latitude))[:, None].expand(grid.shape)
    vapour, pressure = 2.0 + latitude.cos(), 30.0 + 500.0 * latitude.sin() ** 2  # kg m-2, Pa
    changes = torch.stack([vapour, latitude.sin(), pressure]) / torch.tensor(CHANGE)[:, None, None]
    normalizer = normalizer_of(grid, "dry_mass")
    assert normalizer.conservation is not None
    held = normalizer.conservation(changes[None].float())[0] * torch.tensor(CHANGE)[:, None, None]
    excess = 30.0 + 500.0 / 3 - 9.80665 * (2.0 + np.pi / 4)  # Pa
    np.testing.assert_allclose(held[2], pressure - excess, atol=500 * 1e-4)
    np.testing.assert_allclose(held[:2], torch.stack([vapour, latitude.sin()]), atol=1e-6)


def test_total_water_of_a_column_with_a_known_integral():
    """Of q = a p + b between 500 and 1000 hPa the rule is exact; over the globe sin^2 has the mean 1/3."""
    levels, grid = [1000, 500, 850], Grid(np.linspace(90, -90, 181), np.arange(8) * 45.0)
    names, changes = ["2m_temperature", *(f"specific_humidity:{p}" for p in levels)], np.array([2.0, 4, 1, 3])
    a, b, pressure = 2e-7, -5e-3, 100.0 * np.array(levels)  # Pa-1, 1, Pa
    sine = np.sin(np.deg2rad(grid.latitude))[:, None] * np.ones(8)
    humidity = (a * pressure + b)[:, None, None] * sine**2 + 1e-4 * sine
    fields = np.concatenate([sine[None], humidity])
    known = replace(fields_of(grid.shape, tuple(names)).statistics, std=changes, change_std=changes)
    conservation = build_conservation(["total_water"], names, known, area_weights(grid.latitude))
    assert conservation is not None
    output = torch.from_numpy(fields / changes[:, None, None])
    held = conservation(output[None])[0].double().numpy() * changes[:, None, None]
    water = (a * (1e5**2 - 5e4**2) / 2 + b * (1e5 - 5e4)) / 9.80665 / 3  # kg m-2
    mass = (1e5 - 8.5e4) / 2 / 9.80665  # of the lowest layer, which is shifted
    np.testing.assert_allclose(held[1], humidity[0] - water / mass, atol=2e-4 * abs(water / mass))
    np.testing.assert_allclose(held[[0, 2, 3]], fields[[0, 2, 3]], atol=1e-6)


def test_two_quantities_that_share_a_variable():
    grid = global_grid((18, 36))
    normalizer = normalizer_of(grid, "dry_mass", NAMES[0])
    assert normalizer.conservation is not None
    changes = torch.randn(2, 3, *grid.shape, generator=torch.Generator().manual_seed(1)) + 1
    found = global_means(normalizer.conservation(changes), grid)
    np.testing.assert_allclose(found[:, [0, 2]], 0, atol=1e-7)
    np.testing.assert_allclose(found[:, 1], global_means(changes, grid)[:, 1], atol=1e-7)


@pytest.mark.parametrize("quantity", ["dry_mass", "surface_pressure"])
def test_forty_steps_do_not_drift(quantity):
    """Ten days: the mean stays to 1e-6 of a step's usual change of the field, where it went away before."""
    grid = global_grid((32, 64))
    conditions, times = Conditions([], CHANNELS, grid), torch.zeros(2, dtype=torch.int64)
    factor = np.array([-9.80665 if quantity == "dry_mass" else 0.0, 0.0, 1.0])

    def predict(window: Tensor) -> Tensor:
        return 0.1 * window.roll(1, dims=-1) + 0.02  # gains 0.02 deviations of a change a step

    def drift(*quantities: str) -> np.ndarray:
        start = weather(grid)
        normalizer = normalizer_of(grid, *quantities)
        steps = list(rollout(predict, normalizer, conditions, 6 * HOUR, start, times, 40))
        states = [normalizer.normalize(start)[0], *steps]
        means = np.stack([global_means(state, grid) for state in states]) * STD  # in float64: of anomalies
        return np.abs(means @ factor - (means @ factor)[0]).max() / CHANGE[2]

    assert drift(quantity) < 1e-6 and drift() > 0.1


def test_missing_values_are_refused():
    """But for dates without any value of a variable, which no sample has."""
    known = statistics((4, 8))
    rows, allowed = np.ones(4), replace(known, missing=np.array([[0, 5, 0], [0, 0, 32]]))
    build_conservation(["dry_mass"], NAMES, allowed, rows)
    lacking = replace(known, missing=np.array([[0, 0, 2], [0, 0, 0]]))
    with pytest.raises(DataError, match="surface_pressure has no value in some cells on 1 of 2 dates"):
        build_conservation(["dry_mass"], NAMES, lacking, rows)
