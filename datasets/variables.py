"""Names and units of variables: WeatherBench2's, with a level in hPa after a colon ("geopotential:500").

Sources: WeatherBench2's data guide; ECMWF's parameter database; the CDS NetCDF files of 2018-2024 and since
2024; NCEP's reanalyses at NOAA's PSL (hgt is a height in m there and keeps its name).
"""

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from errors import ConfigError, DataError, format_value

ANY = (-math.inf, math.inf)


class Variable(NamedTuple):
    """Units, short names, CF's standard name (table 92), and a range wider than that of analyses."""

    units: str
    short_names: str
    standard_name: str = ""
    usual_range: tuple[float, float] = ANY
    is_often_zero: bool = False


# By WeatherBench2's name.
ON_LEVELS: dict[str, tuple[Any, ...]] = {  # in WeatherBench2 and the CDS
    "geopotential": ("m2 s-2", "z zg", "geopotential", (-9.5e3, 6e5)),
    "temperature": ("K", "t air ta", "air_temperature", (150, 350)),
    "u_component_of_wind": ("m s-1", "u uwnd ua", "eastward_wind", (-200, 200)),
    "v_component_of_wind": ("m s-1", "v vwnd va", "northward_wind", (-200, 200)),
    "specific_humidity": ("kg kg-1", "q shum hus", "specific_humidity", (-1e-3, 0.05)),
    "vertical_velocity": ("Pa s-1", "w omega wap", "lagrangian_tendency_of_air_pressure", (-50, 50)),
    "relative_humidity": ("%", "r rhum hur", "relative_humidity", (-20, 200)),
    "vorticity": ("s-1", "vo", "atmosphere_relative_vorticity"),
    "divergence": ("s-1", "d", "divergence_of_wind"),
    "potential_vorticity": ("K m2 kg-1 s-1", "pv", "ertel_potential_vorticity"),
    "ozone_mass_mixing_ratio": ("kg kg-1", "o3", ""),
    "specific_cloud_liquid_water_content": ("kg kg-1", "clwc", "", ANY, True),
    "specific_cloud_ice_water_content": ("kg kg-1", "ciwc", "", ANY, True),
    "fraction_of_cloud_cover": ("1", "cc", "", ANY, True),
    "wind_speed": ("m s-1", "ws", "wind_speed"),
}
ON_ONE_SURFACE: dict[str, tuple[Any, ...]] = {
    "2m_temperature": ("K", "t2m 2t tas", "air_temperature", (170, 340)),
    "2m_dewpoint_temperature": ("K", "d2m 2d", "dew_point_temperature", (150, 320)),
    "10m_u_component_of_wind": ("m s-1", "u10 10u uas", "eastward_wind", (-120, 120)),
    "10m_v_component_of_wind": ("m s-1", "v10 10v vas", "northward_wind", (-120, 120)),
    "10m_wind_speed": ("m s-1", "ws10 sfcwind", ""),
    "100m_u_component_of_wind": ("m s-1", "u100 100u", "eastward_wind"),
    "100m_v_component_of_wind": ("m s-1", "v100 100v", "northward_wind"),
    "mean_sea_level_pressure": ("Pa", "msl psl", "air_pressure_at_mean_sea_level", (8.5e4, 1.1e5)),
    "surface_pressure": ("Pa", "sp ps", "surface_air_pressure", (4e4, 1.15e5)),
    "total_column_water_vapour": ("kg m-2", "tcwv prw", "atmosphere_mass_content_of_water_vapor", (-1, 150)),
    "total_column_water": ("kg m-2", "tcw", "", (-1, 200)),
    "total_cloud_cover": ("1", "tcc", "cloud_area_fraction", (-0.01, 1.01), True),
    "total_precipitation": ("m", "tp", "lwe_thickness_of_precipitation_amount", ANY, True),
    "precipitation_flux": ("kg m-2 s-1", "pr", "precipitation_flux"),
    "total_precipitation_6hr": ("m", "tp6", "lwe_thickness_of_precipitation_amount", ANY, True),
    "total_precipitation_24hr": ("m", "tp24", "lwe_thickness_of_precipitation_amount", ANY, True),
    "sea_surface_temperature": ("K", "sst tos", "sea_surface_temperature", (260, 320)),
    "skin_temperature": ("K", "skt ts", "surface_temperature", (150, 360)),
    "sea_ice_cover": ("1", "siconc ci", "sea_ice_area_fraction", (-0.01, 1.01), True),
    "snow_depth": ("m", "sd", "", ANY, True),
    "volumetric_soil_water_layer_1": ("m3 m-3", "swvl1", "", ANY, True),
    "soil_temperature_level_1": ("K", "stl1", ""),
    "toa_incident_solar_radiation": ("J m-2", "tisr", "", ANY, True),
    "surface_net_solar_radiation": ("J m-2", "ssr", "", ANY, True),
    "surface_net_thermal_radiation": ("J m-2", "str", ""),
    "surface_solar_radiation_downwards": ("J m-2", "ssrd", "", ANY, True),
    "surface_sensible_heat_flux": ("J m-2", "sshf", ""),
    "surface_latent_heat_flux": ("J m-2", "slhf", ""),
    "land_sea_mask": ("1", "lsm", "", (-0.01, 1.01), True),
    "geopotential_at_surface": ("m2 s-2", "zs", "", ANY, True),
    "soil_type": ("1", "slt", "", ANY, True),
    "standard_deviation_of_orography": ("m", "sdor", "", ANY, True),
    "slope_of_sub_gridscale_orography": ("1", "slor", "", ANY, True),
}
UNKNOWN = Variable("", "")
VARIABLES = {name: Variable(*row) for name, row in (ON_LEVELS | ON_ONE_SURFACE).items()}
STANDARD_NAMES = {name: row.standard_name for name, row in VARIABLES.items() if row.standard_name}
# Fields that can be 0 everywhere: a Zarr store without a chunk of them is complete.
OFTEN_ZERO = {name for name, row in VARIABLES.items() if row.is_often_zero}
LOWEST_BARE_LEVEL = 20  # hPa, of a channel such as "t50"
CUSTOMARY_HEIGHT = 10  # m: in many archives winds are at this height next to winds on levels from 50 hPa
# Words in attributes: names, standard names, GRIB's kinds of levels.
HEIGHT_WORDS = re.compile(r"met(?:er|re)s?\b|heightaboveground|\d ?m\b")
OTHER_DEPTHS = re.compile(r"depth|\bsea\b|ocean|soil|snow")
LEVEL_WORDS = re.compile(r"hpa|isobaric|pressure|mbar|millibar|\bmb\b")
CLASSES = {"soil_type", "type_of_high_vegetation", "type_of_low_vegetation", "tvh", "tvl", "land_cover"}
# wgrib2's short names, in lower case.
NCEP_NAMES = {"ugrd": "u", "vgrd": "v", "tmp": "t", "spfh": "q", "rh": "r", "vvel": "w", "prmsl": "msl"}
SHORT_NAMES = {short: name for name, row in VARIABLES.items() for short in row.short_names.split()}


