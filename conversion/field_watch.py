"""A variable's fields, date after date, and what is odd about them. Shapes: H latitudes, W longitudes."""

from collections.abc import Iterator

import numpy as np

from archives.variables import OFTEN_ZERO, split_name, units
from datasets.plausibility import RANGES, undeclared_fill

Odd = tuple[str, np.datetime64, int]  # what, the first date, on how many dates
# Weather keeps its pattern over this time: of fields further apart nothing can be said.
MEMORY = np.timedelta64(36, "h")
NEARER = 0.5  # squared distance turned over, as a part of the one as it is: below this it is turned over


class FieldWatch:
    """Looks at one variable's fields in the order of their dates; `findings` are what there is to say."""

    def __init__(self, name: str) -> None:
        self.name, self.found = name, dict[str, tuple[np.datetime64, int]]()
        self.before: tuple[np.datetime64, np.ndarray] | None = None  # the last field with values
        self.missing: list[int] = []
        self.dates: list[np.datetime64] = []
        self.turns: list[tuple[np.datetime64, int]] = []  # 1: other way up than before; -1: nobody knows

    def look(self, field: np.ndarray, date: np.datetime64) -> None:
        """field (H, W) float32, NaN where missing."""
        fill = undeclared_fill(field[np.isfinite(field)], self.name)
        if fill is not None:
            self._count(f"{fill:g}, a missing value that nothing declares", date)
            field = np.where(field == fill, np.nan, field)
        self._count("infinite values", date, bool(np.isinf(field).any()))
        finite = field[np.isfinite(field)]
        if not len(finite):
            self._count("no value at all", date)
            return
        self.dates.append(date)
        self.missing.append(int(np.isnan(field).sum()))
        self._range(finite, date)
        self._compare(field, finite, date)

    def _count(self, what: str, date: np.datetime64, odd: bool = True) -> None:
        if odd:
            first, count = self.found.get(what, (date, 0))
            self.found[what] = first, count + 1

    def _range(self, finite: np.ndarray, date: np.datetime64) -> None:
        low, high = RANGES.get(split_name(self.name)[0], (-np.inf, np.inf))
        outside = bool(((finite < low) | (finite > high)).any())
        self._count(f"values outside {low:g} to {high:g} {units(self.name)}", date, outside)

    def _compare(self, field: np.ndarray, finite: np.ndarray, date: np.datetime64) -> None:
        """With itself and with the date before."""
        constant = len(finite) > 1 and finite.min() == finite.max()
        often = split_name(self.name)[0] in OFTEN_ZERO
        self._count("one value everywhere", date, constant and not often)
        turn = -1
        if self.before and date - self.before[0] <= MEMORY and not constant:
            same = np.array_equal(field, self.before[1], equal_nan=True)
            self._count("the same field as on the date before", date, same and not often)
            turn = is_turned(self.before[1], field)
        self.turns.append((date, turn))
        if not constant:
            self.before = date, field

    def findings(self) -> Iterator[Odd]:
        for what, (first, count) in self.found.items():
            yield what, first, count
        turned = upside_down(self.turns)
        if turned:
            yield "upside down: south lies where north does on other dates", turned[0], len(turned)
        some = np.array(self.missing, int)  # of the dates that have a value at all
        usual = int(np.bincount(some).argmax()) if len(some) else 0
        other = np.flatnonzero(some != usual)
        if len(other):
            what = f"other cells without a value than on most dates ({some[other[0]]}, not {usual})"
            yield what, self.dates[other[0]], len(other)


def is_turned(before: np.ndarray, field: np.ndarray) -> int:
    """Whether a field (H, W) lies much nearer to the one before when its rows are turned over; -1: a field
    that is alike both ways.
    """
    distances = [_distance(before, each) for each in (field, field[::-1])]
    if not np.isfinite(distances).all() or max(distances) == 0:
        return -1
    return int(distances[1] < NEARER * distances[0])


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    """Mean squared, over the cells that both have."""
    both = np.isfinite(one) & np.isfinite(other)
    if not both.any():
        return np.nan
    return float(np.mean((one[both].astype(np.float64) - other[both]) ** 2))


def upside_down(turns: list[tuple[np.datetime64, int]]) -> list[np.datetime64]:
    """The dates on which a field lies the way up that fewer dates have, in each stretch without a gap."""
    found: list[np.datetime64] = []
    stretch: list[tuple[np.datetime64, int]] = []  # date, which way up
    for date, turn in [*turns, (np.datetime64("NaT"), -1)]:
        if turn < 0:
            found += _fewer(stretch)
            stretch = [(date, 0)]
        else:
            stretch.append((date, stretch[-1][1] ^ turn))
    return found


def _fewer(stretch: list[tuple[np.datetime64, int]]) -> list[np.datetime64]:
    turned = [date for date, way in stretch if way]
    upright = [date for date, way in stretch if not way]
    return turned if len(turned) <= len(upright) else upright
