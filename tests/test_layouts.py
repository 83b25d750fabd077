"""The same fields in every layout are read as the same numbers; errors name what is wrong; real analyses."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import xarray as xr

from datasets.archive import open_archive
from datasets.grid import Grid, area_weights
from datasets.regrid import Regridder
from datasets.selection import read_static_field
from errors import DataError
from tests.odd_data import TARGET, rewrite
from tests.sample_archives import (
    CDS,
    EXACT,
    NAMES,
    anemoi,
    cds_old,
    packed_zarr,
    tutorial,
    values,
    weatherbench,
)

U10 = "10m_u_component_of_wind"


@pytest.mark.parametrize("layout", EXACT, ids=lambda layout: layout.__name__)
def test_layout_exact(layout: Callable, tmp_path: Path, truth: xr.Dataset):
    archive = open_archive(layout(tmp_path, truth))
    assert set(archive.variables) | {"land_sea_mask"} == set(NAMES) | {"land_sea_mask"}
    assert archive.times.dtype == "datetime64[s]"
    np.testing.assert_array_equal(archive.times, truth.time.values.astype("datetime64[s]"))
    assert archive.grid.same_as(Grid(truth.latitude.values, truth.longitude.values)) and archive.grid.periodic
    block = archive.read_block(0, 5, NAMES)
    assert block.dtype == np.float32
    np.testing.assert_array_equal(block, values(truth))
    np.testing.assert_array_equal(archive.read_static("land_sea_mask"), truth.land_sea_mask.values)


@pytest.mark.parametrize("layout", [cds_old, packed_zarr], ids=lambda layout: layout.__name__)
def test_layout_packed(layout: Callable, tmp_path: Path, truth: xr.Dataset):
    archive = open_archive(layout(tmp_path, truth))
    wanted, block = values(truth), archive.read_block(0, 5, NAMES)
    half_step = np.nanmax(wanted, (0, 2, 3)) - np.nanmin(wanted, (0, 2, 3))
    assert (np.isnan(block) == np.isnan(wanted)).all()
    for v, span in enumerate(half_step):
        np.testing.assert_allclose(block[:, v], wanted[:, v], atol=1.6 * span / 65530 / 2 + 3e-5)


def test_fsspec_memory(truth: xr.Dataset):
    truth.to_zarr("memory://test_archive/store.zarr", zarr_format=2, mode="w")
    archive = open_archive("memory://test_archive/store.zarr")
    np.testing.assert_array_equal(archive.read_block(0, 5, NAMES), values(truth))
    with pytest.raises(ValueError, match="cannot read 'memory://test_archive/other.zarr'"):
        open_archive("memory://test_archive/other.zarr")


def test_a_single_member_is_read(tmp_path: Path, truth: xr.Dataset):
    ds = truth.rename(CDS)[["2m_temperature"]].expand_dims(number=[0])
    ds.to_netcdf(tmp_path / "one.nc", engine="h5netcdf")
    one = open_archive(str(tmp_path / "one.nc")).read_block(0, 5, ["2m_temperature"])
    np.testing.assert_array_equal(one[:, 0], truth["2m_temperature"].values)


def channels(truth: xr.Dataset) -> xr.Dataset:
    """An array a level, as many people store them."""
    named = {f"t{level}": truth.temperature.sel(level=level, drop=True) for level in (500, 850)}
    named |= {"Z_500": truth.geopotential.sel(level=500, drop=True), "t2m": truth["2m_temperature"]}
    return xr.Dataset(named | {"geopotential_850hPa": truth.geopotential.sel(level=850, drop=True)})


@pytest.mark.parametrize("kind", ["nc", "zarr"])
def test_channel_names_are_understood(kind: str, tmp_path: Path, truth: xr.Dataset):
    """u850, z500, t2m in NetCDF and Zarr; not only in the tutorial's and anemoi's."""
    ds, path = channels(truth), tmp_path / f"channels.{kind}"
    ds.to_zarr(path, zarr_format=2) if kind == "zarr" else ds.to_netcdf(path, engine="h5netcdf")
    archive = open_archive(str(path))
    names = ["temperature:500", "temperature:850", "geopotential:500", "geopotential:850", "2m_temperature"]
    assert sorted(archive.variables) == sorted(names)
    block = archive.read(1, ["geopotential:500", "temperature:850"])
    np.testing.assert_array_equal(block[0], truth.geopotential.sel(level=500).values[1])
    np.testing.assert_array_equal(block[1], truth.temperature.sel(level=850).values[1])


def runs(truth: xr.Dataset) -> xr.Dataset:
    """Two members, 10 and 11, of two runs; the second is 1 K and 10 K warmer."""
    ds, days = truth[["2m_temperature"]], np.array(["2019-12-30", "2019-12-31"], "datetime64[ns]")
    ds = xr.concat([ds, ds + 1], xr.DataArray([10, 11], dims="member", name="member"))
    ds = xr.concat([ds, ds + 10], xr.DataArray(days, dims="run", name="run"))
    return ds.transpose("time", "run", "member", ...).assign(msl=truth["2m_temperature"])


def test_dimensions_in_the_way_are_named_and_picked(tmp_path: Path, truth: xr.Dataset):
    """By label, by date, by position where there is no label."""
    ds, t2m = runs(truth), truth["2m_temperature"].values
    ds.to_netcdf(tmp_path / "runs.nc", engine="h5netcdf")
    path = str(tmp_path / "runs.nc")
    way_out = r"dimension run of size 2; choose one with data.select = \['run=2019-12-30T00:00:00'\]"
    with pytest.raises(ValueError, match=f"no variable '2m_temperature': it has a {way_out}"):
        open_archive(path).read(0, ["2m_temperature"])
    picked = open_archive(path, {"run": "2019-12-31T00:00:00", "member": "11"})
    np.testing.assert_array_equal(picked.read_block(0, 5, ["2m_temperature"])[:, 0], t2m + 11)
    with pytest.raises(ValueError, match="dimension member of size 2; choose one .*'member=10'"):
        open_archive(path, {"run": "2019-12-30T00:00:00"}).read(0, ["2m_temperature"])
    with pytest.raises(ValueError, match=r"data.select = \['member=12'\]: member has 10, 11; take one"):
        open_archive(path, {"run": "2019-12-30T00:00:00", "member": "12"})
    ds.drop_vars(["run", "member"]).to_netcdf(tmp_path / "bare.nc", engine="h5netcdf")
    bare = open_archive(str(tmp_path / "bare.nc"), {"run": "0", "member": "1"})
    np.testing.assert_array_equal(bare.read_block(0, 5, ["2m_temperature"])[:, 0], t2m + 1)


def test_scalar_level_and_surface_geopotential(tmp_path: Path, truth: xr.Dataset):
    ds = truth[["temperature"]].sel(level=850).rename(temperature="t")
    ds.to_netcdf(tmp_path / "t850.nc", engine="h5netcdf")
    truth[["2m_temperature"]].rename({"2m_temperature": "z"}).to_netcdf(tmp_path / "zs.nc", engine="h5netcdf")
    archive = open_archive(str(tmp_path))
    assert archive.variables == ["temperature:850", "geopotential_at_surface"]


def test_regional_longitudes(tmp_path: Path, truth: xr.Dataset):
    ds = truth.isel(longitude=[0, 1, 2])
    for i, stored in enumerate(([-10.0, 0, 10], [350.0, 0, 10], [350.0, 360, 370])):
        ds.assign_coords(longitude=stored).to_netcdf(tmp_path / f"{i}.nc", engine="h5netcdf")
        archive = open_archive(str(tmp_path / f"{i}.nc"))
        assert archive.grid.longitude.tolist() == [-10, 0, 10] and not archive.grid.periodic
        np.testing.assert_array_equal(archive.read(0, ["2m_temperature"])[0], ds["2m_temperature"].values[0])


def test_zero_is_not_missing_in_zarr2(tmp_path: Path, truth: xr.Dataset):
    """Zarr's default fill value 0 stands in many stores; it must not turn the sea of a mask to NaN."""
    import zarr

    path = weatherbench(tmp_path, truth)
    group = zarr.open_group(path, mode="a", zarr_format=2, use_consolidated=False)
    mask = group.create_array("lsm", shape=(6, 8), dtype="f4", fill_value=0.0)
    mask.attrs["_ARRAY_DIMENSIONS"] = ["latitude", "longitude"]
    mask[:] = truth.land_sea_mask.values
    zarr.consolidate_metadata(path)
    np.testing.assert_array_equal(open_archive(path).read_static("land_sea_mask"), truth.land_sea_mask.values)


