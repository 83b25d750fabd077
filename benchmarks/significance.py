"""False positives of the scorecard's test, on two equally good forecasts.

    .venv/bin/python benchmarks/significance.py [--draws 1000]

The difference of their errors is an AR(1) series around 0, twice a day. A row for each length and time of
decorrelation: the share of series that are marked at 5 %. Ends with 1 when it is above 12 % for 60 days, or
above 8 % for a year.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np

from benchmarks.results_file import parse, record, require, table
from verification.tables import differs_from_0

PER_DAY = 2
MOST = {60: 0.12, 365: 0.08}  # days -> share


def main() -> int:
    options, rows, rng = parse(__doc__, draws=1000), [], np.random.default_rng(0)
    require(options.draws, 1, "draws")
    for days, most in MOST.items():
        for decorrelation in (1, 2, 5):  # days, after which the correlation is 1 / e
            factor = np.exp(-1 / (decorrelation * PER_DAY))
            series = rng.normal(size=(options.draws, days * PER_DAY))
            for i in range(1, days * PER_DAY):
                series[:, i] = factor * series[:, i - 1] + np.sqrt(1 - factor**2) * series[:, i]
            marked = float(differs_from_0(series).mean())
            rows.append({"days": days, "decorrelation": decorrelation, "marked": marked, "asked": most})
    record("significance", rows)
    print(table(rows, "days", "decorrelation", "marked", "asked"))
    return int(any(row["marked"] > row["asked"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
