"""datasets.describe: contents, problems and a section that trains, of every layout and the real archives."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from config import Config
from datasets import convert as conversion
from datasets import source
from datasets.convert import main as convert
from datasets.describe import main
from datasets.remote import Access
from datasets.selection import open_selection
from errors import ConfigError, DataError
from tests import sample_archives as samples
from tests.sample_archives import NAMES, analyses, file_a_year, weatherbench
from tests.started_jobs import ROOT
from tests.test_layouts import needs
from training.config_checks import load_checked

T2M = "2m_temperature"
LAYOUTS = [weatherbench, samples.arco, samples.cds_new, samples.file_a_variable, samples.west_first]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "SHARD_DATES", 4)


def describe(source: Path | str, capsys: pytest.CaptureFixture, *options: str) -> tuple[int, str]:
    """Return the exit code and the text."""
    capsys.readouterr()
    code = main([str(source), *options])
    return code, capsys.readouterr().out


def section_of(text: str, file: Path, parent: str = "") -> Config:
    """Return the configuration of the section in a text, checked as a run's."""
    extends = f'extends = "train_configs/{parent}"\n\n' if parent else ""
    file.write_text(extends + text[text.index("[data]") :])
    return load_checked(["--job.config_file", str(file)])


def find_problems(source: Path | str, capsys: pytest.CaptureFixture) -> tuple[int, list[str]]:
    """Return the exit code and the rows of the table, of the values of all dates."""
    code, text = describe(source, capsys, "--all")
    return code, text.partition("problem ")[2].partition(" problems in ")[0].splitlines()[1:-1]


@pytest.mark.parametrize("layout", [*LAYOUTS, "a store"])
def test_a_section_of_a_layout_is_accepted(layout: Callable | str, tmp_path: Path, capsys) -> None:
    """By the same checks as a run's."""
    (tmp_path / "in").mkdir()
    if isinstance(layout, str):
        path = str(tmp_path / "store")
        assert convert([weatherbench(tmp_path / "in", analyses()), path]) == 0
    else:
        path = layout(tmp_path / "in", analyses())
    text = describe(path, capsys)[1]
    data = section_of(text, tmp_path / "a.toml").data
    assert set(open_selection(data, (1, 1), ()).variables) >= set(NAMES) - {"land_sea_mask"}
    assert "6 x 8 points, latitude 75 to -75, longitude 0 to 315: the globe" in text
    assert "5 dates, 2019-12-31T06:00:00 to 2020-01-01T06:00:00, 6 hours apart" in text
    if layout == "a store":
        assert "float16" in text and data.static_variables == ("land_sea_mask",)


