"""Any centre's forecasts, as they lie on disk: WeatherBench2's HRES, Pangu, GraphCast, IFS ensemble, ...

They differ in names (`lat`, `prediction_timedelta` or `step`, `number` or `realization`), order of
dimensions, direction of latitude and levels, units of the lead, precision of coordinates, and whether there
is a lead of 0 h. All of it is found out from the content, by the code that reads analyses
(datasets/layouts.py).
"""

from collections.abc import Sequence

import numpy as np

from datasets.era5 import find_files
from datasets.files import StoredFile, open_file
from datasets.grid import Grid
from datasets.layouts import StoredField, coordinate_role, coordinate_times, durations, stored_fields
from datasets.variables import nearest_name
from errors import DataError

FORECAST_ROLES = {
    "prediction_timedelta": "lead",
    "lead_time": "lead",
    "forecast_period": "lead",
    "step": "lead",
    "number": "number",
    "realization": "number",
    "member": "number",
    "ensemble": "number",
    "init_time": "time",
    "initial_time": "time",
    "forecast_reference_time": "time",
}
AXES = ("time", "lead", "number", "level", "latitude", "longitude")


class StoredForecast:
    """Forecasts of one store: initial dates `times` (n,), `leads` (L,), and a grid, north to south.

    `num_members` is 0 without an ensemble; `block` is how many dates and leads are stored together. Fields
    come as float32, NaN where missing. Can be pickled; each process opens the file itself.
    """

    def __init__(
        self,
        path: str,
        times: np.ndarray,
        leads: np.ndarray,
        fields: Sequence[StoredField],
        why: dict[str, str],
    ) -> None:
        self.path, self.times, self.leads, self.unreadable = path, times, leads, why
        self.grid: Grid = fields[0].orientation.grid
        self._places = {name: (field, i) for field in fields for i, name in enumerate(field.names)}
        self.variables = list(self._places)
        members = max(axis_size(field, "number") for field in fields)
        self.num_members = members if members > 1 else 0
        dates, lead_times = (max(field.chunk(role) for field in fields) for role in ("time", "lead"))
        self.block = dates, lead_times

    def __repr__(self) -> str:
        hours = self.leads.astype(int) // 3600
        members = f", {self.num_members} members" if self.num_members else ""
        return (
            f"StoredForecast({self.path!r}: {len(self.times)} dates {self.times[0]} .. {self.times[-1]}, "
            f"leads {hours[0]} .. {hours[-1]} h, grid {self.grid.shape}, "
            f"{len(self.variables)} variables{members})"
        )

    def read(self, date: int, lead: int, variables: Sequence[str]) -> np.ndarray:
        """Fields (V, H, W), or (M, V, H, W) of an ensemble, of one initial date and lead by their places."""
        return self.read_block(slice(date, date + 1), slice(lead, lead + 1), variables)[0, 0]

    def read_block(self, dates: slice, leads: slice, variables: Sequence[str]) -> np.ndarray:
        """(n, k, V, H, W), or (n, k, M, V, H, W), float32: each array is read once for all its levels.

        DataError for a variable that is not there.
        """
        count = (dates.stop - dates.start, leads.stop - leads.start, max(1, self.num_members))
        out = np.empty((*count, len(variables), *self.grid.shape), np.float32)
        wanted: dict[StoredField, list[tuple[int, int]]] = {}
        for row, name in enumerate(variables):
            field, position = self._place(name)
            wanted.setdefault(field, []).append((row, position))
        for field, pairs in wanted.items():
            first = min(position for _, position in pairs)
            levels = slice(first, max(position for _, position in pairs) + 1)
            block = field.block(AXES, {"time": dates, "lead": leads, "level": levels})
            for row, position in pairs:
                out[:, :, :, row] = block[:, :, :, position - first]
        return out if self.num_members else out[:, :, 0]

    def _place(self, name: str) -> tuple[StoredField, int]:
        if name not in self._places:
            why = self.unreadable.get(name.partition(":")[0])
            hint = f": {why}" if why else nearest_name(name, self.variables)
            raise DataError(f"{self.path!r} has no forecast of {name!r}{hint}")
        return self._places[name]


def open_forecast(path: str) -> StoredForecast:
    """Open forecasts in a Zarr store (folder or fsspec URL) or a NetCDF file.

    DataError, one line naming path and reason, where there is none.
    """
    files = find_files(path)
    if len(files) > 1:
        raise DataError(
            f"{path!r} holds {len(files)} files: name one store of forecasts, such as {files[0]!r}"
        )
    file = open_file(files[0])
    found, unreadable = stored_fields(file, FORECAST_ROLES)
    fields = [field for field in found if "lead" in field.roles]
    if not fields:
        reason = "; ".join(f"{name}: {why}" for name, why in list(unreadable.items())[:3])
        raise DataError(
            f"cannot read {path!r} as forecasts: no variable has a lead time (prediction_timedelta) beside "
            f"latitude and longitude{'; ' * bool(reason)}{reason}"
        )
    times, leads = initial_times(file, fields[0]), lead_times(file)
    for name, axis in (("time", times), ("lead time", leads)):
        if len(axis) > 1 and not (np.diff(axis) > np.timedelta64(0, "s")).all():
            raise DataError(f"cannot read {path!r} as forecasts: its {name} does not ascend without repeats")
    return StoredForecast(path, times, leads, fields, unreadable)


def axis_size(field: StoredField, role: str) -> int:
    """Size of an axis of a field; 1 where it has none."""
    return field.file.arrays[field.array].shape[field.roles.index(role)] if role in field.roles else 1


def initial_times(file: StoredFile, field: StoredField) -> np.ndarray:
    """Initial dates (n,) datetime64[s]: the time axis, or one date that all fields share."""
    if field.times is not None:
        return field.times
    shared = [name for name in file.arrays if coordinate_role(file, name, FORECAST_ROLES) == "time"]
    single = [name for name in shared if file.arrays[name].shape == () and name.lower() != "valid_time"]
    if not single:
        raise DataError(f"cannot read {file.path!r} as forecasts: it has no initial date")
    return np.atleast_1d(coordinate_times(file, single[0]))


def lead_times(file: StoredFile) -> np.ndarray:
    """Leads (L,) timedelta64[s] from timedeltas, or numbers with units; without units they are hours."""
    names = [name for name in file.arrays if coordinate_role(file, name, FORECAST_ROLES) == "lead"]
    values, attrs = file.fetch(names[0]), file.arrays[names[0]].attrs
    if values.dtype.kind == "m":
        return np.atleast_1d(values).astype("timedelta64[s]")
    try:
        return durations(np.atleast_1d(values), str(attrs.get("units", "hours")))
    except DataError as error:
        raise DataError(f"cannot read {file.path!r}: {names[0]!r}: {error}") from None
