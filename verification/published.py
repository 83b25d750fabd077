"""Scores that others have published, drawn in grey beside ours and never mixed with what is computed here.

The table is published.csv: a row a score, with grid, year and source. Grids and years differ from
ours and from each other: they say where the field stands, not who is better.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).with_name("published.csv")


@dataclass(frozen=True)
class Published:
    """One score: `value` in the variable's units."""

    forecast: str
    variable: str
    lead_hours: int
    metric: str
    value: float
    grid: str
    year: str
    source: str

    @property
    def label(self) -> str:
        """For a legend: whose it is, on which grid, of which year."""
        return f"{self.forecast}, {self.grid}, {self.year}"


def published(variable: str, metric: str) -> dict[str, list[Published]]:
    """Label -> scores of one variable ("geopotential:500") in ascending lead; empty where there are none."""
    found: dict[str, list[Published]] = {}
    with TABLE.open(newline="") as file:
        for row in csv.DictReader(file):
            number = {"lead_hours": int(row.pop("lead_hours")), "value": float(row.pop("value"))}
            score = Published(**row, **number)  # type: ignore[arg-type]
            if (score.variable, score.metric) == (variable, metric):
                found.setdefault(score.label, []).append(score)
    return {label: sorted(scores, key=lambda s: s.lead_hours) for label, scores in found.items()}
