"""datasets.describe: what it says of stores, and that a run accepts the section it prints."""

import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import archives.training_store
import conversion.description
from archives.archive import open_archive
from archives.grid import area_weights
from command_line import load_config
from config import Data
from conversion.description import split_periods
from datasets.convert import main as convert
from datasets.describe import main
from datasets.selection import open_selection
from errors import ConfigError
from tests.sample_archives import EXACT, NAMES, analyses
from tests.test_archive import needs


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion.description, "READ_FOR", 0.05)
    monkeypatch.setattr(archives.training_store, "SHARD_DATES", 4)


def described(path: str, capsys: pytest.CaptureFixture, *options: str) -> tuple[str, Data]:
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
    return load_config(["--job.config_file", str(file)]).data


@pytest.mark.parametrize("layout", EXACT, ids=lambda layout: layout.__name__)
def test_a_section_of_every_layout_is_accepted(
    layout: Callable, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """By the same checks as a run's."""
    (tmp_path / "in").mkdir()
    text, data = described(layout(tmp_path / "in", analyses()), capsys)
    selection = open_selection(data, (1, 1), ())
    assert set(selection.variables) >= set(NAMES) - {"land_sea_mask"}
    assert "6 x 8 points, latitude 75 to -75, longitude 0 to 315: the globe" in text
    assert "5 dates, 2019-12-31T06:00:00 to 2020-01-01T06:00:00, 6 hours apart" in text


def test_a_training_store(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    ds = analyses()
    ds["2m_temperature"][3] = np.nan
    source = EXACT[0](tmp_path, ds)
    assert convert([source, str(tmp_path / "out")]) == 0
    text, data = described(str(tmp_path / "out"), capsys)
    assert "a training store made of " in text and "float16" in text
    assert "1 time x 6 latitude x 8 longitude, 4 dates an object" in text
    assert "4 have a value of every variable; 2m_temperature lack some" in text
    assert data.levels == (500, 850, 1000) and data.static_variables == ("land_sea_mask",)
    assert "geopotential    500 850 1000  m2 s-2" in text
    table, archive = statistics_of(text), open_archive(source)
    assert list(table) == archive.variables
    for name, numbers in table.items():
        values = np.ma.masked_invalid(archive.read_block(0, 5, [name])[:, 0].astype("f8"))
        area = np.broadcast_to(area_weights(archive.grid.latitude)[:, None], values.shape)
        mean = np.ma.average(values, weights=area)
        deviation = np.ma.average((values - mean) ** 2, weights=area) ** 0.5
        np.testing.assert_allclose(numbers, (mean, deviation, values.min(), values.max()), rtol=1e-5)


def statistics_of(text: str) -> dict[str, list[float]]:
    """Mean, standard deviation, lowest and highest of each variable, as they are printed."""
    rows = text.partition("standard deviation")[2].partition("\n\n")[0].splitlines()[1:]
    return {name: [float(number) for number in numbers] for name, *numbers in map(str.split, rows)}


def test_gaps_and_an_element_that_is_picked(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    ds = analyses()[["2m_temperature"]].isel(time=[0, 1, 2, 4])
    members = xr.concat([ds, ds + 1], xr.DataArray([10, 11], dims="member", name="member"))
    members.to_netcdf(tmp_path / "m.nc", engine="h5netcdf")
    text, data = described(str(tmp_path / "m.nc"), capsys, "--select", "member=11")
    assert "1 dates missing: after 2019-12-31T18:00:00 (1)" in text and data.select == ("member=11",)
    with pytest.raises(ConfigError, match="unrecognized arguments: --all"):
        main([str(tmp_path / "m.nc"), "--all"])


def test_the_last_year_validates_where_there_are_three() -> None:
    times = np.datetime64("1990-01-01", "s") + np.arange(4 * 365 * 4 + 4) * np.timedelta64(6, "h")
    train, validation = split_periods(times)
    assert train == ["1990-01-01", "1992-12-31T18:00:00"]
    assert validation == ["1993-01-01", "1993-12-31T18:00:00"]
    train, validation = split_periods(times[:400])
    assert train[1] < validation[0] and len(times[:400]) * 0.1 < 100


def test_real_winds(capsys: pytest.CaptureFixture) -> None:
    path = needs("gfs_winds_2026/gfs_winds_20260324-20260419_5.625deg.nc")
    main([path])
    text = capsys.readouterr().out
    assert "1 dates missing: after 2026-04-07T18:00:00 (1)" in text and "step_hours = 6" in text
    assert 'variables = ["10m_u_component_of_wind", "10m_v_component_of_wind"]' in text
