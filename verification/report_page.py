"""Report of a run as a single HTML file without dependencies.

    .venv/bin/python -m verification.report_page outputs/demo

It writes report.html into the run's folder: the plots of train.py and evaluate.py that are there, starts and
configuration. Exit codes: 0, 2 bad input.
"""

import base64
import sys
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
from jinja2 import Environment, FileSystemLoader

from errors import ConfigError, DataError, one_line_errors
from jobs.durable_files import write_durably
from jobs.journal import read_records

PLOTS = ("plots/*.png", "evaluation/*.png")


def write_page(folder: Path, output: Path) -> None:
    """Raise DataError if the folder is no run's, nothing was logged, or the page cannot be written."""
    config, records = folder / "config.toml", read_records(folder / "metrics.jsonl")
    if not records or not config.exists():
        raise DataError(f"{folder}: no config.toml or no line in metrics.jsonl; name the folder of a run")
    pictures = [path for pattern in PLOTS for path in sorted(folder.glob(pattern))]
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    page = environment.get_template("report_page.html").render(
        title=folder.resolve().name,
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        steps=max(record["step"] for record in records),
        starts=pd.DataFrame(read_records(folder / "starts.jsonl")).to_html(index=False),
        pictures=[(path.stem, base64.b64encode(path.read_bytes()).decode()) for path in pictures],
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
