"""Names of variables: WeatherBench2's, with a pressure level in hPa after a colon ("geopotential:500").

Everything in the project speaks these names; the short names of GRIB and of the Climate Data Store are turned
into them on reading, and back into labels ("z500") for tables and plots. Source of the names: WeatherBench2's
data guide; of the short names: ECMWF's parameter database, the CDS NetCDF files of 2018-2024 and since 2024,
and NCEP's reanalyses as NOAA's PSL gives them (whose hgt is a height in m, and stays one).
"""

import difflib
import re
from collections.abc import Iterable, Sequence

from errors import ConfigError

# WeatherBench2 name -> units and short names, of which the first is the label: t2m, not GRIB's 2t.
ON_LEVELS = {  # in WeatherBench2 and the CDS
    "geopotential": ("m2 s-2", "z"),
    "temperature": ("K", "t air"),
    "u_component_of_wind": ("m s-1", "u uwnd"),
    "v_component_of_wind": ("m s-1", "v vwnd"),
    "specific_humidity": ("kg kg-1", "q shum"),
    "vertical_velocity": ("Pa s-1", "w omega"),
    "relative_humidity": ("%", "r rhum"),
    "vorticity": ("s-1", "vo"),
    "divergence": ("s-1", "d"),
    "potential_vorticity": ("K m2 kg-1 s-1", "pv"),
    "ozone_mass_mixing_ratio": ("kg kg-1", "o3"),
    "specific_cloud_liquid_water_content": ("kg kg-1", "clwc"),
    "specific_cloud_ice_water_content": ("kg kg-1", "ciwc"),
    "fraction_of_cloud_cover": ("1", "cc"),
    "wind_speed": ("m s-1", "ws"),
}
ON_ONE_SURFACE = {
    "2m_temperature": ("K", "t2m 2t"),
    "2m_dewpoint_temperature": ("K", "d2m 2d"),
    "10m_u_component_of_wind": ("m s-1", "u10 10u"),
    "10m_v_component_of_wind": ("m s-1", "v10 10v"),
    "10m_wind_speed": ("m s-1", "ws10"),
    "100m_u_component_of_wind": ("m s-1", "u100 100u"),
    "100m_v_component_of_wind": ("m s-1", "v100 100v"),
    "mean_sea_level_pressure": ("Pa", "msl"),
    "surface_pressure": ("Pa", "sp"),
    "total_column_water_vapour": ("kg m-2", "tcwv"),
    "total_column_water": ("kg m-2", "tcw"),
    "total_cloud_cover": ("1", "tcc"),
    "total_precipitation": ("m", "tp"),
    "total_precipitation_6hr": ("m", "tp6"),
    "total_precipitation_24hr": ("m", "tp24"),
    "sea_surface_temperature": ("K", "sst"),
    "skin_temperature": ("K", "skt"),
    "sea_ice_cover": ("1", "siconc ci"),
    "snow_depth": ("m", "sd"),
    "volumetric_soil_water_layer_1": ("m3 m-3", "swvl1"),
    "soil_temperature_level_1": ("K", "stl1"),
    "toa_incident_solar_radiation": ("J m-2", "tisr"),
    "surface_net_solar_radiation": ("J m-2", "ssr"),
    "surface_net_thermal_radiation": ("J m-2", "str"),
    "surface_solar_radiation_downwards": ("J m-2", "ssrd"),
    "surface_sensible_heat_flux": ("J m-2", "sshf"),
    "surface_latent_heat_flux": ("J m-2", "slhf"),
    "land_sea_mask": ("1", "lsm"),
    "geopotential_at_surface": ("m2 s-2", "zs"),
    "soil_type": ("1", "slt"),
    "standard_deviation_of_orography": ("m", "sdor"),
    "slope_of_sub_gridscale_orography": ("1", "slor"),
}
VARIABLES = ON_LEVELS | ON_ONE_SURFACE
# Whole fields of zeros are weather, or land: a Zarr store that leaves such chunks out misses nothing.
OFTEN_ZERO = {
    "fraction_of_cloud_cover",
    "specific_cloud_liquid_water_content",
    "specific_cloud_ice_water_content",
    "total_precipitation",
    "total_precipitation_6hr",
    "total_precipitation_24hr",
    "total_cloud_cover",
    "sea_ice_cover",
    "snow_depth",
    "volumetric_soil_water_layer_1",
    "toa_incident_solar_radiation",
    "surface_net_solar_radiation",
    "surface_solar_radiation_downwards",
    "land_sea_mask",
    "geopotential_at_surface",
    "soil_type",
    "standard_deviation_of_orography",
    "slope_of_sub_gridscale_orography",
}
LOWEST_BARE_LEVEL = 20  # hPa, of a channel such as "t50"
SHORT_NAMES = {short: name for name, (_, shorts) in VARIABLES.items() for short in shorts.split()}


