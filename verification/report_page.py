"""Report of a run as a single HTML file without dependencies.

    .venv/bin/python -m verification.report_page outputs/demo

It writes report.html into the run's folder: the scores of evaluate.py, or those of the last validation, the
plots of train.py and evaluate.py that are there, starts and configuration. Exit codes: 0, 2 bad input.
"""

from jobs.signals import end_at_signals

if __name__ == "__main__":
    end_at_signals()

import base64
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import xarray as xr
from jinja2 import Environment, FileSystemLoader

from errors import ConfigError, DataError, one_line_errors
from jobs.durable_files import read_records, write_durably
from verification.tables import describe_dates, tables_of

# File in the run's folder -> its caption; in the order of the page.
PLOTS = {
    "evaluation/rmse.png": "Root-mean-square error of the evaluation against the lead time",
    "evaluation/maps.png": "Truth, forecast and error of the evaluation",
    "evaluation/spectra.png": "Zonal energy spectra, mean over 30 to 60 degrees north and south",
    "plots/loss.png": "Loss of training and validation",
    "plots/rmse.png": "Root-mean-square error of the last validation against the lead time",
    "plots/maps.png": "Truth, forecast and error of the last validation",
}


def write_page(folder: Path, output: Path) -> None:
    """Raise DataError if the folder is no run's, nothing was logged, or the page cannot be written."""
    config, records = folder / "config.toml", read_records(folder / "metrics.jsonl")
    if not records or not config.exists():
        raise DataError(f"{folder}: no config.toml or no line in metrics.jsonl; name the folder of a run")
    tables, scorecard = list[pd.DataFrame](), folder / "evaluation/scorecard.html"
    if (folder / "evaluation/scores.nc").exists():
        options: dict[str, Any] = {"engine": "h5netcdf", "decode_timedelta": True}
        scores = xr.load_dataset(folder / "evaluation/scores.nc", **options)
        dates = describe_dates(scores.isel(forecast=0))
        tables += tables_of(scores, f"evaluation of {scores.attrs.get('scored', 'forecasts')}: {dates}")
    # The RMSE of the last validation, by variable and lead.
    if validations := [record for record in records if "val/loss" in record]:
        rows: dict[tuple[str, str], dict[str, Any]] = {}
        for key, value in validations[-1].items():
            if match := re.fullmatch(r"val/rmse(?:_(\w+))?/(.+?)(?:@(\d+)h)?", key):
                name, variable, hours = match.groups()
                lead = f"{hours} h" if hours else "first lead"
                row = rows.setdefault((variable, lead), {"RMSE": variable, "lead": lead})
                row[(name or "model").replace("_", " ")] = value
        tables.append(pd.DataFrame(rows.values()))
        title = f"root-mean-square error, validation of step {validations[-1]['step']}"
        tables[-1].attrs["title"] = title
    # -- one file with everything in it, so that it can be sent
    pictures = {caption: folder / name for name, caption in PLOTS.items() if (folder / name).exists()}
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    page = environment.get_template("report_page.html").render(
        title=folder.resolve().name,
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        command=f".venv/bin/python -m verification.report_page {folder}",
        steps=max(record["step"] for record in records),
        tables=tables,
        scorecard=scorecard.read_text() if scorecard.exists() else "",
        starts=pd.DataFrame(read_records(folder / "starts.jsonl")),
        pictures={c: base64.b64encode(path.read_bytes()).decode() for c, path in pictures.items()},
        config=config.read_text(),
    )
    try:
        write_durably(output, page)
    except OSError as error:
        raise DataError(f"{output}: cannot be written: {error.strerror}") from None


def main(argv: list[str]) -> None:
    if {"--help", "-h"} & set(argv):
        print(__doc__)
        return
    with one_line_errors():
        if len(argv) != 1 or argv[0].startswith("-"):
            raise ConfigError(f"report_page {' '.join(argv)}: name a run's folder, such as outputs/demo")
        target = Path(argv[0]) / "report.html"
        write_page(Path(argv[0]), target)
        print(f"written: {target}")


if __name__ == "__main__":
    main(sys.argv[1:])
