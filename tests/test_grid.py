"""Areas against integrals done by hand, and what counts as a grid."""

import numpy as np
import pytest

from datasets.grid import Grid, area_weights, latitude_bounds, longitude_bounds

POLES = np.linspace(90, -90, 721)
CELLS = np.linspace(87.1875, -87.1875, 32)


def sin(degrees: float) -> float:
    return float(np.sin(np.deg2rad(degrees)))


def globe(num_rows: int, num_columns: int, poles: bool = False, start: float = 0) -> Grid:
    edge = 90 if poles else 90 - 90 / num_rows
    return Grid(np.linspace(edge, -edge, num_rows), start + np.arange(num_columns) * 360 / num_columns)


def region(north: float, south: float, west: float, east: float, num_rows: int, num_columns: int) -> Grid:
    return Grid(np.linspace(north, south, num_rows), np.linspace(west, east, num_columns))


def test_pole_rows_keep_their_half_cells():
    """Weights times the mean area 2/721 are areas in sin(latitude); the globe's is 2."""
    areas = area_weights(POLES) * 2 / 721
    np.testing.assert_allclose(areas[[0, -1]], 1 - sin(89.875), rtol=1e-9)
    assert areas[1] == pytest.approx(sin(89.875) - sin(89.625), rel=1e-9)
    assert areas[360] == pytest.approx(2 * sin(0.125), rel=1e-12)
    assert areas.sum() == pytest.approx(2, rel=1e-13)


@pytest.mark.parametrize("latitude, error", [(POLES, 3e-6), (np.linspace(90, -90, 181), 6e-5), (CELLS, 2e-3)])
def test_integrals_in_closed_form(latitude: np.ndarray, error: float):
    """Over the sphere the mean of sin^2 is 1/3, of cos^2 2/3 and of an odd function 0."""
    weights, phi = area_weights(latitude), np.deg2rad(latitude)
    assert (weights * np.sin(phi) ** 2).mean() == pytest.approx(1 / 3, abs=error)
    assert (weights * np.cos(phi) ** 2).mean() == pytest.approx(2 / 3, abs=error)
    assert (weights * np.sin(phi)).mean() == pytest.approx(0, abs=1e-14)


@pytest.mark.parametrize("step", [0.1, 0.25, 1.0, 1.4, 1.5, 2.8125])
@pytest.mark.parametrize("poles", [True, False])
def test_float32_and_direction_do_not_matter(step: float, poles: bool):
    num_rows = round(180 / step) + poles
    edge = 90 if poles else 90 - 90 / num_rows
    latitude = np.linspace(edge, -edge, num_rows)
    weights = area_weights(latitude)
    np.testing.assert_allclose(area_weights(latitude.astype("f4")), weights, atol=1e-6)
    np.testing.assert_allclose(area_weights(latitude[::-1].astype("f4")), weights[::-1], atol=1e-6)


def test_bounds_end_at_the_pole_or_half_a_cell_beyond():
    assert latitude_bounds(np.array([60.0, 50, 40])).tolist() == [65, 55, 45, 35]
    assert latitude_bounds(np.array([-45.0, 45])).tolist() == [-90, 0, 90]
    assert latitude_bounds(np.array([90.0, 80, 70])).tolist() == [90, 85, 75, 65]
    tutorial = latitude_bounds(np.array([90.0, 45, 0, -45]))
    assert tutorial.tolist() == [90, 67.5, 22.5, -22.5, -90]
    with pytest.raises(ValueError, match="has 1 rows"):
        latitude_bounds(np.array([45.0]))


def test_regional_weights_by_hand():
    areas = np.array([sin(65) - sin(55), sin(55) - sin(45), sin(45) - sin(35)])
    np.testing.assert_allclose(area_weights(np.array([60.0, 50, 40])), areas / areas.mean(), rtol=1e-12)


def test_longitude_bounds():
    assert longitude_bounds(np.arange(0, 360, 90)).tolist() == [-45, 45, 135, 225, 315]
    assert longitude_bounds(np.array([-10.0, 0, 10])).tolist() == [-15, -5, 5, 15]


def test_grid():
    grid = globe(32, 64)
    assert grid.shape == (32, 64) and grid.periodic and grid.latitude.dtype == np.float64
    assert not region(60, 30, -10, 20, 4, 31).periodic and not region(60, 30, 0, 358, 4, 359).periodic
    assert grid.same_as(Grid(grid.latitude.astype("f4"), grid.longitude.astype("f4")))
    assert region(60, 30, -10, 20, 4, 4).same_as(region(60, 30, 350, 380, 4, 4))
    assert not grid.same_as(globe(32, 64, start=2.8125)) and not grid.same_as(globe(16, 32))
    assert not grid.same_as(globe(32, 64, poles=True))


@pytest.mark.parametrize(
    "latitude, longitude, message",
    [
        ([0, 10], [0, 90], "latitude has to be north to south"),
        ([10, 0], [90, 0], "longitude has to be ascending"),
        ([10, 0], [0], r"longitude has shape \(1,\)"),
        ([10, np.nan], [0, 1], "latitude has shape"),
        ([95, 0], [0, 1], "latitude reaches 95 degrees"),
        ([10, 0], [0, 180, 360], "drop the repeated columns"),
    ],
)
def test_grid_errors(latitude: list, longitude: list, message: str):
    with pytest.raises(ValueError, match=message):
        Grid(np.array(latitude, "f8"), np.array(longitude, "f8"))
