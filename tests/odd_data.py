"""The storm of January 1996 and the land-sea mask of ../shared/data, rewritten by CF's conventions.

    .venv/bin/python -m tests.odd_data

Writes outputs/odd_data/storm_1996.nc and landsea.nc, which tests/configs/storm_1996.toml and gfs_winds.toml
read. Values are the same numbers. The originals have hours after a text `reftime` for dates, one variable a
file with its level in the file's name, and a mask of classes.
"""

import os
import tempfile
from pathlib import Path

import numpy as np
import xarray as xr

ROOT = Path(__file__).parents[1]
SOURCE, TARGET = ROOT / "../shared/data", ROOT / "outputs/odd_data"
# p is near 101,000 Pa even over the Rockies, so it is reduced to mean sea level. t, u, v are fields near the
# ground; u500 and v500 are stored with them.
STORM = {
    "Pstorm.cdf": ("p", "mean_sea_level_pressure", "Pa"),
    "Tstorm.cdf": ("t", "2m_temperature", "K"),
    "Ustorm.cdf": ("u", "10m_u_component_of_wind", "m s-1"),
    "Vstorm.cdf": ("v", "10m_v_component_of_wind", "m s-1"),
    "U500storm.cdf": ("u", "u500", "m s-1"),
    "V500storm.cdf": ("v", "v500", "m s-1"),
}
LAND_CLASSES = (1, 3, 4)  # 0 is ocean, 1 land, 2 a lake, 3 a small island, 4 an ice shelf
DEGREES = {"lat": {"units": "degrees_north"}, "lon": {"units": "degrees_east"}}


def rewrite(source: Path = SOURCE, target: Path = TARGET) -> None:
    """Rewrite those of the two that are in `source`."""
    if (source / "storm_1996").is_dir():
        arrays = {}
        for file, (name, variable, units) in STORM.items():
            with xr.open_dataset(source / "storm_1996" / file, decode_cf=False) as ds:
                start = b"".join(ds["reftime"].values.tolist()).decode().strip()
                time = ("time", ds["timestep"].values, {"units": f"hours since {start}"})
                coords = {axis: (axis, ds[axis].values, attrs) for axis, attrs in DEGREES.items()}
                values, fill = ds[name].values, ds[name].attrs["_FillValue"]
                arrays[variable] = ("time", "lat", "lon"), values, {"_FillValue": fill, "units": units}
        write(xr.Dataset(arrays, coords | {"time": time}), target / "storm_1996.nc")
    if (source / "static/landsea.nc").is_file():
        with xr.open_dataset(source / "static/landsea.nc", decode_cf=False) as ds:
            coords = {axis: (axis, ds[axis].values, attrs) for axis, attrs in DEGREES.items()}
            mask = np.isin(ds["LSMASK"].values, LAND_CLASSES).astype(np.float32)
            mask = {"land_sea_mask": (("lat", "lon"), mask, {"units": "1"})}
        write(xr.Dataset(mask, coords), target / "landsea.nc")


def write(ds: xr.Dataset, path: Path) -> None:
    """Write a file in one step, because processes of a test run may do so at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        ds.to_netcdf(Path(folder, path.name), engine="h5netcdf")
        os.replace(Path(folder, path.name), path)


if __name__ == "__main__":
    rewrite()