def test_tutorial_hdf5(tmp_path: Path, truth: xr.Dataset):
    """The NERSC tutorial's yearly files, cut short: rows of ERA5 without its last one."""
    archive = open_archive(tutorial(tmp_path, truth))
    names = archive.variables
    assert len(names) == 20 and names[0] == U10 and names[14] == "geopotential:500"
    assert archive.grid.latitude.tolist() == [90, 45, 0, -45] and archive.grid.periodic
    assert archive.times[3] == np.datetime64("2016-01-01") and archive.index("2016-01-01T12") == 5
    files: list[Any] = [h5py.File(tmp_path / f"{year}.h5") for year in (2015, 2016)]
    fields = np.concatenate([file["fields"][:] for file in files])
    names = ["total_column_water_vapour", U10, "geopotential:500"]
    np.testing.assert_array_equal(archive.read_block(1, 5, names), fields[1:5][:, [19, 0, 14]])
    os.rename(tmp_path / "2015.h5", tmp_path / "first.h5")
    with pytest.raises(ValueError, match="first.h5': its name does not end in the year"):
        open_archive(str(tmp_path / "first.h5"))


def test_anemoi_zarr(tmp_path: Path, truth: xr.Dataset):
    import zarr

    archive = open_archive(anemoi(tmp_path, truth))
    t, t2m = truth.temperature.values[:, 0], truth["2m_temperature"].values
    assert archive.variables == ["temperature:500", "2m_temperature", "land_sea_mask"]
    np.testing.assert_array_equal(archive.read_block(0, 5, ["2m_temperature"])[:, 0], t2m)
    np.testing.assert_array_equal(archive.read(3, ["temperature:500"])[0], t[3])
    np.testing.assert_array_equal(archive.read_static("land_sea_mask"), truth.land_sea_mask.values)
    group: Any = zarr.open_group(tmp_path / "anemoi.zarr", mode="r+", zarr_format=2)
    data, dims = group["data"][:], group["data"].attrs["_ARRAY_DIMENSIONS"]
    two = np.concatenate([data, data + 1], axis=2)
    group.create_array("data", data=two, overwrite=True).attrs["_ARRAY_DIMENSIONS"] = dims
    with pytest.raises(ValueError, match="dimension ensemble of size 2; choose one .*'ensemble=0'"):
        open_archive(str(tmp_path / "anemoi.zarr"))
    member = open_archive(str(tmp_path / "anemoi.zarr"), {"ensemble": "1"}).read(3, ["temperature:500"])
    np.testing.assert_array_equal(member[0], t[3] + 1)


