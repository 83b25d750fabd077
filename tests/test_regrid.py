"""Regridding on torch against that of datasets/grid.py, which has its own tests, and against areas."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from datasets.grid import Grid, area_weights, regrid_conservative
from tests.forecasts import grid as coordinates
from verification.regrid import Regridder


def make_grid(rows: int, columns: int, poles: bool) -> Grid:
    coords = coordinates(rows, columns, poles)
    return Grid(coords["latitude"][::-1], coords["longitude"])


GRIDS = [make_grid(19, 36, True), make_grid(10, 18, False), make_grid(7, 8, True), make_grid(5, 11, False)]


def test_it_is_the_regridding_of_the_grid_module() -> None:
    rng = np.random.default_rng(0)
    for source in GRIDS:
        for target in GRIDS:
            field = rng.normal(280, 9, (2, *source.shape)).astype("f4")
            field[1, 1:3, 2:5] = np.nan
            found = Regridder(source, target)(torch.from_numpy(field)).numpy()
            expected = regrid_conservative(field, source, target)
            np.testing.assert_allclose(found, expected, rtol=1e-7)


def test_what_blew_up_stays_so() -> None:
    source, target = GRIDS[0], GRIDS[2]
    field = torch.ones(*source.shape)
    field[9, 18] = torch.inf
    found = Regridder(source, target)(field)
    assert torch.isinf(found).sum() >= 1 and not torch.isnan(found).any()
    assert (found[0] == 1).all()


@settings(max_examples=25, deadline=None)
@given(
    arrays.arrays(np.float32, (19, 36), elements=st.floats(-100, 100, width=32)), st.sampled_from(GRIDS[1:])
)
def test_the_mean_over_area_is_kept(field: np.ndarray, target: Grid) -> None:
    found = Regridder(GRIDS[0], target)(torch.from_numpy(field)).double().numpy()
    means = [
        (area_weights(grid.latitude)[:, None] * values).mean()
        for grid, values in ((GRIDS[0], field.astype("f8")), (target, found))
    ]
    assert abs(means[0] - means[1]) <= 1e-6 * max(1, np.abs(field).max())
