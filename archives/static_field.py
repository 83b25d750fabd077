"""A constant field of some file, on the grid of the analyses."""

from collections.abc import Mapping

import numpy as np
import torch

from archives.archive import all_fields, read_one
from archives.grid import Grid
from archives.regrid import Regridder
from archives.storage_options import NO_OPTIONS, Access
from archives.variables import nearest_name
from errors import DataError


def read_static_field(
    path: str,
    name: str,
    target: Grid,
    picks: Mapping[str, str] | None = None,
    access: Access = NO_OPTIONS,
) -> np.ndarray:
    """A field (H, W) float32 of some file, conservatively regridded if it does not lie on the target grid.

    The file need not have times; of a variable with times the first date counts. NCAR's LSMASK is read as
    "land_sea_mask": land, islands and ice shelves are 1, oceans and lakes 0. DataError where the name is not
    in the file, or the file's grid lies wholly outside the target.
    """
    fields, unreadable = all_fields(path, picks, access)
    names = [each for field in fields for each in field.names]
    location = next(((f, f.names.index(name)) for f in fields if name in f.names), None)
    if location is None:
        why = unreadable.get(name)
        raise DataError(f"{path!r} has no field {name!r}{f': {why}' if why else nearest_name(name, names)}")
    source, values = location[0].orientation.grid, read_one(*location)
    if source.same_as(target):
        return values
    regridded = Regridder(source, target)(torch.from_numpy(values)).numpy()
    if np.isnan(regridded).all():
        raise DataError(
            f"{path!r} has {name!r} nowhere on the grid wanted: latitudes {target.latitude[[0, -1]]}"
        )
    return regridded