def test_errors_name_path_and_reason(tmp_path: Path, truth: xr.Dataset):
    """One line each; what follows the path is the reason."""
    (tmp_path / "empty.nc").write_bytes(b"")
    (tmp_path / "rubbish.nc").write_bytes(bytes(range(256)))
    (tmp_path / "weather.grib").write_bytes(b"GRIB" + bytes(100))
    (tmp_path / "cut.nc").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(10))
    (tmp_path / "cut3.nc").write_bytes(b"CDF\x01\x00\x00")
    (tmp_path / "folder").mkdir()
    (tmp_path / "hollow.zarr").mkdir()
    (tmp_path / "hollow.zarr" / ".zgroup").write_text("{")
    truth[["land_sea_mask"]].to_netcdf(tmp_path / "static.nc", engine="h5netcdf")
    truth[["2m_temperature"]].isel(latitude=0, drop=True).to_netcdf(tmp_path / "line.nc", engine="h5netcdf")
    truth.assign_coords(time=range(5)).to_netcdf(tmp_path / "undated.nc", engine="h5netcdf")
    (tmp_path / "two").mkdir()
    truth.to_netcdf(tmp_path / "two" / "a.nc", engine="h5netcdf")
    truth.isel(latitude=slice(3)).to_netcdf(tmp_path / "two" / "b.nc", engine="h5netcdf")
    names = ["empty.nc", "rubbish.nc", "weather.grib", "cut.nc", "cut3.nc", "folder", "hollow.zarr"]
    for name in [*names, "static.nc", "line.nc", "undated.nc", "absent.nc", "*.zip", "two"]:
        with pytest.raises(DataError, match="cannot read") as caught:
            open_archive(str(tmp_path / name))
        assert name in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(DataError, match="cannot read 'gs://bucket/era5.zarr': .*obstore"):
        open_archive("gs://bucket/era5.zarr")


DATA = Path(__file__).parents[1] / "../shared/data"
V10 = "10m_v_component_of_wind"


def needs(path: str) -> str:
    """Return the path of real analyses, of "odd_data/..." as tests/odd_data.py rewrites them."""
    place = TARGET.parent / path if path.startswith("odd_data/") else DATA / path
    if not place.exists() and place.parent == TARGET:
        rewrite()
    if not place.exists():
        pytest.skip(f"{DATA} is absent")
    return str(place)


def test_dates_that_only_some_files_have(tmp_path: Path, truth: xr.Dataset):
    truth[["geopotential"]].to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    truth[["2m_temperature"]].isel(time=[1, 3]).to_netcdf(tmp_path / "b.nc", engine="h5netcdf")
    archive = open_archive(str(tmp_path))
    assert len(archive.times) == 5
    assert archive.has(["2m_temperature", "geopotential:500"]).tolist() == [False, True, False, True, False]
    block = archive.read_block(0, 5, ["2m_temperature", "geopotential:850"])
    np.testing.assert_array_equal(block[:, 1], truth.geopotential.sel(level=850).values)
    np.testing.assert_array_equal(block[[1, 3], 0], truth["2m_temperature"].values[[1, 3]])
    assert np.isnan(block[[0, 2, 4], 0]).all()
    np.testing.assert_array_equal(archive.read_static("2m_temperature"), truth["2m_temperature"].values[1])


