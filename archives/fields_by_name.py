"""Fields of one file by the names of their variables, with axes that analyses have not: leads and members of
forecasts, hours and days of climatologies.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from archives.stored_field import StoredField
from archives.variables import full_name, nearest_name
from errors import DataError


class FieldsByName:
    """Fields of one file with other axes than analyses have: `variables` on a `grid`, north to south.

    Can be pickled; each process opens the file itself.
    """

    def __init__(
        self, path: str, fields: Sequence[StoredField], unreadable: Mapping[str, str] | None = None
    ) -> None:
        """unreadable: name of an array -> why it is none of the fields."""
        self.path, self.unreadable, self.grid = path, dict(unreadable or {}), fields[0].orientation.grid
        self._fields = {name: (field, i) for field in fields for i, name in enumerate(field.names)}
        self.variables = list(self._fields)

    def read_fields(
        self, variables: Sequence[str], axes: Sequence[str], wanted: Mapping[str, slice]
    ) -> np.ndarray:
        """(*axes, V, H, W) float32, NaN where missing: each array is read once for all its levels.

        wanted: slices of axes, all of them otherwise. DataError for a variable that is not there.
        """
        rows: dict[StoredField, list[tuple[int, int]]] = {}
        for row, name in enumerate(variables):
            if name not in self._fields:
                why = self.unreadable.get(full_name(name).partition(":")[0])
                hint = f": {why}" if why else nearest_name(name, self.variables)
                raise DataError(f"{self.path!r} has no {name!r}{hint}")
            field, position = self._fields[name]
            rows.setdefault(field, []).append((row, position))
        out = np.empty(0, np.float32)
        for field, pairs in rows.items():
            first, last = (pick(position for _, position in pairs) for pick in (min, max))
            levels = {"level": slice(first, last + 1)}
            block = field.block((*axes, "level", "latitude", "longitude"), {**wanted, **levels})
            if not out.size:
                out = np.empty((*block.shape[:-3], len(variables), *self.grid.shape), np.float32)
            for row, position in pairs:
                out[..., row, :, :] = block[..., position - first, :, :]
        return out
