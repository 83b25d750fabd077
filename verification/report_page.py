"""A run's report as one page that needs nothing else: open it in a browser, send it around.

    .venv/bin/python -m verification.report_page outputs/demo                     one run
    .venv/bin/python -m verification.report_page outputs/demo outputs/other       side by side

--output FILE    (default: report.html in the first run's folder)
--cluster NAME   a machine whose price counts, plan.py's names (default: the one that the run was on)

What ran, curves, scores beside baselines, spectra, a forecast, time, restarts, cost: as far as the folders
have them. forecast.py and evaluate.py make what is missing. Exit codes: 0, 2 bad input.
"""

import sys
from datetime import UTC, datetime
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from command_line import own_options, split_options
from errors import ConfigError, one_line_errors
from jobs.durable_files import write_durably
from planning.clusters import load_cluster
from reports.run import open_runs
from reports.sections import sections

TEMPLATES = Path(__file__).parent.parent / "reports"
OPTIONS = own_options(output="", cluster="")


def write_page(folders: list[Path], output: Path, cluster: str = "") -> None:
    """DataError: a folder is no run's, or stands twice. ConfigError: no such cluster."""
    if cluster:
        load_cluster(cluster)
    runs = open_runs(folders)
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True)
    page = environment.get_template("page.html").render(
        title=" and ".join(run.name for run in runs),
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        sections=sections(runs, cluster),
    )
    write_durably(output, page)


def main(argv: list[str]) -> None:
    if {"--help", "-h"} & set(argv):
        print(__doc__)
        return
    with one_line_errors():
        options, names = split_options(argv, OPTIONS)
        if unknown := [name for name in names if name.startswith("-")]:
            raise ConfigError(f"report_page: {unknown[0]}: no such option; see --help")
        if not names:
            raise ConfigError("report_page: name a run's folder, such as outputs/demo")
        folders = [Path(name) for name in names]
        target = Path(options.output or folders[0] / "report.html")
        write_page(folders, target, options.cluster)
        print(f"written: {target}")


if __name__ == "__main__":
    main(sys.argv[1:])