def full_name(text: str) -> str:
    """The name in this project of an array or a channel of a file, its level in the name: "z500", "z_500",
    "Z500hPa" and "geopotential_500" -> "geopotential:500"; "u10" -> "10m_u_component_of_wind". Others stay.

    Levels below 20 hPa need the "_" or the unit: t2 and q2 are 2 m above the ground in many models.
    """
    name = text if text in SHORT_NAMES or text in VARIABLES else text.lower()
    if name in SHORT_NAMES or name in VARIABLES:
        return SHORT_NAMES.get(name, name)
    match = re.fullmatch(r"([a-z]\w*?)(_?)(\d+)_?(hpa|mb|mbar)?", name)
    base = SHORT_NAMES.get(match[1], match[1]) if match else ""
    if match and base in ON_LEVELS and int(match[3]) >= (1 if match[2] or match[4] else LOWEST_BARE_LEVEL):
        return join_name(base, int(match[3]))
    return text


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


def group_levels(variables: Iterable[str]) -> dict[str, dict[int | None, int]]:
    """Name -> level -> position: {"geopotential": {500: 0, 850: 1}, "2m_temperature": {None: 2}}."""
    grouped: dict[str, dict[int | None, int]] = {}
    for position, variable in enumerate(variables):
        name, level = split_name(variable)
        grouped.setdefault(name, {})[level] = position
    return grouped


def units(variable: str) -> str:
    """Units of a variable with or without level, as printed ("m2 s-2"); "" for an unknown name."""
    return VARIABLES.get(split_name(variable)[0], ("", ""))[0]


# What others write for units: those of the data store, of GRIB, of NetCDF's older conventions.
SPELLINGS = {
    "(0 - 1)": "1",
    "0-1": "1",
    "~": "1",
    "-": "1",
    "dimensionless": "1",
    "kelvin": "K",
    "degk": "K",
    "pascal": "Pa",
    "pascals": "Pa",
    "percent": "%",
    "kg/kg": "kg kg-1",
    "m/s": "m s-1",
    "m/sec": "m s-1",
    "pa/s": "Pa s-1",
    "m^2/s^2": "m2 s-2",
    "m2/s2": "m2 s-2",
    "kg/m2": "kg m-2",
    "kg/m^2": "kg m-2",
    "j/m^2": "J m-2",
    "m of water equivalent": "m",
}


def plain_units(text: str) -> str:
    """Units as this project spells them: "m**2 s**-2" and "m2/s2" -> "m2 s-2"; what is not known stays."""
    plain = " ".join(text.replace("**", "").split())
    return SPELLINGS.get(plain.lower(), SPELLINGS.get(text.strip().lower(), plain))


def short_label(variable: str) -> str:
    """A label for tables and plots: "geopotential:500" -> "z500", "2m_temperature" -> "t2m".

    Wind at 10 hPa becomes "u10hPa", because "u10" is the wind 10 m above the ground. Unknown names stay
    whole.
    """
    name, level = split_name(variable)
    if name not in VARIABLES:
        return variable
    label = f"{VARIABLES[name][1].split()[0]}{'' if level is None else level}"
    return label + "hPa" if SHORT_NAMES.get(label, name) != name else label


def expand_levels(names: Iterable[str], levels: Sequence[int]) -> list[str]:
    """Give every atmospheric variable without a level all `levels` (hPa) in their order; the others stay.

    Without levels nothing is expanded. A variable that comes out twice is a ConfigError.
    """
    expanded = []
    for text in names:
        name, level = split_name(text)
        if level is None and name in ON_LEVELS and levels:
            expanded += [join_name(name, int(each)) for each in levels]
        else:
            expanded.append(join_name(name, level))
    twice = next((name for i, name in enumerate(expanded) if name in expanded[:i]), None)
    if twice is not None:
        raise ConfigError(
            f"variable {twice!r} is listed twice; name it once, with its level or through the levels"
        )
    return expanded


def named_by(chosen: Iterable[str], names: Sequence[str]) -> list[str]:
    """Those of `names` that are chosen, in that order: by their whole names, or all levels of one."""
    return [name for wanted in chosen for name in names if wanted in (name, name.partition(":")[0])]


def nearest_name(name: str, candidates: Iterable[str]) -> str:
    """The candidate to suggest for a name that is missing, as the end of an error: "; nearest: 'x'" or "".

    Short names count too ("z500" suggests "geopotential:500"); for a missing level it is the nearest level.
    """
    known, name = list(candidates), full_name(name)
    if name in known:
        return f"; nearest: {name!r}"
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