def full_name(text: str) -> str:
    """Return the name of an array or channel: "z500", "z_500" and "Z500hPa" -> "geopotential:500"; unknown
    ones are kept. Levels below 20 hPa need the "_" or the unit: t2 and q2 are at 2 m in many models.
    """
    name = text if text in SHORT_NAMES or text in VARIABLES else text.lower()
    if name in SHORT_NAMES or name in VARIABLES:
        return SHORT_NAMES.get(name, name)
    match = re.fullmatch(r"([a-z]\w*?)(_?)(\d+)_?(hpa|mb|mbar)?", name)
    base = SHORT_NAMES.get(match[1], match[1]) if match else ""
    if match and base in ON_LEVELS and int(match[3]) >= (1 if match[2] or match[4] else LOWEST_BARE_LEVEL):
        return join_name(base, int(match[3]))
    return text


def surface_or_level(text: str, siblings: Iterable[str], described: str = "") -> str:
    """Return the name of an array or channel without a level axis. The number in its short name may be a
    height above the ground or a depth in m, or a level in hPa ("u100", "v10"). Raises DataError if it is
    ambiguous.

    siblings: names of all arrays or channels there; described: attributes of this one, which decide if they
    can. Otherwise a level of other variables is a level, and so is a gap in a series of levels. 10 is usually
    a height. A bare z is the surface's, as in CDS single levels and most static files.
    """
    if text == "z":
        return "geopotential_at_surface"
    name, match = full_name(text), re.fullmatch(r"([a-z]+)(\d+)", text.lower())
    described, (base, _, level) = described.lower(), name.partition(":")
    if level and ":" not in text and not LEVEL_WORDS.search(described):
        if re.search(rf"\b{level}[ -]?m(et(er|re)s?)?\b|heightaboveground", described):
            return text if OTHER_DEPTHS.search(described) else f"{level}m_{base}"
    if match is None or name not in ON_ONE_SURFACE or SHORT_NAMES.get(match[1]) not in ON_LEVELS:
        return name
    on_level, number = join_name(SHORT_NAMES[match[1]], int(match[2])), int(match[2])
    # -- its own attributes decide, else the levels of variables next to it
    for words, meaning in ((HEIGHT_WORDS, name), (LEVEL_WORDS, on_level)):
        if words.search(described):
            return meaning
    named = [split_name(full_name(other)) for other in siblings if ":" in full_name(other)]
    levels = [level for base, level in named if base == SHORT_NAMES[match[1]] and level]
    is_in_gap = min(levels, default=number) < number < max(levels, default=0)
    if is_in_gap or any(level == number for _, level in named):
        return on_level
    if levels and number != CUSTOMARY_HEIGHT:
        fix = "give it the attribute long_name, with metre or hPa in it"
        raise DataError(f"{text!r} may be {name} or {on_level}; {fix}")
    return name


