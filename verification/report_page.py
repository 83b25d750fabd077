"""A report of a run as one HTML file that needs nothing else.

    .venv/bin/python -m verification.report_page outputs/demo

--output FILE    (default: report.html in the run's folder)

The plots of train.py and evaluate.py that the folder has, starts and configuration. Exit codes: 0, 2 bad
input.
"""

import base64
import sys
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
from jinja2 import Environment, FileSystemLoader

from command_line import own_options, split_options
from errors import ConfigError, DataError, one_line_errors
from jobs.durable_files import write_durably
from jobs.journal import read_records

OPTIONS = own_options(output="")
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
        raise DataError(f"--output {output}: {error.strerror}; name another file") from None


def main(argv: list[str]) -> None:
    if {"--help", "-h"} & set(argv):
        print(__doc__)
        return
    with one_line_errors():
        options, names = split_options(argv, OPTIONS)
        if len(names) != 1 or names[0].startswith("-"):
            raise ConfigError(f"report_page {' '.join(names)}: name a run's folder, such as outputs/demo")
        target = Path(options.output or Path(names[0]) / "report.html")
        write_page(Path(names[0]), target)
        print(f"written: {target}")


if __name__ == "__main__":
    main(sys.argv[1:])
