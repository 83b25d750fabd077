"""Any centre's forecasts, as they are stored: WeatherBench2's HRES, Pangu, GraphCast, IFS ensemble, ...

Names, order of dimensions, direction of latitude and levels, and units of the lead are found from the
content, by the code that reads analyses (datasets/fields.py).
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from datasets.fields import Field
from datasets.files import ROLE_OF, OpenFile, coordinate_times, find_files
from datasets.layouts import open_fields
from datasets.plausibility import refuse_fills
from datasets.remote import NO_OPTIONS, Access
from errors import DataError
from verification.stores import NOT_COMPUTED, STATUS, FieldsByName

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


class StoredForecast(FieldsByName):
    """Forecasts of one store: initial dates `times` (n,), `leads` (L,), and a grid, north to south.

    `num_members` is 0 without an ensemble; `block` is how many dates and leads are stored together; `status`
    is the worst of the members' in a store that forecast.py writes.
    """

    caveat = ""

    def __init__(
        self,
        path: str,
        times: np.ndarray,
        leads: np.ndarray,
        fields: Sequence[Field],
        unreadable: dict[str, str],
        status: np.ndarray | None = None,
    ) -> None:
        super().__init__(path, fields, unreadable)
        self.times, self.leads = times, leads
        members = max(field.size("number") for field in fields)
        if other := next((field for field in fields if field.size("number") != members), None):
            reason = f"{other.names[0]} has {other.size('number')} members, others have {members}"
            raise DataError(f"cannot read {path!r} as forecasts: {reason}; write it for all of them")
        self.num_members = members if members > 1 else 0
        dates, lead_times = (max(field.chunk(role) for field in fields) for role in ("time", "lead"))
        self.block = dates, lead_times
        self.from_analyses = status is not None  # it fills what they lack, and is not scored there
        self.status = status

    def read_block(self, dates: slice, leads: slice, variables: Sequence[str]) -> np.ndarray:
        """Return (n, k, V, H, W), or (n, k, M, V, H, W), float32. Raises DataError for a missing variable."""
        fields = self.read_fields(variables, ("time", "lead", "number"), {"time": dates, "lead": leads})
        if not self.from_analyses:  # ours may blow up
            for time, of_date in zip(self.times[dates], fields, strict=True):
                of_variables = of_date.reshape(-1, *of_date.shape[-3:]).swapaxes(0, 1)
                refuse_fills(of_variables, variables, time, self.path)
        return fields if self.num_members else fields[:, :, 0]


def open_forecast(
    path: str, picks: Mapping[str, str] | None = None, access: Access = NO_OPTIONS
) -> StoredForecast:
    """Open forecasts in a Zarr store (folder or fsspec URL) or a NetCDF file.

    picks: name of a dimension that is no axis of forecasts -> the label of what is read of it. access: how a
    URL is read. DataError, one line naming path and reason, where there is none.
    """
    files = find_files(path)
    if len(files) > 1:
        raise DataError(
            f"{path!r} holds {len(files)} files: name one store of forecasts, such as {files[0]!r}"
        )
    found, unreadable = open_fields(files[0], picks, access, FORECAST_ROLES)
    fields = [field for field in found if "lead" in field.roles]
    if not fields:
        reason = "; ".join(f"{name}: {why}" for name, why in list(unreadable.items())[:3])
        raise DataError(
            f"cannot read {path!r} as forecasts: no variable has a lead time (prediction_timedelta) and "
            f"latitude and longitude{'; ' * bool(reason)}{reason}"
        )
    file = OpenFile.open(files[0], access)[0]
    times, leads = initial_times(file, fields[0]), lead_times(file)
    for name, axis in (("time", times), ("lead time", leads)):
        if len(axis) > 1 and not (np.diff(axis) > np.timedelta64(0, "s")).all():
            raise DataError(f"cannot read {path!r} as forecasts: its {name} does not ascend without repeats")
    return StoredForecast(path, times, leads, fields, unreadable, stored_status(file))


def stored_status(file: OpenFile) -> np.ndarray | None:
    """Return the status (n, L) of each date and lead, of an ensemble that of its worst member."""
    if STATUS not in file.arrays:
        return None
    status = np.asarray(file.fetch(STATUS), int)  # (n, L[, M])
    members = status.reshape(*status.shape[:2], -1)
    return np.where((members == NOT_COMPUTED).any(-1), NOT_COMPUTED, members.max(-1))


def initial_times(file: OpenFile, field: Field) -> np.ndarray:
    """Return initial dates (n,) datetime64[s]: the time axis, or the one date of all fields."""
    if field.times is not None:
        return field.times
    named = [name for name in file.arrays if file.role(name, ROLE_OF | FORECAST_ROLES) == "time"]
    single = [name for name in named if file.arrays[name].shape == () and name.lower() != "valid_time"]
    if not single:
        raise DataError(f"cannot read {file.path!r} as forecasts: it has no initial date")
    return np.atleast_1d(coordinate_times(file, single[0]))


def lead_times(file: OpenFile) -> np.ndarray:
    """Return leads (L,) timedelta64[s] from timedeltas, or numbers with units (hours without any)."""
    names = [name for name in file.arrays if file.role(name, ROLE_OF | FORECAST_ROLES) == "lead"]
    values, attrs = file.fetch(names[0]), file.arrays[names[0]].attrs
    if values.dtype.kind == "m":
        return np.atleast_1d(values).astype("timedelta64[s]")
    unit = str(attrs.get("units", "hours"))
    try:
        seconds = pd.Timedelta(1, unit=unit.strip().lower()).total_seconds()  # type: ignore[arg-type]
    except ValueError:
        raise DataError(f"cannot read {file.path!r}: {names[0]!r} has units {unit!r}, not 'hours'") from None
    return np.round(np.atleast_1d(values) * seconds).astype(np.int64).astype("timedelta64[s]")
