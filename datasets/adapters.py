"""Layouts without named axes: the HDF5 of the NERSC tutorial, and the Zarr of anemoi-datasets."""

import re
from collections.abc import Mapping

import numpy as np

from datasets.fields import Decoding, Field, find_orientation
from datasets.files import OpenFile, check_dims, decode_times, select_position
from datasets.variables import full_name
from errors import DataError

# The channels of the tutorial's `fields`, in FourCastNet's order (Pathak et al. 2022).
FOURCASTNET = (
    "u10 v10 t2m sp msl t850 u1000 v1000 z1000 u850 v850 z850 u500 v500 z500 t500 z50 r500 r850 tcwv"
)


def channel_name(text: str) -> str:
    """Return the WeatherBench2 name of a channel; a bare z is the surface's geopotential."""
    return "geopotential_at_surface" if text == "z" else full_name(text)


def open_tutorial(file: OpenFile) -> list[Field]:
    """Return the field of a yearly file: fields[time, channel, latitude, longitude], without coordinates.

    Times are 6-hourly from 1 January of the year in the file's name. Twenty channels are FourCastNet's. Rows
    are evenly spaced as in ERA5 without its last row (90, 90 - 180/H, ...); an odd number of rows reaches
    both poles.
    """
    year = re.search(r"(\d{4})\.\w+$", file.path)
    if not year:
        raise DataError("its name does not end in the year (2016.h5), and it has no dates inside")
    num_times, num_channels, num_rows, num_columns = file.arrays["fields"].shape
    times = np.datetime64(f"{year[1]}-01-01", "s") + 6 * np.arange(num_times) * np.timedelta64(3600, "s")
    labels = FOURCASTNET.split() if num_channels == 20 else [f"channel_{i}" for i in range(num_channels)]
    latitude = 90 - np.arange(num_rows) * 180 / (num_rows - num_rows % 2)
    orientation = find_orientation(latitude, np.arange(num_columns) * 360 / num_columns)
    names, roles = tuple(map(channel_name, labels)), ("time", "level", "latitude", "longitude")
    own = (orientation, Decoding(), "", roles, file.chunks("fields"))
    return [Field(file.path, "fields", file.raw_array("fields"), names, roles, times, *own)]


def open_anemoi(file: OpenFile, selection: Mapping[str, str]) -> list[Field]:
    """Return the field data(time, variable, ensemble, cell); its cells are a regular grid row by row."""
    shape, data = tuple(file.attrs.get("field_shape", ())), file.arrays["data"]
    if len(shape) != 2:
        raise DataError(f"its data have field_shape {shape}: not rows and columns of a grid")
    roles, ensemble = ("time", "level", "", "cell"), str(data.dims[2])
    selected = {2: select_position(file, data, 2, selection)} if ensemble in selection else {}
    check_dims(file, data, roles, selected)
    latitude, longitude = (file.fetch(name).reshape(shape) for name in ("latitudes", "longitudes"))
    orientation = find_orientation(latitude[:, 0], longitude[0])
    names, times = tuple(map(channel_name, file.attrs["variables"])), decode_times(file.arrays["dates"])
    own = (orientation, Decoding(), "", tuple(map(str, data.dims)), file.chunks("data"), selected)
    return [Field(file.path, "data", file.raw_array("data"), names, roles, times, *own)]