def test_index(tmp_path: Path, truth: xr.Dataset):
    archive = open_archive(weatherbench(tmp_path, truth.isel(time=[0, 1, 2, 4])))
    assert archive.index("2019-12-31T12:00") == 1 == archive.index(np.datetime64("2019-12-31T12", "ns"))
    with pytest.raises(DataError, match="no analysis of 2020-01-01T00"):
        archive.index("2020-01-01T00")


def test_static_field_is_regridded(tmp_path: Path, truth: xr.Dataset):
    truth[["land_sea_mask"]].rename(land_sea_mask="lsm").to_netcdf(tmp_path / "lsm.nc", engine="h5netcdf")
    grid = Grid(truth.latitude.values, truth.longitude.values)
    same = read_static_field(str(tmp_path / "lsm.nc"), "land_sea_mask", grid)
    np.testing.assert_array_equal(same, truth.land_sea_mask.values)
    coarse = Grid(np.array([60, 0, -60]), np.arange(0, 360, 90))
    half = read_static_field(str(tmp_path / "lsm.nc"), "land_sea_mask", coarse)
    assert half.shape == (3, 4) and half.dtype == np.float32
    wanted = (same * area_weights(grid.latitude)[:, None]).mean()
    assert (half * area_weights(coarse.latitude)[:, None]).mean() == pytest.approx(wanted, rel=1e-5)
    with pytest.raises(ValueError, match="no variable 'land_see_mask'; nearest: 'land_sea_mask'"):
        read_static_field(str(tmp_path / "lsm.nc"), "land_see_mask", grid)


# README's table. Its first figure is 2.41948 here, rounded twice there (2.4195, 2.420); the others agree.
def test_winds_share_their_area_mean():
    """The coarser files are conservative means of the 1 degree one: our regridding has to reproduce them."""
    path = needs("gfs_winds_2026") + "/gfs_winds_20260324-20260419_{}.nc"
    fine, coarse = (open_archive(path.format(name)) for name in ("1deg", "5.625deg"))
    ours = Regridder(fine.grid, coarse.grid)(torch.from_numpy(fine.read(7, [U10]))).numpy()
    np.testing.assert_allclose(ours, coarse.read(7, [U10]), atol=2e-3)


def test_storm():
    archive = open_archive(needs("odd_data/storm_1996.nc"))
    surface = {"mean_sea_level_pressure", "2m_temperature", U10, V10}
    assert set(archive.variables) == surface | {"u_component_of_wind:500", "v_component_of_wind:500"}
    assert archive.times[0] == np.datetime64("1996-01-05T00") and len(archive.times) == 64
    assert archive.grid.latitude[0] == 60 and archive.grid.longitude[0] == -140 and not archive.grid.periodic
    pressure = archive.read_block(0, 64, ["mean_sea_level_pressure"])
    low, high = np.nanmin(pressure), np.nanmax(pressure)
    assert (np.isnan(pressure).sum((1, 2, 3)) == 224).all() and 95e3 < low < high < 106e3
    holed = archive.read_block(0, 64, ["2m_temperature", V10, "v_component_of_wind:500"])
    gone = np.isnan(holed).sum((2, 3)) == 33 * 36
    assert [np.flatnonzero(gone[:, v]).tolist() for v in range(3)] == [[17], [17, 37], [36]]


def test_land_sea_mask_of_ncar():
    winds = open_archive(needs("gfs_winds_2026") + "/gfs_winds_20260324-20260419_5.625deg.nc")
    mask = read_static_field(needs("odd_data/landsea.nc"), "land_sea_mask", winds.grid)
    fraction = (mask * area_weights(winds.grid.latitude)[:, None]).mean()
    assert fraction == pytest.approx(0.29, abs=0.01) and mask.min() == 0 and mask.max() == 1
    antarctica, pacific = mask[-1], mask[16, 32:42]
    assert antarctica.min() > 0.9 and pacific.max() < 0.1


def test_many_files_are_not_all_held_open(tmp_path: Path, truth: xr.Dataset):
    """A folder may hold more files than a process may open."""
    truth[["2m_temperature"]].to_netcdf(tmp_path / "000.nc", engine="h5netcdf")
    for i in range(1, 150):
        os.link(tmp_path / "000.nc", tmp_path / f"{i:03d}.nc")
    open_archive(str(tmp_path))
    held = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert sum(name.startswith(str(tmp_path)) for name in held) <= 128