def test_a_selected_element(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    ds = analyses()[[T2M]]
    members = xr.concat([ds, ds + 1], xr.DataArray([10, 11], dims="member", name="member"))
    members.to_netcdf(tmp_path / "m.nc", engine="h5netcdf")
    text = describe(tmp_path / "m.nc", capsys, "--select", "member=11")[1]
    assert section_of(text, tmp_path / "a.toml").data.select == ("member=11",)
    with pytest.raises(ConfigError, match="--al"):
        main([str(tmp_path / "m.nc"), "--alle"])


@pytest.mark.parametrize(("hours", "dates", "leads"), [(24, 40, (24,)), (6, 40, (6, 24)), (6, 6, (6,))])
def test_leads_are_those_that_the_data_have(tmp_path, capsys, hours: int, dates: int, leads: tuple) -> None:
    """Where a configuration that is extended has longer ones, and static variables, too."""
    ds = waves(dates)
    ds["time"] = np.datetime64("2019-12-30", "ns") + hours * np.arange(dates) * np.timedelta64(1, "h")
    ds[[T2M]].to_netcdf(tmp_path / "m.nc", engine="h5netcdf")
    text = describe(tmp_path / "m.nc", capsys)[1]
    for parent in ["demo.toml", "demo_unet.toml", "vit1b_adamw.toml"]:
        config = section_of(text, tmp_path / "a.toml", parent)
        data = dataclasses.replace(config.data, history=1)  # six dates are too few for the demo's 2
        open_selection(data, (1, 1), config.validation.lead_hours)
        assert config.validation.lead_hours == leads and not config.data.static_variables


def waves(dates: int = 12) -> xr.Dataset:
    """Slowly moving waves on a temperature that falls from south to north."""
    time = np.datetime64("2019-12-30", "ns") + np.arange(dates) * np.timedelta64(6, "h")
    latitude, longitude = np.arange(75.0, -80, -30), np.arange(0, 360, 45.0)
    phase = np.deg2rad(longitude)[None, None] + 0.1 * np.arange(dates)[:, None, None]
    field = 280 - 0.2 * latitude[None, :, None] + 5 * np.cos(phase)
    coords = {"time": time, "latitude": latitude, "longitude": longitude}
    return xr.Dataset({name: (tuple(coords), field.astype("f4")) for name in (T2M, "skt")}, coords)


def of_t2m(change: Callable[[xr.DataArray], xr.DataArray]) -> Callable[[xr.Dataset], xr.Dataset]:
    return lambda ds: ds.assign({T2M: change(ds[T2M])})


def undeclared_fill(t2m: xr.DataArray) -> xr.DataArray:
    t2m[6:, :2, :2] = -9999
    return t2m


RANGES = "2019-12-30T12:00:00 to 2019-12-31T00:00:00, 2019-12-31T18:00:00, 2020-01-01T06:00:00 to"
# What is wrong, the problem, its first date or dates, the number of dates.
CASES = [
    (lambda ds: ds.isel(time=[*range(4), *range(5, 12)]), "dates missing", "2019-12-31T00", 1),
    (lambda ds: ds.isel(time=[0, 1, 5, 6, 8, 11]), "dates missing", RANGES, 6),
    (of_t2m(lambda t2m: t2m.assign_attrs(units="m s-1")), "its units 'm s-1'", "", 1),
    (of_t2m(lambda t2m: t2m - 273.15), "values outside 170 to 340 K", "2019-12-30T00", 12),
    (of_t2m(undeclared_fill), "-9999 in some cells", "2019-12-31T12", 6),
    (of_t2m(lambda t2m: t2m.where(t2m.time != t2m.time[5], 273.0)), "one value", "2019-12-31T06", 1),
    (of_t2m(lambda t2m: t2m.where(t2m.time != t2m.time[2])), "no value at all", "2019-12-30T12", 1),
    (of_t2m(lambda t2m: t2m.where(t2m != t2m[4, 1, 1], np.inf)), "values infinite", "2019-12-31T00", 1),
]


@pytest.mark.parametrize("wrong, problem, first, count", CASES, ids=[case[1] for case in CASES])
def test_a_problem_has_its_row(wrong: Callable, problem, first, count, tmp_path: Path, capsys) -> None:
    wrong(waves()).to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    code, (row,) = find_problems(tmp_path / "a.nc", capsys)
    assert code == 1 and row.startswith(problem) and row.split()[-1] == str(count) and first in row


def test_nothing_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Also if a file has its rows the other way and its coordinate says so."""
    ds = waves()
    ds.isel(time=slice(0, 6)).to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    rest = ds.isel(time=slice(6, 12), latitude=slice(None, None, -1))
    rest.to_netcdf(tmp_path / "b.nc", engine="h5netcdf")
    assert find_problems(tmp_path, capsys) == (0, [])


def truncated_file(folder: Path) -> str:
    pattern = file_a_year(folder, waves())
    last = folder / "era5_2020.nc"
    last.write_bytes(last.read_bytes()[:-2000])
    return pattern


def damaged_chunk(folder: Path) -> str:
    encoding = {name: {"chunks": (1, 6, 8)} for name in (T2M, "skt")}
    waves().to_zarr(folder / "a.zarr", zarr_format=2, encoding=encoding)
    chunk = folder / "a.zarr" / T2M / "3.0.0"
    chunk.write_bytes(chunk.read_bytes()[:20])
    return str(folder / "a.zarr")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (truncated_file, ["era5_2020.nc"]),
        (damaged_chunk, ["2019-12-30T18", T2M]),
    ],
)
def test_damage_is_a_row_and_the_rest_is_read(source: Callable, words: list[str], tmp_path, capsys) -> None:
    code, (row,) = find_problems(source(tmp_path), capsys)
    assert code == 1 and all(word in row for word in words)


def test_real_archives(capsys: pytest.CaptureFixture) -> None:
    """The problems that their README names, and no more."""
    code, (row,) = find_problems(needs("gfs_winds_2026/gfs_winds_20260324-20260419_5.625deg.nc"), capsys)
    assert code == 1 and "2026-04-08T00" in row
    _, rows = find_problems(needs("odd_data/storm_1996.nc"), capsys)
    assert [row.split()[-1] for row in rows] == ["1", "2", "1"]
    assert all(row.startswith("no value at all") for row in rows)
    assert find_problems(needs("era5_europe_2020"), capsys)[0] == 0


def test_cells_without_a_value_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Storms that were removed from a field; cells that are always missing are no problem."""
    ds = waves()
    ds[T2M] = ds[T2M].where(ds.latitude < 70)
    ds.to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    assert find_problems(tmp_path / "a.nc", capsys) == (0, [])
    ds["skt"] = ds["skt"].where((ds["skt"] < ds["skt"].max() - 2) | (ds.time > ds.time[7]))
    ds.to_netcdf(tmp_path / "b.nc", engine="h5netcdf")
    lines = {line.split()[0]: line for line in describe(tmp_path / "b.nc", capsys)[1].splitlines() if line}
    assert "16.7 %" in lines[T2M] and "%" in lines["skin_temperature"]
    code, (row,) = find_problems(tmp_path / "b.nc", capsys)
    assert code == 1 and "skin_temperature" in row and "missing cells" in row


def test_names_units_and_static_fields_that_are_odd(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Units that no file has were printed as if they were read."""
    ds = waves().rename(skt="U10M")
    ds[T2M].attrs["units"] = "K"
    plane = ("latitude", "longitude"), np.full((6, 8), np.nan)
    ds.assign(t=ds[T2M].drop_attrs(), lsm=plane).to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    upper = ds[[T2M]].rename({T2M: "t"}).expand_dims(level=[500, 850], axis=1)
    upper.to_netcdf(tmp_path / "b.nc", engine="h5netcdf")
    text = describe(tmp_path, capsys)[1]
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "assumed" not in lines[T2M] and "K (assumed)" in lines["temperature"]
    assert "10m_u_component_of_wind" in text and "nearest known" in text
    assert "with and without a level" in text and '"temperature:500", "temperature:850"]' in text
    assert any("land_sea_mask" in line and "no value at all" in line for line in text.splitlines())


def test_storage_options_reach_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Private endpoints could not be described."""
    given = []

    def refuse(url: str, access: Access) -> None:
        given.append(access.options_for(url))
        raise DataError("no request is made here")

    monkeypatch.setattr(source, "open_store", refuse)
    with pytest.raises(DataError):
        main(["s3://bucket/a.zarr", "--storage_options", "endpoint=https://minio.example", "anon=true"])
    assert given == [{"endpoint": "https://minio.example", "anon": True}]
    with pytest.raises(ConfigError, match="data.storage_options"):
        main(["s3://bucket/a.zarr", "--storage_options", "endpoint"])


@pytest.mark.parametrize("module", ["describe", "convert"])
def test_interrupted_while_it_imports(tmp_path: Path, module: str) -> None:
    (tmp_path / "numpy.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    command = [sys.executable, "-m", f"datasets.{module}", "a.zarr", "b.zarr"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "rossby: interrupted\n")
