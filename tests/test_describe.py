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
from datasets import source
from datasets.describe import main
from datasets.remote import Access
from datasets.selection import open_selection
from errors import ConfigError, DataError
from tests import sample_archives as samples
from tests.sample_archives import NAMES, analyses, file_a_year, netcdf, training_store, weatherbench
from tests.started_jobs import ROOT, small_dataset, small_wave
from tests.test_layouts import needs
from training.config_checks import load_checked

T2M, SKT = "2m_temperature", "skin_temperature"
LAYOUTS = [weatherbench, samples.arco, samples.cds_new, samples.file_a_variable, samples.west_first]


@pytest.fixture
def describe(capsys: pytest.CaptureFixture) -> Callable[..., tuple[int, str]]:
    """Describes a source; returns the exit code and the text."""

    def call(source: Path | str, *options: str) -> tuple[int, str]:
        capsys.readouterr()
        code = main([str(source), *options])
        return code, capsys.readouterr().out

    return call


@pytest.fixture
def problems(describe) -> Callable[[Path | str], list[str]]:
    """Returns the rows of the table of problems, of the values of all dates."""

    def call(source: Path | str) -> list[str]:
        code, text = describe(source, "--all")
        rows = text.partition("problem ")[2].partition(" problems in ")[0].splitlines()[1:-1]
        assert code == bool(rows)
        return rows

    return call


def section_of(text: str, file: Path, parent: str = "") -> Config:
    """Return the configuration of the section in a text, checked as a run's."""
    extends = f'extends = "train_configs/{parent}"\n\n' if parent else ""
    file.write_text(extends + text[text.index("[data]") :])
    return load_checked(["--job.config_file", str(file)])


@pytest.mark.parametrize("layout", [*LAYOUTS, "a store"])
def test_a_section_of_a_layout_is_accepted(layout: Callable | str, tmp_path: Path, describe) -> None:
    """By the same checks as a run's."""
    (tmp_path / "in").mkdir()
    path = (weatherbench if isinstance(layout, str) else layout)(tmp_path / "in", analyses())
    if layout == "a store":
        path = training_store(path, tmp_path / "store", "--dtype", "float16").path
    text = describe(path)[1]
    data = section_of(text, tmp_path / "a.toml").data
    assert set(open_selection(data, (1, 1), ()).variables) >= set(NAMES) - {"land_sea_mask"}
    assert "6 x 8 points, latitude 75 to -75, longitude 0 to 315: the globe" in text
    assert "5 dates, 2019-12-31T06:00:00 to 2020-01-01T06:00:00, 6 hours apart" in text
    if layout == "a store":
        assert "float16" in text and data.static_variables == ("land_sea_mask",)


def test_a_selected_element(tmp_path: Path, describe) -> None:
    ds = analyses()[[T2M]]
    members = xr.concat([ds, ds + 1], xr.DataArray([10, 11], dims="member", name="member"))
    path = netcdf(tmp_path, members)
    text = describe(path, "--select", "member=11")[1]
    assert section_of(text, tmp_path / "a.toml").data.select == ("member=11",)
    with pytest.raises(ConfigError, match="--al"):
        main([path, "--alle"])


@pytest.mark.parametrize(("hours", "dates", "leads"), [(24, 40, (24,)), (6, 40, (6, 24)), (6, 6, (6,))])
def test_leads_are_those_that_the_data_have(tmp_path, describe, hours: int, dates: int, leads: tuple) -> None:
    """Where a configuration that is extended has longer ones, and static variables, too."""
    ds = waves(dates)[[T2M]]
    times = ds.time.values[0] + hours * np.arange(dates) * np.timedelta64(1, "h")
    text = describe(netcdf(tmp_path, ds.assign_coords(time=times)))[1]
    for parent in ["demo.toml", "demo_unet.toml", "vit1b_adamw.toml"]:
        config = section_of(text, tmp_path / "a.toml", parent)
        data = dataclasses.replace(config.data, history=1)  # six dates are too few for the demo's 2
        open_selection(data, (1, 1), config.validation.lead_hours)
        assert config.validation.lead_hours == leads and not config.data.static_variables


def waves(dates: int = 12) -> xr.Dataset:
    """Slowly moving waves on a temperature that falls from south to north."""
    ds = small_dataset({T2M: small_wave(dates, 1, 5.0)}).drop_attrs()
    ds[T2M] = ds[T2M] + (280 - 0.2 * ds.latitude).astype("f4")
    return ds.assign(skt=ds[T2M])


def of_t2m(change: Callable[[xr.DataArray], xr.DataArray]) -> Callable[[xr.Dataset], xr.Dataset]:
    return lambda ds: ds.assign({T2M: change(ds[T2M])})


def at(t2m: xr.DataArray, date: int) -> xr.DataArray:
    return t2m.time == t2m.time[date]


