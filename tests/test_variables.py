"""Names of variables: splitting, labels, expansion over levels, suggestions."""

import pytest

from datasets.variables import (
    expand_levels,
    full_name,
    join_name,
    nearest_name,
    split_name,
    units,
)


def test_split_and_join():
    wanted = {"geopotential:500": ("geopotential", 500), "2m_temperature": ("2m_temperature", None)}
    for text, parts in wanted.items():
        assert split_name(text) == parts and join_name(*parts) == text


@pytest.mark.parametrize("text", ["", ":500", "z:", "z:high", "z:5:5", "z:-5", "z:0", "z:500.5", " t "])
def test_malformed_names(text: str):
    with pytest.raises(ValueError, match=f"variable {text!r} is not a name or name:level in hPa"):
        split_name(text)


def test_full_names():
    wanted = {
        "z500": "geopotential:500",
        "Z500": "geopotential:500",
        "t_850": "temperature:850",
        "u850hPa": "u_component_of_wind:850",
        "u10hPa": "u_component_of_wind:10",
        "geopotential_500": "geopotential:500",
        "u10": "10m_u_component_of_wind",
        "2t": "2m_temperature",
        "T2M": "2m_temperature",
        "z50": "geopotential:50",
        "2m_temperature": "2m_temperature",
    }
    assert {name: full_name(name) for name in wanted} == wanted
    kept = ["t2", "q2", "Snowman", "snowman500", "channel_3", "geopotential:500", "total_precipitation_6hr"]
    assert [full_name(name) for name in kept] == kept


def test_names_of_cmip():
    names = "tas psl uas vas ta ua va hus zg pr".split()
    upper = "temperature u_component_of_wind v_component_of_wind specific_humidity geopotential".split()
    lower = "2m_temperature mean_sea_level_pressure 10m_u_component_of_wind 10m_v_component_of_wind".split()
    assert [full_name(name) for name in names] == [*lower, *upper, "precipitation_flux"]


def test_units():
    assert units("geopotential:500") == "m2 s-2" and units("2m_temperature") == "K" and units("snowman") == ""


def test_expand_levels():
    names = ["2m_temperature", "geopotential", "temperature:1000"]
    expanded = ["2m_temperature", "geopotential:500", "geopotential:850", "temperature:1000"]
    assert expand_levels(names, [500, 850]) == expanded
    assert expand_levels(names, []) == names and expand_levels([], [500]) == []
    with pytest.raises(ValueError, match="variable 'geopotential:500' is listed twice"):
        expand_levels(["geopotential:500", "geopotential"], [500])
    with pytest.raises(ValueError, match="variable 'geopotential:500' is listed twice"):
        expand_levels(["geopotential"], [500, 850, 500])
    with pytest.raises(ValueError, match="'z:low' is not a name"):
        expand_levels(["z:low"], [500])


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("geopotental:500", "geopotential:500"), ("z850", "geopotential:850"), ("t2m", "2m_temperature")],
)
def test_nearest_name(name: str, nearest: str):
    known = ["geopotential:500", "geopotential:850", "2m_temperature"]
    assert nearest_name(name, known) == f"; nearest: {nearest!r}"
    assert nearest_name("xyz", known) == f"; it has {known}"