def split_name(text: str) -> tuple[str, int | None]:
    """Return ("geopotential", 500) for "geopotential:500", or None as the level. Raises ConfigError."""
    name, colon, level = text.partition(":")
    if name and name == name.strip() and not colon:
        return name, None
    if not name.strip() or not level.isdecimal() or int(level) == 0:
        raise ConfigError(f"variable {text!r} is not a name or name:level in hPa, as in 'geopotential:500'")
    return name.strip(), int(level)


def join_name(name: str, level: int | None) -> str:
    """Return "geopotential:500" for ("geopotential", 500); the inverse of split_name."""
    return name if level is None else f"{name}:{level}"


def group_levels(variables: Iterable[str]) -> dict[str, dict[int | None, int]]:
    """Return name -> level -> position: {"geopotential": {500: 0, 850: 1}, "2m_temperature": {None: 2}}."""
    grouped: dict[str, dict[int | None, int]] = {}
    for position, variable in enumerate(variables):
        name, level = split_name(variable)
        grouped.setdefault(name, {})[level] = position
    return grouped


def units(variable: str) -> str:
    """Return the units of a variable with or without level ("m2 s-2"), "" for an unknown name."""
    return VARIABLES.get(split_name(variable)[0], UNKNOWN).units


def usual_range(variable: str) -> tuple[float, float]:
    """Return the lowest and the highest usual value of a variable, in its units."""
    return VARIABLES.get(split_name(variable)[0], UNKNOWN).usual_range


# Of the data store, of GRIB, of NetCDF's older conventions; of units or of one factor.
OTHER_SPELLINGS = {
    "1": "(0 - 1), 0-1, ~, -, dimensionless, fraction",
    "K": "kelvin, degk, deg_k, degrees_kelvin, degrees_k, degree_k",
    "degC": "degc, deg_c, celsius, degrees_celsius, degree_celsius, °c, c, degrees_c, degree_c",
    "degF": "degf, deg_f, fahrenheit, degrees_fahrenheit, degree_fahrenheit, °f, degrees_f, degree_f",
    "Pa": "pa, pascal, pascals",
    "kPa": "kpa, kilopascal, kilopascals",
    "hPa": "mb, mbar, millibar, millibars, hpa, hectopascal, hectopascals",
    "km h-1": "kmh, kph",
    "knot": "knots, knot, kt, kts",
    "m": "gpm, meter, metre, metres, meters, m of water equivalent",
    "s": "sec, second, seconds",
    "h": "hr, hour, hours",
    "day": "d, days",
    "g": "gram, grams",
    "J": "j",
    "%": "percent",
}
SPELLINGS = {text: ours for ours, texts in OTHER_SPELLINGS.items() for text in texts.split(", ")}
FACTOR = re.compile(r"([/.*· ]*)([a-z°%]+)\^?([+-]?\d+)?", re.IGNORECASE)


class UnitConversion(NamedTuple):
    """value in our units = value * factor + offset."""

    factor: float = 1.0
    offset: float = 0.0


CONVERSIONS = {  # (units of the data, ours)
    ("degC", "K"): UnitConversion(1.0, 273.15),
    ("degF", "K"): UnitConversion(5 / 9, 459.67 * 5 / 9),
    ("hPa", "Pa"): UnitConversion(100.0),
    ("kPa", "Pa"): UnitConversion(1000.0),
    ("hPa s-1", "Pa s-1"): UnitConversion(100.0),
    ("knot", "m s-1"): UnitConversion(1852 / 3600),
    ("km h-1", "m s-1"): UnitConversion(1 / 3.6),
    ("m", "m2 s-2"): UnitConversion(9.80665),  # geopotential height
    ("J kg-1", "m2 s-2"): UnitConversion(),
    ("dam", "m2 s-2"): UnitConversion(98.0665),
    ("g kg-1", "kg kg-1"): UnitConversion(1e-3),
    ("1", "kg kg-1"): UnitConversion(),
    ("1", "m3 m-3"): UnitConversion(),
    ("%", "1"): UnitConversion(0.01),
    ("1", "%"): UnitConversion(100.0),
    ("mm", "m"): UnitConversion(1e-3),
    ("cm", "m"): UnitConversion(1e-2),
    ("kg m-2", "m"): UnitConversion(1e-3),  # of water
    ("mm", "kg m-2"): UnitConversion(),  # of water
    ("mm day-1", "kg m-2 s-1"): UnitConversion(1 / 86400),
    ("mm s-1", "kg m-2 s-1"): UnitConversion(),
}


