"""What a run conserves: built from the names of quantities and the statistics of its variables."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from config import Training
from datasets.normalization import Normalizer
from datasets.statistics import Statistics
from errors import DataError
from losses.conservation import FREE, Cells, Kept, Squares
from losses.quantities import coefficients, corrected, squares_of, terms_of, variables_of
from models.conservation import ConservationProjection, correction
from models.weather_model import WeatherModel
from parallelisms.parallelize import ParallelModel


def build_conservation(
    quantities: Sequence[str], variables: Sequence[str], statistics: Statistics, area: np.ndarray
) -> ConservationProjection | None:
    """Of outputs, changes in units of their standard deviations; area (H,)."""
    if not quantities:
        return None
    names = variables_of(quantities, variables)
    deviations = dict(zip(variables, statistics.change_std, strict=True))
    rows = [names.index(corrected(quantity, variables)) for quantity in quantities]
    matrix = correction(coefficients(quantities, deviations), rows)
    return ConservationProjection([variables.index(name) for name in names], matrix, area)


def refuse_missing(quantities: Sequence[str], variables: Sequence[str], statistics: Statistics) -> None:
    """DataError: on some dates a variable has no value in a part of the cells: no mean is that of all."""
    missing, cells = statistics.missing, statistics.mean_field[0].size
    if missing is None:
        return  # of a forecast, whose training has passed this
    squared = (name for quantity in quantities for name in squares_of(quantity, variables))
    for name in [*variables_of(quantities, variables), *squared]:
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
    used = [variables.index(name) for name in variables_of(training.conserve, variables)]
    cells = Cells.of(area, used, num, geometry, model.shards)
    deviations = (normalizer.change_scale * normalizer.std).flatten().tolist()
    changes = dict(zip(variables, deviations, strict=True))
    table = torch.from_numpy(coefficients(training.conserve, changes)).to(area.device)
    samples = training.local_batch_size * training.members
    squares = build_squares(training.conserve, changes, normalizer)
    return Kept(cells, None, table, training.conserve_weight, samples, squares)


def build_squares(
    quantities: Sequence[str], change_std: dict[str, float], normalizer: Normalizer
) -> Squares | None:
    """Of the one quantity that has some; in units of its linear terms, as losses.quantities.coefficients."""
    variables = list(change_std)
    for row, quantity in enumerate(quantities):
        if terms := squares_of(quantity, variables):
            first = corrected(quantity, variables)
            unit = terms_of(quantity, variables)[first] * change_std[first]
            used = [variables.index(name) for name in terms]
            mean, std = (tensor.flatten().tolist() for tensor in (normalizer.mean, normalizer.std))
            return Squares(
                row,
                used,
                [mean[index] for index in used],
                [std[index] for index in used],
                [change_std[name] for name in terms],
                [factor / unit for factor in terms.values()],
            )
    return None
