"""A store of WeatherBench2's metadata with made-up weather: dims, chunks, types and attributes as
era5/1959-2022-6h-64x32_equiangular_conservative.zarr has them, of fewer dates and variables.
"""

from pathlib import Path

import numpy as np
import xarray as xr
from numcodecs import Blosc

LEVELS = [50, 100, 150, 200, 250, 300, 400, 500, 600, 700, 850, 925, 1000]
UPPER = {
    "geopotential": ("Geopotential", "m**2 s**-2", 5e4, 2e3),
    "temperature": ("Temperature", "K", 250.0, 9.0),
    "u_component_of_wind": ("U component of wind", "m s**-1", 0.0, 12.0),
    "v_component_of_wind": ("V component of wind", "m s**-1", 0.0, 12.0),
}
SURFACE = {
    "2m_temperature": ("2 metre temperature", "K", 285.0, 12.0),
    "mean_sea_level_pressure": ("Mean sea level pressure", "Pa", 101_000.0, 900.0),
    "10m_u_component_of_wind": ("10 metre U wind component", "m s**-1", 0.0, 6.0),
    "10m_v_component_of_wind": ("10 metre V wind component", "m s**-1", 0.0, 6.0),
}
STATIC = {
    "geopotential_at_surface": ("Geopotential", "m**2 s**-2", 3e3, 3e3),
    "land_sea_mask": ("Land-sea mask", "(0 - 1)", 0.5, 0.4),
}


LONGITUDES, LATITUDES = np.arange(64) * 5.625, -87.1875 + np.arange(32) * 5.625


def write_era5_like(
    path: Path,
    first: str,
    num_dates: int,
    latitude: np.ndarray = LATITUDES,
    longitude: np.ndarray = LONGITUDES,
    upper: dict[str, tuple[str, str, float, float]] = UPPER,
) -> str:
    """Waves that travel east, six hours apart from `first` on; (time, level, longitude, latitude)."""
    east, north = np.deg2rad(longitude)[:, None], np.deg2rad(latitude)
    phase = 0.3 * np.arange(num_dates)[:, None, None]
    each = [np.cos(north) * np.sin(k * east - k * phase + k) / k for k in (2, 3, 5)]
    waves = np.sum(each, axis=0).astype("f4")
    heights = np.linspace(1.2, 0.4, len(LEVELS), dtype="f4")[:, None, None]
    plane = ("longitude", "latitude")
    data = {}
    for number, (name, about) in enumerate((upper | SURFACE | STATIC).items()):
        long_name, units, mean, spread = about
        attributes = {"long_name": long_name, "units": units, "short_name": name}
        wave = np.float32(mean) + np.float32(spread) * np.roll(waves, 7 * number, axis=1)
        if name in upper:
            data[name] = ("time", "level", *plane), wave[:, None] * heights, attributes
        else:
            data[name] = (
                (plane, wave[0], attributes) if name in STATIC else (("time", *plane), wave, attributes)
            )
    coords = {
        "time": np.datetime64(first, "ns") + np.arange(num_dates) * np.timedelta64(6, "h"),
        "level": ("level", LEVELS),
        "longitude": ("longitude", longitude),
        "latitude": ("latitude", latitude),
    }
    dataset, options = xr.Dataset(data, coords), {"compressors": Blosc("lz4", 5, Blosc.SHUFFLE)}
    encoding = {
        name: {"chunks": tuple(min(100, n) if d == "time" else n for d, n in a.sizes.items()), **options}
        for name, a in dataset.data_vars.items()
    }
    encoding["time"] = {"units": "hours since 1959-01-01", "dtype": "int64"}
    dataset.to_zarr(path, zarr_format=2, consolidated=True, encoding=encoding)
    return str(path)