RANGES = "2020-01-01T12:00:00 to 2020-01-02T00:00:00, 2020-01-02T18:00:00, 2020-01-03T06:00:00 to"
NORTH = waves().latitude > 40
# What is wrong, the problem, its first date or dates, the number of dates.
CASES = [
    (lambda ds: ds.isel(time=[*range(4), *range(5, 12)]), "dates missing", "2020-01-02T00", 1),
    (lambda ds: ds.isel(time=[0, 1, 5, 6, 8, 11]), "dates missing", RANGES, 6),
    (of_t2m(lambda t2m: t2m.assign_attrs(units="m s-1")), "its units 'm s-1'", "", 1),
    (of_t2m(lambda t2m: t2m - 273.15), "values outside 170 to 340 K", "2020-01-01T00", 12),
    (of_t2m(lambda t2m: t2m.where(~NORTH | (t2m.time < t2m.time[6]), -9999)), "-9999 in some", "02T12", 6),
    (of_t2m(lambda t2m: t2m.where(~at(t2m, 5), 273.0)), "one value", "2020-01-02T06", 1),
    (of_t2m(lambda t2m: t2m.where(~at(t2m, 2))), "no value at all", "2020-01-01T12", 1),
    (of_t2m(lambda t2m: t2m.where(t2m != t2m[4, 1, 1], np.inf)), "values infinite", "2020-01-02T00", 1),
]


@pytest.mark.parametrize("wrong, problem, first, count", CASES, ids=[case[1] for case in CASES])
def test_a_problem_has_its_row(wrong: Callable, problem, first, count, tmp_path: Path, problems) -> None:
    (row,) = problems(netcdf(tmp_path, wrong(waves())))
    assert row.startswith(problem) and row.split()[-1] == str(count) and first in row


def test_nothing_is_wrong(tmp_path: Path, problems) -> None:
    """Also if a file has its rows the other way and its coordinate says so."""
    netcdf(tmp_path, waves().isel(time=slice(0, 6)))
    netcdf(tmp_path, waves().isel(time=slice(6, 12), latitude=slice(None, None, -1)), "b.nc")
    assert problems(tmp_path) == []


def test_damage_is_a_row_and_the_rest_is_read(tmp_path: Path, problems) -> None:
    """Of a file that is cut short, and of a chunk."""
    ds = waves(18).assign_coords(time=waves(18).time - np.timedelta64(2, "D"))
    pattern, last = file_a_year(tmp_path, ds), tmp_path / "era5_2020.nc"
    last.write_bytes(last.read_bytes()[:-2000])
    (row,) = problems(pattern)
    assert "era5_2020.nc" in row
    encoding = {name: {"chunks": (1, 6, 8)} for name in (T2M, "skt")}
    waves().to_zarr(tmp_path / "a.zarr", zarr_format=2, encoding=encoding)
    chunk = tmp_path / "a.zarr" / T2M / "3.0.0"
    chunk.write_bytes(chunk.read_bytes()[:20])
    (row,) = problems(tmp_path / "a.zarr")
    assert "2020-01-01T18" in row and T2M in row


def test_real_archives(problems) -> None:
    """The problems that their README names, and no more."""
    (row,) = problems(needs("gfs_winds_2026/gfs_winds_20260324-20260419_5.625deg.nc"))
    assert "2026-04-08T00" in row
    rows = problems(needs("odd_data/storm_1996.nc"))
    assert [row.split()[-1] for row in rows] == ["1", "2", "1"]
    assert all(row.startswith("no value at all") for row in rows)
    assert not problems(needs("era5_europe_2020"))


def test_cells_without_a_value_are_shown(tmp_path: Path, describe, problems) -> None:
    """Storms that were removed from a field; cells that are always missing are no problem."""
    ds = waves()
    ds[T2M] = ds[T2M].where(ds.latitude < 70)
    assert problems(netcdf(tmp_path, ds)) == []
    ds["skt"] = ds["skt"].where((ds["skt"] < ds["skt"].max() - 2) | (ds.time > ds.time[7]))
    text = describe(netcdf(tmp_path, ds, "b.nc"))[1]
    lines = {line.split()[0]: line for line in text.splitlines() if line}
    assert "16.7 %" in lines[T2M] and "%" in lines[SKT]
    (row,) = problems(tmp_path / "b.nc")
    assert SKT in row and "missing cells" in row


def test_names_units_and_static_fields_that_are_odd(tmp_path: Path, describe) -> None:
    """Units that no file has were printed as if they were read."""
    ds = waves().rename(skt="U10M")
    ds[T2M].attrs["units"] = "K"
    plane = ("latitude", "longitude"), np.full((6, 8), np.nan)
    netcdf(tmp_path, ds.assign(t=ds[T2M].drop_attrs(), lsm=plane))
    netcdf(tmp_path, ds[[T2M]].rename({T2M: "t"}).expand_dims(level=[500, 850], axis=1), "b.nc")
    text = describe(tmp_path)[1]
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
