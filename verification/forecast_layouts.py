"""Stored forecasts of any centre: WeatherBench2's HRES, Pangu, GraphCast, IFS ensemble, ...

Names, order of dimensions, direction of latitude and levels, and units of the lead are found from the
content, by the code that reads analyses (datasets/fields.py).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from datasets.fields import Field, NamedFields
from datasets.plausibility import refuse_fills
from datasets.remote import NO_OPTIONS, Access
from datasets.source import FORECAST_ROLES, OpenFile, find_files, open_fields, open_files
from errors import DataError
from verification.stores import NOT_COMPUTED, STATUS, identity_of, state_of_files


class StoredForecast(NamedFields):
    """Forecasts of one store: initial dates `times` (n,), `leads` (L,), and a grid, north to south.

    `num_members` is 0 without an ensemble; `block`: numbers of dates and leads that are stored together;
    `status`: the worst status of the members, and `identity`: of weights and dates, in a store that
    forecast.py has written.
    """

    def __init__(
        self,
        path: str,
        fields: Sequence[Field],
        unreadable: dict[str, str],
        status: np.ndarray | None,
        identity: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(path, fields, unreadable)
        self.stored, self.identity = list(fields), identity or {}
        self.times, self.leads = np.asarray(fields[0].times), fields[0].labels["lead"]
        for name, axis in (("time", self.times), ("lead time", self.leads)):
            if not (np.diff(axis) > np.timedelta64(0, "s")).all():
                raise DataError(f"cannot read {path!r} as forecasts: its {name} does not ascend, or repeats")
        members = max(field.size("number") for field in fields)
        if other := next((field for field in fields if field.size("number") != members), None):
            reason = f"{other.names[0]} has {other.size('number')} members, others have {members}"
            raise DataError(f"cannot read {path!r} as forecasts: {reason}; write it for all of them")
        self.num_members = members if members > 1 else 0
        self.block = max(field.chunk("time") for field in fields), max(f.chunk("lead") for f in fields)
        self.from_analyses = status is not None  # it fills cells that analyses lack, and is not scored there
        self.status = status

    def read_block(self, dates: slice, leads: slice, variables: Sequence[str]) -> np.ndarray:
        """Return (n, k, V, H, W), or (n, k, M, V, H, W), float32. Raises DataError for a missing variable."""
        fields = self.read_fields(variables, ("time", "lead", "number"), {"time": dates, "lead": leads})
        if not self.from_analyses:  # ours may blow up
            for time, of_date in zip(self.times[dates], fields, strict=True):
                of_variables = of_date.reshape(-1, *of_date.shape[-3:]).swapaxes(0, 1)
                refuse_fills(of_variables, variables, time, self.path)
        return fields if self.num_members else fields[:, :, 0]

    def state(self, time: np.datetime64) -> str:
        """Return the state of the files with the forecasts from a date."""
        row = int(np.searchsorted(self.times, time))
        status = "" if self.status is None else self.status[row].tolist()
        return f"{state_of_files(self.stored, {'time': row})} {status}"


def open_forecast(
    path: str, picks: Mapping[str, str] | None = None, access: Access = NO_OPTIONS
) -> StoredForecast:
    """Open forecasts in a Zarr store (folder or fsspec URL) or a NetCDF file.

    picks: name of a dimension that is not an axis of forecasts -> label to read. access: options for URLs.
    Raises DataError, one line with path and reason, if there are no forecasts.
    """
    files = find_files(path)
    if len(files) > 1:
        raise DataError(f"{path!r} has {len(files)} files: name one store of forecasts, such as {files[0]!r}")
    opened, unreadable = open_fields(files[0], picks, access, FORECAST_ROLES)
    fields = [field for field in opened if "lead" in field.roles]
    if not fields:
        why = "".join(f"; {name}: {reason}" for name, reason in list(unreadable.items())[:3])
        axes = "a lead time (prediction_timedelta) and latitude and longitude"
        raise DataError(f"cannot read {path!r} as forecasts: no variable has {axes}{why}")
    file = open_files(files[0], access)[0]
    # Scored as if by initial date, a perfect forecast stored by valid time has large errors.
    by_both = [name for name in FORECAST_ROLES["time"] if name in file.arrays and file.arrays[name].ndim > 1]
    axis = next((f.dims[f.roles.index("time")] for f in fields if f.dims and "time" in f.roles), "")
    if by_both or axis.lower() == "valid_time":
        fix = "store them by initial date and lead, as with xarray's `ds.sel(valid_time=init_time + lead)`"
        raise DataError(f"cannot read {path!r} as forecasts: its dates {axis!r} are valid times; {fix}")
    return StoredForecast(path, fields, unreadable, stored_status(file), identity_of(file.attrs))


def stored_status(file: OpenFile) -> np.ndarray | None:
    """Return the status (n, L) of each date and lead; of an ensemble the worst of its members."""
    if STATUS not in file.arrays:
        return None
    status = np.asarray(file.fetch(STATUS), int)  # (n, L[, M])
    members = status.reshape(*status.shape[:2], -1)
    return np.where((members == NOT_COMPUTED).any(-1), NOT_COMPUTED, members.max(-1))