def plain_units(text: str) -> str:
    """Return units as written here: "m**2/s**2", "m^2 s^-2", "m2.s-2" -> "m2 s-2"; unknown ones are kept."""
    plain = " ".join(text.split())
    for spelling in (plain.lower(), plain.lower().replace(" ", "_")):
        if spelling in SPELLINGS:
            return SPELLINGS[spelling]
    factors = list(FACTOR.finditer(plain.replace("**", "^")))
    if "".join(match[0] for match in factors) != plain.replace("**", "^") or len(factors) < 1:
        return plain
    written = []
    for separator, name, exponent in (match.groups() for match in factors):
        power = int(exponent or 1) * (-1 if "/" in separator else 1)
        name = SPELLINGS.get(name.lower(), name)
        written.append(name if power == 1 else f"{name}{power}")
    return " ".join(written)


def find_conversion(theirs: str, ours: str) -> UnitConversion | None:
    """Return the conversion between units, which are the same if one is not named; None without one."""
    pair = plain_units(theirs), plain_units(ours)
    return UnitConversion() if pair[0] == pair[1] or not all(pair) else CONVERSIONS.get(pair)


def unit_conversion(variable: str, text: str) -> tuple[str, UnitConversion]:
    """Return the units of a variable here and the conversion from those of the data, which an unknown one
    keeps ("": the same). Raises DataError if there is no conversion.
    """
    ours = units(variable)
    conversion = find_conversion(text, ours)
    if variable == "total_precipitation_24hr" and plain_units(text) == "mm day-1":
        conversion = CONVERSIONS["mm", "m"]
    if conversion is None:
        raise DataError(f"its units {text!r} cannot be converted to {ours!r}; correct the attribute")
    return ours or text, conversion


def expand_levels(names: Iterable[str], levels: Sequence[int]) -> list[str]:
    """Return the names in order, atmospheric variables without a level on all `levels` (hPa), if there are
    any. Raises ConfigError for a variable that occurs twice.
    """
    expanded = []
    for name, level in map(split_name, names):
        chosen = levels if level is None and name in ON_LEVELS and levels else [level]
        expanded += [join_name(name, number) for number in chosen]
    if twice := [name for name in expanded if expanded.count(name) > 1]:
        raise ConfigError(f"variable {twice[0]!r} is listed twice; name it once")
    return expanded


def is_class(name: str, attrs: Mapping[str, Any]) -> bool:
    """Return True for a variable of numbered classes, by name or CF's flag_values; a mask is a fraction."""
    values = attrs.get("flag_values", ())
    return name in CLASSES or (hasattr(values, "__len__") and len(values) > 2 and name != "land_sea_mask")


def known_name(text: str) -> str | None:
    """Return the known variable that an unknown name may mean: "U10M" and "UGRD_10maboveground" ->
    "10m_u_component_of_wind"; None for a known name and for one without a likeness.
    """
    if text.partition(":")[0] in VARIABLES:
        return None
    plain = text.lower()
    if match := re.fullmatch(r"([a-z]+)_?(\d+)_?(m|mb|hpa|maboveground|m_above_ground)", plain):
        short, is_height = NCEP_NAMES.get(match[1], match[1]), match[3].startswith("m") and match[3] != "mb"
        name = SHORT_NAMES.get(f"{short}{match[2]}{'m' * (short in 'td')}" if is_height else short, "")
        if name:
            return name if is_height else join_name(name, int(match[2]))
    short = NCEP_NAMES.get(plain.partition("_")[0], "")
    known = [*VARIABLES, *(short for short in SHORT_NAMES if len(short) > 3)]
    close = difflib.get_close_matches(plain, known, n=1, cutoff=0.8)
    return SHORT_NAMES.get(short) or next((SHORT_NAMES.get(name, name) for name in close), None)


def nearest_name(name: str, candidates: Sequence[str]) -> str:
    """Return the candidate most like a missing name, or all, as the end of an error: "; nearest: 'x'"."""
    wanted = full_name(name)
    meant = [candidate for candidate in candidates if known_name(candidate) == wanted]
    close = meant or difflib.get_close_matches(wanted, candidates, n=1, cutoff=0.5)
    return f"; nearest: {close[0]!r}" if close else f"; it has {format_value(list(candidates))}"
