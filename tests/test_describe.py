"""datasets.describe: contents, problems and a section that trains, of every layout and the real archives."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from command_line import load_config
from config import Data
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
from tests.test_archive import needs
from training.config_checks import load_checked

T2M = "2m_temperature"
LAYOUTS = [weatherbench, samples.arco, samples.cds_new, samples.file_a_variable, samples.west_first]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "SHARD_DATES", 4)


def describe_section(path: str, capsys: pytest.CaptureFixture, *options: str) -> tuple[str, Data]:
    """The text, and its section as a configuration has it."""
    capsys.readouterr()
    main([path, *options])
    text = capsys.readouterr().out
    section = tomllib.loads(text[text.index("[data]") :])["data"]
    file = Path(section["path"]).parent / "of_describe.toml"
    return text, load_section(file, text[text.index("[data]") :])


def load_section(file: Path, text: str) -> Data:
    try:
        file.write_text(text)
    except OSError:  # real data lie where nothing is written
        pytest.skip(f"{file.parent} is read-only")
    return load_checked(["--job.config_file", str(file)]).data


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_a_section_of_a_layout_is_accepted(
    layout: Callable, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """By the same checks as a run's."""
    (tmp_path / "in").mkdir()
    text, data = describe_section(layout(tmp_path / "in", analyses()), capsys)
    selection = open_selection(data, (1, 1), ())
    assert set(selection.variables) >= set(NAMES) - {"land_sea_mask"}
    assert "6 x 8 points, latitude 75 to -75, longitude 0 to 315: the globe" in text
    assert "5 dates, 2019-12-31T06:00:00 to 2020-01-01T06:00:00, 6 hours apart" in text


