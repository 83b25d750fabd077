"""The same small set of analyses, written in every layout that users have."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import xarray as xr
import zarr

from datasets import convert
from datasets.archive import TrainingStore, open_archive

LEVELS = [500, 850, 1000]
NAMES = [f"{name}:{level}" for name in ("geopotential", "temperature") for level in LEVELS] + [
    "2m_temperature"
]
SHORT = {"geopotential": "z", "temperature": "t", "2m_temperature": "t2m", "land_sea_mask": "lsm"}
CDS = {"time": "valid_time", "level": "pressure_level"}


def analyses() -> xr.Dataset:
    """Two variables on three levels, one at the surface, one static; 6 x 8 points, five dates, some NaN."""
    rng = np.random.default_rng(0)
    axes = ["time", "level", "latitude", "longitude"]
    upper = {
        name: (axes, rng.normal(size=(5, 3, 6, 8)).astype("f4")) for name in ("geopotential", "temperature")
    }
    surface = rng.normal(280, 9, (5, 6, 8)).astype("f4")
    surface[2, 1, 3:5] = np.nan
    coords = {
        "time": np.datetime64("2019-12-31T06", "ns") + np.arange(5) * np.timedelta64(6, "h"),
        "level": LEVELS,
        "latitude": np.arange(75.0, -80, -30),
        "longitude": np.arange(0, 360, 45.0),
    }
    mask = {"land_sea_mask": (axes[2:], rng.random((6, 8)).astype("f4").round())}
    return xr.Dataset(upper | mask | {"2m_temperature": ([axes[0], *axes[2:]], surface)}, coords)


def values(truth: xr.Dataset) -> np.ndarray:
    """(T, V, H, W) in the order of NAMES."""
    pick = [
        truth[n].sel(level=int(lev)) if lev else truth[n] for n, _, lev in (x.partition(":") for x in NAMES)
    ]
    return np.stack([field.values for field in pick], axis=1)


def zarr_chunked(path: Path, ds: xr.Dataset, chunks: dict, zarr_format: int = 2) -> str:
    encoding = {n: {"chunks": tuple(chunks.get(d, ds.sizes[d]) for d in ds[n].dims)} for n in ds.data_vars}
    ds.to_zarr(path, zarr_format=zarr_format, encoding=encoding, consolidated=zarr_format == 2)
    return str(path)


def weatherbench(path: Path, ds: xr.Dataset) -> str:
    return zarr_chunked(path / "wb.zarr", ds.assign_coords(latitude=ds.latitude.astype("f4")), {"time": 1})


def weatherbench_transposed(path: Path, ds: xr.Dataset) -> str:
    ds = ds.transpose("time", "level", "longitude", "latitude").isel(latitude=slice(None, None, -1))
    return zarr_chunked(path / "wb64.zarr", ds.astype("f8"), {"time": 2})


def one_level_a_chunk(path: Path, ds: xr.Dataset) -> str:
    return zarr_chunked(path / "levels.zarr", ds, {"time": 1, "level": 1, "latitude": 3})


def arco(path: Path, ds: xr.Dataset) -> str:
    """Its time axis runs on beyond the dates that are filled, and the land-sea mask has times."""
    later = ds.assign_coords(time=ds.time + np.timedelta64(400, "D")) * np.nan
    ds = xr.concat([ds, later], "time", data_vars="all")
    ds.attrs = {"valid_time_start": "2019-12-31", "valid_time_stop": "2020-01-01"}
    return zarr_chunked(path / "arco-v3", ds, {"time": 1})


def zarr3(path: Path, ds: xr.Dataset) -> str:
    return zarr_chunked(path / "three.zarr", ds, {"time": 1}, zarr_format=3)


def fill_in_zarr3(path: Path, ds: xr.Dataset) -> str:
    """xarray writes the fill value of Zarr 3 as base64."""
    encoding = {name: {"_FillValue": -9999.0} for name in ds.data_vars}
    ds.to_zarr(path / "filled.zarr", zarr_format=3, encoding=encoding, consolidated=False)
    return str(path / "filled.zarr")


def packed_zarr(path: Path, ds: xr.Dataset) -> str:
    ds.to_zarr(path / "packed.zarr", zarr_format=2, encoding=packing(ds))
    return str(path / "packed.zarr")


def netcdf(folder: Path, ds: xr.Dataset | xr.DataArray, name: str = "a.nc", encoding: Any = None) -> str:
    """Write a file; return its path."""
    ds.to_netcdf(folder / name, engine="h5netcdf", encoding=encoding)
    return str(folder / name)


def cds_new(path: Path, ds: xr.Dataset) -> str:
    ds = ds.rename(CDS | SHORT).isel(pressure_level=slice(None, None, -1))
    ds = ds.assign_coords(number=0, expver=("valid_time", ["0001"] * 5))
    ds = ds.assign_coords(pressure_level=ds.pressure_level.astype("f8").assign_attrs(units="hPa"))
    return netcdf(path, ds, "new.nc")


def cds_number_per_time(path: Path, ds: xr.Dataset) -> str:
    ds = ds.rename(CDS | SHORT).assign_coords(number=("valid_time", [0] * 5))
    return netcdf(path, ds, "number.nc")


def expver_dimension(path: Path, ds: xr.Dataset) -> str:
    """Final ERA5 up to the third date, ERA5T after it."""
    final, later = ds.drop_vars("land_sea_mask"), ds.drop_vars("land_sea_mask")
    first = final.time <= final.time[2]
    both = xr.concat(
        [final.where(first), later.where(~first)], xr.DataArray([1, 5], dims="expver", name="expver")
    )
    both = both.transpose("time", "expver", ...).rename({k: v for k, v in SHORT.items() if v != "lsm"})
    return netcdf(path, both.merge(ds[["land_sea_mask"]]), "expver.nc")


def packing(ds: xr.Dataset) -> dict:
    """int16 over each variable's range, as the old CDS packs."""
    encoding = {}
    for name in ds.data_vars:
        low, high = float(ds[name].min()), float(ds[name].max())
        numbers = {"scale_factor": (high - low) / 65530 or 1.0, "add_offset": (low + high) / 2}
        encoding[name] = numbers | {"dtype": "i2", "_FillValue": -32767}
    return encoding


