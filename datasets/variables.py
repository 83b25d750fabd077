"""Names of variables: WeatherBench2's, with a pressure level in hPa after a colon ("geopotential:500").

Everything in the project speaks these names; the short names of GRIB and of the Climate Data Store are turned
into them on reading, and back into labels ("z500") for tables and plots. Source of the names: WeatherBench2's
data guide; of the short names: ECMWF's parameter database and the CDS NetCDF files of 2018-2024 and since
2024.
"""

import difflib
from collections.abc import Iterable, Sequence

from errors import ConfigError

# Short name -> WeatherBench2 name. The first short name of a variable is its label: t2m, not GRIB's 2t.
SHORT_NAMES = {
    "z": "geopotential",
    "t": "temperature",
    "u": "u_component_of_wind",
    "v": "v_component_of_wind",
    "q": "specific_humidity",
    "w": "vertical_velocity",
    "r": "relative_humidity",
    "vo": "vorticity",
    "d": "divergence",
    "pv": "potential_vorticity",
    "o3": "ozone_mass_mixing_ratio",
    "clwc": "specific_cloud_liquid_water_content",
    "ciwc": "specific_cloud_ice_water_content",
    "cc": "fraction_of_cloud_cover",
    "ws": "wind_speed",
    "t2m": "2m_temperature",
    "2t": "2m_temperature",
    "d2m": "2m_dewpoint_temperature",
    "2d": "2m_dewpoint_temperature",
    "u10": "10m_u_component_of_wind",
    "10u": "10m_u_component_of_wind",
    "v10": "10m_v_component_of_wind",
    "10v": "10m_v_component_of_wind",
    "ws10": "10m_wind_speed",
    "u100": "100m_u_component_of_wind",
    "100u": "100m_u_component_of_wind",
    "v100": "100m_v_component_of_wind",
    "100v": "100m_v_component_of_wind",
    "msl": "mean_sea_level_pressure",
    "sp": "surface_pressure",
    "tcwv": "total_column_water_vapour",
    "tcw": "total_column_water",
    "tcc": "total_cloud_cover",
    "tp": "total_precipitation",
    "tp6": "total_precipitation_6hr",
    "tp24": "total_precipitation_24hr",
    "sst": "sea_surface_temperature",
    "skt": "skin_temperature",
    "siconc": "sea_ice_cover",
    "ci": "sea_ice_cover",
    "sd": "snow_depth",
    "swvl1": "volumetric_soil_water_layer_1",
    "stl1": "soil_temperature_level_1",
    "tisr": "toa_incident_solar_radiation",
    "ssr": "surface_net_solar_radiation",
    "str": "surface_net_thermal_radiation",
    "ssrd": "surface_solar_radiation_downwards",
    "sshf": "surface_sensible_heat_flux",
    "slhf": "surface_latent_heat_flux",
    "lsm": "land_sea_mask",
    "zs": "geopotential_at_surface",
    "slt": "soil_type",
    "sdor": "standard_deviation_of_orography",
    "slor": "slope_of_sub_gridscale_orography",
}

UNITS = {
    "geopotential": "m2 s-2",
    "temperature": "K",
    "u_component_of_wind": "m s-1",
    "v_component_of_wind": "m s-1",
    "specific_humidity": "kg kg-1",
    "vertical_velocity": "Pa s-1",
    "relative_humidity": "%",
    "vorticity": "s-1",
    "divergence": "s-1",
    "potential_vorticity": "K m2 kg-1 s-1",
    "ozone_mass_mixing_ratio": "kg kg-1",
    "specific_cloud_liquid_water_content": "kg kg-1",
    "specific_cloud_ice_water_content": "kg kg-1",
    "fraction_of_cloud_cover": "1",
    "wind_speed": "m s-1",
    "2m_temperature": "K",
    "2m_dewpoint_temperature": "K",
    "10m_u_component_of_wind": "m s-1",
    "10m_v_component_of_wind": "m s-1",
    "10m_wind_speed": "m s-1",
    "100m_u_component_of_wind": "m s-1",
    "100m_v_component_of_wind": "m s-1",
    "mean_sea_level_pressure": "Pa",
    "surface_pressure": "Pa",
    "total_column_water_vapour": "kg m-2",
    "total_column_water": "kg m-2",
    "total_cloud_cover": "1",
    "total_precipitation": "m",
    "total_precipitation_6hr": "m",
    "total_precipitation_24hr": "m",
    "sea_surface_temperature": "K",
    "skin_temperature": "K",
    "sea_ice_cover": "1",
    "snow_depth": "m",
    "volumetric_soil_water_layer_1": "m3 m-3",
    "soil_temperature_level_1": "K",
    "toa_incident_solar_radiation": "J m-2",
    "surface_net_solar_radiation": "J m-2",
    "surface_net_thermal_radiation": "J m-2",
    "surface_solar_radiation_downwards": "J m-2",
    "surface_sensible_heat_flux": "J m-2",
    "surface_latent_heat_flux": "J m-2",
    "land_sea_mask": "1",
    "geopotential_at_surface": "m2 s-2",
    "soil_type": "1",
    "standard_deviation_of_orography": "m",
    "slope_of_sub_gridscale_orography": "1",
}