def test_a_converted_store(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Types, levels and static fields."""
    assert convert([weatherbench(tmp_path, analyses()), str(tmp_path / "out")]) == 0
    text, data = describe_section(str(tmp_path / "out"), capsys)
    assert "float16" in text
    assert data.static_variables == ("land_sea_mask",)


def test_gaps_and_a_selected_element(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    ds = analyses()[[T2M]].isel(time=[0, 1, 2, 4])
    members = xr.concat([ds, ds + 1], xr.DataArray([10, 11], dims="member", name="member"))
    members.to_netcdf(tmp_path / "m.nc", engine="h5netcdf")
    text, data = describe_section(str(tmp_path / "m.nc"), capsys, "--select", "member=11")
    assert "dates missing" in text and "2020-01-01T00:00:00" in text and data.select == ("member=11",)
    with pytest.raises(ConfigError, match="--al"):
        main([str(tmp_path / "m.nc"), "--alle"])


@pytest.mark.parametrize(("hours", "dates", "leads"), [(24, 40, (24,)), (6, 40, (6, 24)), (6, 6, (6,))])
def test_leads_are_those_that_the_data_have(tmp_path, capsys, hours: int, dates: int, leads: tuple) -> None:
    """Where a configuration that is extended has longer ones, and static variables, too."""
    ds = waves(dates)
    ds["time"] = np.datetime64("2019-12-30", "ns") + hours * np.arange(dates) * np.timedelta64(1, "h")
    ds[[T2M]].to_netcdf(tmp_path / "m.nc", engine="h5netcdf")
    main([str(tmp_path / "m.nc")])
    text = capsys.readouterr().out
    for parent in ["demo.toml", "demo_unet.toml", "vit1b_adamw.toml"]:
        section = text[text.index("[data]") :]
        (tmp_path / "a.toml").write_text(f'extends = "train_configs/{parent}"\n\n{section}')
        config = load_config(["--job.config_file", str(tmp_path / "a.toml")])
        open_selection(config.data, (1, 1), config.validation.lead_hours)
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


# What is wrong, the problem, its first date, the number of dates.
CASES = [
    (lambda ds: ds.isel(time=[*range(4), *range(5, 12)]), "dates missing", "2019-12-31T00", 1),
    (of_t2m(lambda t2m: t2m.assign_attrs(units="m s-1")), "its units 'm s-1'", "", 1),
    (of_t2m(lambda t2m: t2m - 273.15), "values outside 170 to 340 K", "2019-12-30T00", 12),
    (of_t2m(undeclared_fill), "-9999 in some cells", "2019-12-31T12", 6),
    (of_t2m(lambda t2m: t2m.where(t2m.time != t2m.time[5], 273.0)), "one value", "2019-12-31T06", 1),
    (of_t2m(lambda t2m: t2m.where(t2m.time != t2m.time[2])), "no value at all", "2019-12-30T12", 1),
    (of_t2m(lambda t2m: t2m.where(t2m != t2m[4, 1, 1], np.inf)), "values infinite", "2019-12-31T00", 1),
]


def find_problems(path: str, capsys: pytest.CaptureFixture, *options: str) -> tuple[int, list[str]]:
    """Return the exit code and the rows of the table."""
    capsys.readouterr()
    code = main([path, "--all", *options])
    text = capsys.readouterr().out
    table = text.partition("problem ")[2].partition("values of")[0]
    return code, table.splitlines()[1:]


@pytest.mark.parametrize("wrong, problem, first, count", CASES, ids=[case[1] for case in CASES])
def test_a_problem_has_its_row(
    wrong: Callable, problem: str, first: str, count: int, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    wrong(waves()).to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    code, rows = find_problems(str(tmp_path / "a.nc"), capsys)
    (row,) = rows
    assert code == 1 and row.startswith(problem) and row.split()[-1] == str(count) and first in row


def test_nothing_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Also if a file has its rows the other way and its coordinate says so."""
    ds = waves()
    ds.isel(time=slice(0, 6)).to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    rest = ds.isel(time=slice(6, 12), latitude=slice(None, None, -1))
    rest.to_netcdf(tmp_path / "b.nc", engine="h5netcdf")
    assert find_problems(str(tmp_path), capsys) == (0, [])


def test_a_truncated_file_is_a_row_and_the_others_are_read(tmp_path: Path, capsys) -> None:
    pattern = file_a_year(tmp_path, waves())
    last = tmp_path / "era5_2020.nc"
    last.write_bytes(last.read_bytes()[:-2000])
    code, rows = find_problems(pattern, capsys)
    assert code == 1 and len(rows) == 1 and "era5_2020.nc" in rows[0]


def test_a_damaged_chunk_is_a_row(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    ds = waves()
    encoding = {name: {"chunks": (1, 6, 8)} for name in ds.data_vars}
    ds.to_zarr(tmp_path / "a.zarr", zarr_format=2, encoding=encoding)
    chunk = tmp_path / "a.zarr" / T2M / "3.0.0"
    chunk.write_bytes(chunk.read_bytes()[:20])
    code, rows = find_problems(str(tmp_path / "a.zarr"), capsys)
    assert code == 1 and len(rows) == 1 and "2019-12-30T18" in rows[0] and T2M in rows[0]


def test_files_that_differ_are_rows(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    ds = waves()
    ds.isel(time=slice(0, 7)).to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    (ds.isel(time=slice(6, 12)) + 1).to_netcdf(tmp_path / "b.nc", engine="h5netcdf")
    code, rows = find_problems(str(tmp_path), capsys)
    assert code == 1 and all("different values at 2019-12-31T12" in row for row in rows) and len(rows) == 2


def test_real_archives(capsys: pytest.CaptureFixture) -> None:
    """The problems that their README names, and no more."""
    code, rows = find_problems(needs("gfs_winds_2026/gfs_winds_20260324-20260419_5.625deg.nc"), capsys)
    assert code == 1 and len(rows) == 1 and "2026-04-08T00" in rows[0]
    _, rows = find_problems(needs("odd_data/storm_1996.nc"), capsys)
    assert [row.split()[-1] for row in rows] == ["1", "2", "1"]
    assert all(row.startswith("no value at all") for row in rows)
    assert find_problems(needs("era5_europe_2020"), capsys)[0] == 0


def test_cells_without_a_value_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Storms that were removed from a field; cells that are always missing are no problem."""
    ds = waves()
    ds[T2M] = ds[T2M].where(ds.latitude < 70)
    ds.to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    assert find_problems(str(tmp_path / "a.nc"), capsys) == (0, [])
    ds["skt"] = ds["skt"].where((ds["skt"] < ds["skt"].max() - 2) | (ds.time > ds.time[7]))
    ds.to_netcdf(tmp_path / "b.nc", engine="h5netcdf")
    main([str(tmp_path / "b.nc")])
    rows = [
        line for line in capsys.readouterr().out.splitlines() if line.strip().startswith(("2m_", "skin_"))
    ]
    assert "16.7 %" in rows[0] and "%" in rows[1]
    code, rows = find_problems(str(tmp_path / "b.nc"), capsys)
    assert code == 1 and len(rows) == 1 and "skin_temperature" in rows[0] and "missing cells" in rows[0]


def test_missing_dates_are_ranges(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The first one alone was listed."""
    waves().isel(time=[0, 1, 5, 6, 8, 11]).to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    _, (row,) = find_problems(str(tmp_path / "a.nc"), capsys)
    ranges = "2019-12-30T12:00:00 to 2019-12-31T00:00:00, 2019-12-31T18:00:00, 2020-01-01T06:00:00 to"
    assert ranges in row and row.split()[-1] == "6"


def test_units_that_are_assumed_and_names_that_are_unknown(tmp_path, capsys) -> None:
    """Units that no file has were printed as if they were read."""
    ds = waves().rename(skt="U10M")
    ds[T2M].attrs["units"] = "K"
    ds.assign(t=ds[T2M].drop_attrs()).to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    main([str(tmp_path / "a.nc")])
    text = capsys.readouterr().out
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "assumed" not in lines[T2M] and "K (assumed)" in lines["temperature"]
    assert "10m_u_component_of_wind" in text and "nearest known" in text


def test_names_with_and_without_a_level_and_static_fields_without_values(tmp_path, capsys) -> None:
    upper = waves().rename({T2M: "t"})[["t"]].expand_dims(level=[500, 850], axis=1)
    upper.to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    lower = waves().rename({T2M: "t"})[["t"]].assign(lsm=(("latitude", "longitude"), np.full((6, 8), np.nan)))
    lower.to_netcdf(tmp_path / "b.nc", engine="h5netcdf")
    main([str(tmp_path)])
    text = capsys.readouterr().out
    assert "with and without a level" in text and 'variables = ["temperature:500", "temperature:850"]' in text
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


# -- docs/data.md: its file is made and described as it says


def test_the_file_of_the_page_is_described_as_it_shows(tmp_path: Path) -> None:
    text = (ROOT / "docs/data.md").read_text().partition("## A source of your own")[2]
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    shown = re.search(r"datasets\.describe winds\.nc.*?\n(.*?)```", text, re.DOTALL)
    assert shown
    command = [sys.executable, "-m", "datasets.describe", str(tmp_path / "winds.nc")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    missing = [line for line in shown[1].splitlines() if line not in done.stdout.splitlines()]
    assert not missing, done.stdout