def cds_old(path: Path, ds: xr.Dataset) -> str:
    ds = ds.rename(SHORT).assign_coords(level=("level", np.array(LEVELS, "i4"), {"units": "millibars"}))
    encoding = packing(ds) | {"time": {"units": "hours since 1900-01-01 00:00:00.0", "dtype": "i4"}}
    ds.to_netcdf(path / "old.nc", engine="scipy", encoding=encoding)
    return str(path / "old.nc")


def file_a_variable(path: Path, ds: xr.Dataset) -> str:
    for name in ds.data_vars:
        netcdf(path, ds[[name]], f"{name}.nc")
    (path / "README").write_text("not data")
    return str(path)


def file_a_year(path: Path, ds: xr.Dataset) -> str:
    for year, part in ds.groupby("time.year"):
        netcdf(path, part, f"era5_{year}.nc")
    return str(path / "era5_*.nc")


def west_first(path: Path, ds: xr.Dataset) -> str:
    """-180..135, with levels in Pa and the names of other models."""
    ds = ds.assign_coords(longitude=(ds.longitude + 180) % 360 - 180).sortby("longitude")
    ds = ds.assign_coords(level=("level", np.array(LEVELS) * 100.0, {"units": "Pa"}))
    return netcdf(path, ds.rename(latitude="lat", longitude="lon", level="plev"), "west.nc")


def ncep(path: Path, ds: xr.Dataset) -> str:
    """NCEP's reanalyses at NOAA's PSL: dates since 1800, levels of 1000 hPa first, names of their own."""
    ds = ds.rename(SHORT | {"temperature": "air", "latitude": "lat", "longitude": "lon"})
    ds = ds.isel(level=slice(None, None, -1))
    ds = ds.assign_coords(level=ds.level.astype("f4").assign_attrs(units="millibar"))
    encoding = {"time": {"units": "hours since 1800-01-01 00:00:0.0", "dtype": "f8"}}
    return netcdf(path, ds, "ncep.nc", encoding)


def westwards_with_cyclic_column(path: Path, ds: xr.Dataset) -> str:
    again = ds.isel(longitude=[0]).assign_coords(longitude=[360.0])
    ds = xr.concat([ds, again], "longitude", data_vars="minimal").isel(longitude=slice(None, None, -1))
    return netcdf(path, ds, "cyclic.nc")


def tutorial(path: Path, ds: xr.Dataset) -> str:
    """The NERSC tutorial's yearly files, cut short: 20 channels, rows of ERA5 without its last one."""
    fields = np.random.default_rng(1).normal(size=(2, 3, 20, 4, 8)).astype("f4")
    for year, part in zip((2015, 2016), fields, strict=True):
        with h5py.File(path / f"{year}.h5", "w") as file:
            file["fields"] = part
    return str(path)


