"""Spectra in closed form: a wave has its energy at its own wavenumber, and all energies add up."""

import numpy as np
import pytest
import torch
import xarray as xr

from verification.scores import (
    EARTH_RADIUS,
    circumference,
    mean_of_midlatitudes,
    zonal_energy_spectrum,
)

ROWS = np.array([60.0, 0.0, -30.0])
LENGTH = 2 * np.pi * EARTH_RADIUS * np.array([0.5, 1.0, np.sqrt(3) / 2])  # by hand


def test_circles_of_latitude() -> None:
    np.testing.assert_allclose(circumference(ROWS), LENGTH, rtol=1e-15)
    assert abs(circumference(np.array([90.0]))[0]) < 1e-8


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_wave_has_its_energy_at_its_wavenumber(number: int) -> None:
    """A cos(k x) has the mean square A^2 / 2 (A^2 for k = 0), times the length of the circle."""
    angle = 2 * np.pi * np.arange(16) / 16
    field = torch.from_numpy(np.tile(5 * np.cos(number * angle + 0.3), (3, 1)))
    energy = zonal_energy_spectrum(field, torch.from_numpy(circumference(ROWS))).numpy()
    square = (5 * np.cos(0.3)) ** 2 if number == 0 else 12.5
    np.testing.assert_allclose(energy[:, number], square * LENGTH, rtol=1e-13)
    assert np.delete(energy, number, axis=1).max() < 1e-13 * energy.max()


def test_energies_add_up_to_the_integral_of_the_square() -> None:
    field = torch.from_numpy(np.random.default_rng(0).normal(size=(2, 3, 15)))
    energy = zonal_energy_spectrum(field, torch.from_numpy(LENGTH))
    expected = (field**2).mean(-1) * torch.from_numpy(LENGTH)
    assert torch.allclose(energy.sum(-1), expected, rtol=1e-13)


def test_the_mean_of_middle_latitudes_leaves_out_missing_rows_and_poles() -> None:
    energy = np.array([[8.0], [1.0], [np.nan], [3.0], [5.0], [9.0]])
    rows = np.array([90.0, 60.0, 45.0, 30.0, 0.0, -90.0])
    spectrum = xr.DataArray(energy, {"latitude": rows}, ("latitude", "zonal_wavenumber"))
    assert mean_of_midlatitudes(spectrum).values == [2.0]
    assert mean_of_midlatitudes(spectrum[[0, 4, 5]]).values == [5.0]  # no row is in the middle
