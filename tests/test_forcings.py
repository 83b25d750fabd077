"""Forcings against almanacs and closed forms that share no code with them."""

import math

import numpy as np
import pytest
import torch

from datasets.conditions import FORCINGS, SOLAR_CONSTANT, compute_forcings, sun_position

LATITUDE = torch.arange(-89.5, 90, 1.0, dtype=torch.float64)
LONGITUDE = torch.arange(0, 360, 2.0, dtype=torch.float64)


def seconds(*dates: str) -> torch.Tensor:
    return torch.from_numpy(np.array(dates, dtype="datetime64[s]").astype(np.int64))


def insolation(
    date: str, latitude: torch.Tensor = LATITUDE, longitude: torch.Tensor = LONGITUDE
) -> torch.Tensor:
    return compute_forcings(["toa_incident_solar_radiation"], seconds(date), latitude, longitude)[0, 0]


def test_the_position_of_the_sun() -> None:
    """The US Naval Observatory's "Earth's seasons", the almanac's distances in au, and the extremes of the
    equation of time: minutes by which a sundial is ahead of the clock.
    """
    seasons = "2000-03-20T07:35 2020-06-20T21:44 2020-09-22T13:31 2020-12-21T10:02".split()
    declination = np.degrees(sun_position(seconds(*seasons)).declination.flatten())
    np.testing.assert_allclose(declination, [0, 23.437, 0, -23.437], atol=0.01)
    extremes = "2021-02-11T12:00 2021-05-14T12:00 2021-07-26T12:00 2021-11-03T12:00".split()
    minutes = sun_position(seconds(*extremes)).equation_of_time.flatten() / (2 * math.pi) * 1440
    np.testing.assert_allclose(minutes, [-14.2, 3.7, -6.5, 16.4], atol=0.1)
    inverse_squared = sun_position(seconds("2020-01-05T07:48", "2020-07-04T11:35")).inverse_distance_squared
    expected = np.array([0.983244, 1.016694]) ** -2
    np.testing.assert_allclose(inverse_squared.flatten(), expected, atol=2e-4, rtol=0)


def test_polar_night_and_polar_day() -> None:
    december = insolation("2020-12-21T10:02")
    assert (december[LATITUDE > 67] == 0).all() and (december[LATITUDE < -67] > 0).all()
    june = insolation("2020-06-20T21:44")
    assert (june[LATITUDE > 67] > 0).all() and (june[LATITUDE < -67] == 0).all()


@pytest.mark.parametrize("date", ["2001-01-03T00:00", "2010-04-10T06:00", "2020-07-04T17:00"])
def test_global_mean_is_a_quarter_of_the_solar_constant(date: str) -> None:
    bounds = torch.deg2rad(torch.arange(-90, 91, 1.0, dtype=torch.float64))
    weights = torch.sin(bounds[1:]) - torch.sin(bounds[:-1])
    mean = (insolation(date).double().mean(dim=1) * weights).sum() / weights.sum()
    expected = sun_position(seconds(date)).inverse_distance_squared.item() / 4
    assert mean.item() == pytest.approx(expected, rel=1e-4)
    assert mean.item() * SOLAR_CONSTANT == pytest.approx(340, rel=0.04)


def test_the_sun_is_highest_where_it_is_noon() -> None:
    date, fine = "2021-11-03T09:00", torch.arange(0, 360, 0.05, dtype=torch.float64)
    row = insolation(date, torch.tensor([0.0]), fine)[0]
    # 9 UTC is noon by the mean sun at 45 degrees east; the true sun is 16.4 minutes, 4.1 degrees, ahead.
    assert fine[row.argmax()].item() == pytest.approx(45 - 16.4 / 4, abs=0.3)
    cosine = compute_forcings(["cos_local_time"], seconds(date), torch.tensor([0.0]), fine)[0, 0, 0]
    assert fine[cosine.argmin()].item() == pytest.approx(45, abs=0.05)


def test_the_clock_loses_no_second_far_from_the_epoch() -> None:
    """A float32 of seconds would be off by minutes in 2050; the angle must turn by one second's worth."""
    times = seconds("2050-06-01T06:00:00", "2050-06-01T06:00:01")
    zero = torch.zeros(1)
    cosine = compute_forcings(["cos_local_time"], times, zero, zero).flatten()
    assert (cosine[1] - cosine[0]).item() == pytest.approx(-2 * math.pi / 86400, rel=1e-3)


def test_a_year_later_is_the_same_season() -> None:
    times = seconds("2000-01-01", "2100-01-01", "2000-07-01T15:00")
    season = compute_forcings(["sin_day_of_year", "cos_day_of_year"], times, torch.zeros(1), torch.zeros(1))
    season = season[:, :, 0, 0]
    torch.testing.assert_close(season[:2], torch.tensor([[0.0, 1.0], [0.0, 1.0]]), atol=0.02, rtol=0)
    torch.testing.assert_close(season[2], torch.tensor([0.0, -1.0]), atol=0.02, rtol=0)


def test_shape_type_order_and_size() -> None:
    names = list(FORCINGS)
    times = seconds("2001-01-01", "2001-03-01", "2024-02-29T18:00")
    both = compute_forcings(names, times, LATITUDE[:5], LONGITUDE[:7])
    assert both.shape == (3, len(names), 5, 7) and both.dtype == torch.float32
    assert both.abs().max() <= 1.035
    reverse = compute_forcings(names[::-1], times[1:2], LATITUDE[:5].float(), LONGITUDE[:7].float())
    torch.testing.assert_close(reverse[0].flip(0), both[1], atol=1e-6, rtol=0)
    assert compute_forcings([], times, LATITUDE, LONGITUDE).shape == (3, 0, len(LATITUDE), len(LONGITUDE))
    with pytest.raises(ValueError, match="int64"):
        compute_forcings(["sin_latitude"], times.double(), LATITUDE, LONGITUDE)