def anemoi(path: Path, ds: xr.Dataset) -> str:
    """data(time, variable, ensemble, cell), the land-sea mask among the variables."""
    group = zarr.open_group(path / "anemoi.zarr", mode="w", zarr_format=2)
    group.attrs.update(variables=["t_500", "2t", "lsm"], field_shape=[6, 8])
    lat, lon = np.meshgrid(ds.latitude.values, ds.longitude.values, indexing="ij")
    t, t2m = ds.temperature.values[:, 0], ds["2m_temperature"].values
    mask = np.broadcast_to(ds.land_sea_mask.values, t.shape)
    data = np.stack([t, t2m, mask], 1).reshape(5, 3, 1, 48)
    dates = ds.time.values.astype("datetime64[s]")
    arrays = {"data": data, "latitudes": lat.ravel(), "longitudes": lon.ravel(), "dates": dates}
    dims = {"data": ["time", "variable", "ensemble", "cell"], "dates": ["time"]}
    for name, array in arrays.items():
        group.create_array(name, data=array).attrs["_ARRAY_DIMENSIONS"] = dims.get(name, ["cell"])
    return str(path / "anemoi.zarr")


def grib(path: Path, ds: xr.Dataset, edition: int = 2) -> str:
    """A message a field, at 24 bits; the static one has one date. eccodes has to be there."""
    with open(path / "a.grib", "wb") as file:
        for date in ds.time.values:
            for name in ds.data_vars if date == ds.time.values[0] else list(ds.data_vars)[:-1]:
                for level in LEVELS if "level" in ds[name].dims else [0]:
                    field = ds[name].sel(time=date) if "time" in ds[name].dims else ds[name]
                    field = field.sel(level=level) if level else field
                    write_message(file, field, str(name), level, date, edition)
    return str(path / "a.grib")


def write_message(file, field: xr.DataArray, name: str, level: int, date, edition: int, more=()) -> None:
    import eccodes  # type: ignore[reportMissingImports]  # an extra

    message = eccodes.codes_grib_new_from_samples(f"regular_ll_{'pl' if level else 'sfc'}_grib{edition}")
    north, east, day = field.latitude.values, field.longitude.values, str(date)
    values = np.nan_to_num(field.values.astype("f8"), nan=9999)
    for key, value in {
        "jScansPositively": int(north[0] < north[-1]),
        "Ni": len(east),
        "Nj": len(north),
        "latitudeOfFirstGridPointInDegrees": float(north[0]),
        "latitudeOfLastGridPointInDegrees": float(north[-1]),
        "longitudeOfFirstGridPointInDegrees": float(east[0]),
        "longitudeOfLastGridPointInDegrees": float(east[-1]),
        "iDirectionIncrementInDegrees": float(east[1] - east[0]),
        "jDirectionIncrementInDegrees": float(abs(north[1] - north[0])),
        "dataDate": int(day[:10].replace("-", "")),
        "dataTime": int(day[11:16].replace(":", "")),
        "shortName": SHORT.get(name, name).replace("t2m", "2t"),
        **({"level": level} if level else {}),
        "bitsPerValue": 24,
        "bitmapPresent": int(np.isnan(field.values).any()),
        "missingValue": 9999,
        **dict(more),
    }.items():
        eccodes.codes_set(message, key, value)
    eccodes.codes_set_values(message, values.ravel())
    eccodes.codes_write(message, file)
    eccodes.codes_release(message)


def shuffled_and_repeated(path: Path, ds: xr.Dataset) -> str:
    """Dates out of order, some of them twice with equal values."""
    return netcdf(path, ds.isel(time=[3, 0, 1, 4, 2, 1, 0]), "shuffled.nc")


EXACT = [
    weatherbench,
    weatherbench_transposed,
    one_level_a_chunk,
    arco,
    zarr3,
    fill_in_zarr3,
    cds_new,
    cds_number_per_time,
    expver_dimension,
    file_a_variable,
    file_a_year,
    west_first,
    ncep,
    westwards_with_cyclic_column,
    shuffled_and_repeated,
]


def training_store(source: str, target: Path, *options: str) -> TrainingStore:
    """Convert a source to a training store of float32, and open it."""
    assert convert.main([source, str(target), "--dtype", "float32", *options]) == 0
    store = open_archive(str(target))
    assert isinstance(store, TrainingStore)
    return store
