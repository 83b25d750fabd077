"""What a run conserves: built from the names of quantities and the statistics of its variables."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from config import Training
from datasets.normalization import Normalizer
from datasets.statistics import Statistics
from errors import DataError
from losses.conservation import FREE, Cells, Kept
from losses.quantities import coefficients, corrected, variables_of
from models.build import WeatherModel
from models.conservation import Conservation, correction
from parallelisms.parallelize import ParallelModel


def build_conservation(
    quantities: Sequence[str], variables: Sequence[str], statistics: Statistics, area: np.ndarray
) -> Conservation | None:
    """Of outputs, changes in units of their standard deviations; area (H,)."""
    if not quantities:
        return None
    names = variables_of(quantities)
    deviations = dict(zip(variables, statistics.change_std, strict=True))
    rows = [names.index(corrected(quantity)) for quantity in quantities]
    matrix = correction(coefficients(quantities, deviations), rows)
    return Conservation([variables.index(name) for name in names], matrix, area)


def refuse_missing(quantities: Sequence[str], variables: Sequence[str], statistics: Statistics) -> None:
    """DataError: on some dates a variable has no value in a part of the cells: no mean is that of all."""
    if statistics.sums is None:
        return  # of a forecast, whose training has passed this
    missing, cells = statistics.sums.table("missing"), statistics.mean_field[0].size
    for name in variables_of(quantities):
        counts = missing[:, variables.index(name)]
        if number := int(((counts > 0) & (counts < cells)).sum()):
            reason = f"{name} has no value in some cells on {number} of {len(counts)} dates"
            raise DataError(f"conserve = {list(quantities)}: {reason}; leave it out, or fill these cells")


def build_kept(
    training: Training,
    variables: Sequence[str],
    area: Tensor,
    normalizer: Normalizer,
    geometry: WeatherModel,
    model: ParallelModel,
) -> Kept:
    """The same in the loss of a rank's shard of a batch; area (H,)."""
    held, num = normalizer.conservation, len(normalizer.mean)
    if held:
        return Kept(Cells.of(area, held.used, num, geometry, model.shards), held.correction)
    if not training.conserve:
        return FREE
    used = [variables.index(name) for name in variables_of(training.conserve)]
    cells = Cells.of(area, used, num, geometry, model.shards)
    deviations = (normalizer.change_scale * normalizer.std).flatten().tolist()
    found = coefficients(training.conserve, dict(zip(variables, deviations, strict=True)))
    table = torch.from_numpy(found).to(area.device)
    return Kept(cells, None, table, training.conserve_weight, training.local_batch_size * training.members)
