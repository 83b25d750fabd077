"""Areas against integrals done by hand, what counts as a grid, and regridding against overlaps summed cell by
cell.
"""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datasets.grid import Grid, area_weights, latitude_bounds, longitude_bounds
from datasets.regrid import Regridder

POLES = np.linspace(90, -90, 721)
CELLS = np.linspace(87.1875, -87.1875, 32)


def sin(degrees: float) -> float:
    return float(np.sin(np.deg2rad(degrees)))


def globe(num_rows: int, num_columns: int, poles: bool = False, start: float = 0) -> Grid:
    edge = 90 if poles else 90 - 90 / num_rows
    return Grid(np.linspace(edge, -edge, num_rows), start + np.arange(num_columns) * 360 / num_columns)


def region(north: float, south: float, west: float, east: float, num_rows: int, num_columns: int) -> Grid:
    return Grid(np.linspace(north, south, num_rows), np.linspace(west, east, num_columns))


def test_areas_by_hand():
    """Half cells at the poles; weights times the mean area 2/721 are areas in sin(latitude)."""
    areas = area_weights(POLES) * 2 / 721
    np.testing.assert_allclose(areas[[0, -1]], 1 - sin(89.875), rtol=1e-9)
    assert areas[1] == pytest.approx(sin(89.875) - sin(89.625), rel=1e-9)
    assert areas[360] == pytest.approx(2 * sin(0.125), rel=1e-12) and areas.sum() == pytest.approx(
        2, rel=1e-13
    )
    region = np.array([sin(65) - sin(55), sin(55) - sin(45), sin(45) - sin(35)])
    np.testing.assert_allclose(area_weights(np.array([60.0, 50, 40])), region / region.mean(), rtol=1e-12)


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


def regrid(field: np.ndarray, source: Grid, target: Grid) -> np.ndarray:
    return Regridder(source, target)(torch.from_numpy(field)).numpy()


def overlap_by_hand(source: Grid, target: Grid, field: np.ndarray) -> np.ndarray:
    """Every pair of cells, on every turn of the circle, one at a time."""
    rows = [np.sin(np.deg2rad(latitude_bounds(g.latitude))) for g in (source, target)]
    columns = [longitude_bounds(g.longitude) for g in (source, target)]
    out = np.full(target.shape, np.nan)
    for i, j in itertools.product(*map(range, target.shape)):
        total = area = 0.0
        for k, m in itertools.product(*map(range, source.shape)):
            height = min(rows[1][i], rows[0][k]) - max(rows[1][i + 1], rows[0][k + 1])
            for turn in (-720, -360, 0, 360, 720):
                west, east = columns[0][m] + turn, columns[0][m + 1] + turn
                width = min(columns[1][j + 1], east) - max(columns[1][j], west)
                if height > 1e-9 and width > 1e-9 and np.isfinite(field[k, m]):
                    area, total = area + height * width, total + height * width * field[k, m]
        rows_i, columns_j = rows[1][i] - rows[1][i + 1], columns[1][j + 1] - columns[1][j]
        out[i, j] = total / area if area > 0.4999 * rows_i * columns_j else np.nan
    return out


GRIDS = [
    globe(4, 6),
    globe(5, 8, poles=True),
    globe(3, 5, start=10),
    globe(4, 4, start=-180),
    region(60, 20, -20, 40, 4, 5),
    region(80, -80, 350, 390, 5, 3),
    region(90, 60, 100, 220, 3, 4),
]


@pytest.mark.parametrize("source", range(len(GRIDS)))
@pytest.mark.parametrize("target", range(len(GRIDS)))
def test_regrid_against_brute_force(source: int, target: int):
    """Of fields with holes."""
    rng = np.random.default_rng(source)
    field = rng.normal(size=GRIDS[source].shape)
    field[rng.random(field.shape) < 0.4] = np.nan
    ours = regrid(field, GRIDS[source], GRIDS[target])
    np.testing.assert_allclose(ours, overlap_by_hand(GRIDS[source], GRIDS[target], field), atol=1e-12)


grids = st.builds(globe, st.integers(2, 24), st.integers(3, 25), st.booleans(), st.floats(-180, 180))


@settings(max_examples=60, deadline=None)
@given(grids, grids, st.integers(0, 9))
def test_regrid_conserves_the_area_mean(source: Grid, target: Grid, seed: int):
    field = np.random.default_rng(seed).normal(size=(2, *source.shape))
    new = regrid(field, source, target)
    pairs = ((field, source), (new, target))
    means = [(values * area_weights(grid.latitude)[:, None]).mean((1, 2)) for values, grid in pairs]
    np.testing.assert_allclose(*means, atol=1e-5)  # slivers below 1e-6 of a cell are left out
    assert new.min() >= field.min() - 1e-12 and new.max() <= field.max() + 1e-12
    constant = regrid(np.full(source.shape, 3.25), source, target)
    np.testing.assert_allclose(constant, 3.25, rtol=1e-12)


def test_cells_of_which_less_than_half_has_values_are_missing():
    """A sliver of 10 % gave a cell its mean."""
    source, target = globe(8, 16), globe(4, 8)
    field = np.ones(source.shape)
    field[:2, 0] = np.nan  # under target (0, 0), whose columns straddle the seam, half of it
    field[4:6, 3] = np.nan
    new = regrid(field, source, target)
    assert np.isfinite(new).all() and np.allclose(new, 1)
    field[0, 15] = np.nan  # and a part of the other half
    assert np.flatnonzero(np.isnan(regrid(field, source, target))).tolist() == [0]
    outside = regrid(np.ones((4, 5)), region(60, 20, -20, 40, 4, 5), globe(4, 8))
    assert np.isnan(outside[2:]).all() and outside[0, 0] == 1


@pytest.mark.parametrize("sizes", [((8, 16), (4, 8)), ((12, 24), (5, 7))])
def test_a_cell_has_the_class_with_the_largest_share(sizes: tuple):
    """The mean of soil types 1 and 2 was 1.907."""
    source, target = (globe(*size) for size in sizes)
    field = np.random.default_rng(0).integers(1, 5, source.shape).astype("f4")
    field[:3, :4] = np.nan
    shares = np.stack([regrid(np.where(field == n, 1.0, 0.0), source, target) for n in range(1, 5)])
    new = Regridder(source, target)(torch.from_numpy(field), is_class=True).numpy()
    assert new.dtype == np.float32
    np.testing.assert_array_equal(np.isnan(new), regrid(np.isfinite(field) * 1.0, source, target) < 0.4999)
    share = np.take_along_axis(shares, np.nan_to_num(new - 1).astype(int)[None], 0)[0]
    np.testing.assert_allclose(share[np.isfinite(new)], shares.max(0)[np.isfinite(new)], atol=1e-9)


def test_what_blew_up_stays_so() -> None:
    source, target = globe(19, 36, poles=True), globe(7, 8, poles=True)
    field = torch.ones(*source.shape)
    field[9, 18] = torch.inf
    found = Regridder(source, target)(field)
    assert torch.isinf(found).sum() >= 1 and not torch.isnan(found).any()
    assert (found[0] == 1).all()