# Variables that have a level axis in WeatherBench2 and the CDS; all others stand on one surface.
ATMOSPHERIC = frozenset(list(SHORT_NAMES.values())[:15])

_LABELS = {name: short for short, name in reversed(SHORT_NAMES.items())}


def split_name(text: str) -> tuple[str, int | None]:
    """ "geopotential:500" -> ("geopotential", 500); a name without a level has None. Levels are whole hPa.

    ConfigError for an empty name, an empty level or one that is not a positive whole number.
    """
    name, colon, level = text.partition(":")
    if name and name == name.strip() and not colon:
        return name, None
    if not name.strip() or not level.isdecimal() or int(level) == 0:
        raise ConfigError(f"variable {text!r} is not a name or name:level in hPa, as in 'geopotential:500'")
    return name.strip(), int(level)


def join_name(name: str, level: int | None) -> str:
    """The inverse of split_name: ("geopotential", 500) -> "geopotential:500"."""
    return name if level is None else f"{name}:{level}"


def units(variable: str) -> str:
    """Units of a variable with or without level, as printed ("m2 s-2"); "" for an unknown name."""
    return UNITS.get(split_name(variable)[0], "")


def short_label(variable: str) -> str:
    """A label for tables and plots: "geopotential:500" -> "z500", "2m_temperature" -> "t2m".

    Wind at 10 hPa becomes "u10hPa", because "u10" is the wind 10 m above the ground. Unknown names stay
    whole.
    """
    name, level = split_name(variable)
    if name not in _LABELS:
        return variable
    label = f"{_LABELS[name]}{'' if level is None else level}"
    return label + "hPa" if SHORT_NAMES.get(label, name) != name else label


def expand_levels(names: Iterable[str], levels: Sequence[int]) -> list[str]:
    """Give every atmospheric variable without a level all `levels` (hPa) in their order; the others stay.

    Without levels nothing is expanded. A variable that comes out twice is a ConfigError.
    """
    expanded = []
    for text in names:
        name, level = split_name(text)
        if level is None and name in ATMOSPHERIC and levels:
            expanded += [join_name(name, int(each)) for each in levels]
        else:
            expanded.append(join_name(name, level))
    twice = next((name for i, name in enumerate(expanded) if name in expanded[:i]), None)
    if twice is not None:
        raise ConfigError(
            f"variable {twice!r} is listed twice; name it once, with its level or through the levels"
        )
    return expanded


def nearest_name(name: str, candidates: Iterable[str]) -> str:
    """The candidate to suggest for a name that is missing, as the end of an error: "; nearest: 'x'" or "".

    Short names count too ("z500" suggests "geopotential:500"); for a missing level it is the nearest level.
    """
    known = list(candidates)
    base, colon, level = name.partition(":")
    same = [text for text in known if text.partition(":")[0] == base and ":" in text]
    if colon and level.isdecimal() and same:
        best = min(same, key=lambda text: abs(int(text.partition(":")[2]) - int(level)))
        return f"; nearest: {best!r}"
    if same:
        return f"; nearest: {same[0]!r}"
    by_label = {short_label(text): text for text in known}
    close = difflib.get_close_matches(name, known + list(by_label), n=1, cutoff=0.5)
    return f"; nearest: {by_label.get(close[0], close[0])!r}" if close else ""
