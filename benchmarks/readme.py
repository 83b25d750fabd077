"""Writes into README.md what the demo shows: six rows of its scores, and its plots into docs/.

./run_train.sh && .venv/bin/python benchmarks/readme.py [--run outputs/demo]
"""

import argparse
import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from datasets.variables import units

ROWS = [("geopotential:300", hours) for hours in (6, 24, 72)]
ROWS += [("u_component_of_wind:850", hours) for hours in (6, 24, 72)]
COLUMNS = {"model": "", "persistence": "_persistence", "damped persistence": "_damped_persistence"}
COLUMNS |= {"training mean": "_training_mean"}
PLOTS = {"rmse.png": "demo_rmse.png", "maps.png": "demo_maps.png"}
BLOCK = re.compile(r"(<!-- demo: .*? -->\n).*?(<!-- end -->)", re.DOTALL)


def table(record: dict[str, float]) -> str:
    """RMSE over the validation period, in the variable's units."""
    lines = [f"| RMSE | lead | {' | '.join(COLUMNS)} | |", "|---|---|" + "---|" * len(COLUMNS) + "---|"]
    for variable, hours in ROWS:
        suffix = "" if hours == 6 else f"@{hours}h"
        values = [record[f"val/rmse{kind}/{variable}{suffix}"] for kind in COLUMNS.values()]
        cells = " | ".join(f"{value:.4g}" for value in values)
        lines.append(f"| {variable} | {hours} h | {cells} | {units(variable)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=ROOT / "outputs/demo")
    run = parser.parse_args().run
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    last = [record for record in records if "val/loss" in record][-1]
    readme = ROOT / "README.md"
    text, number = BLOCK.subn(lambda m: m[1] + table(last) + m[2], readme.read_text())
    assert number == 1, "README.md: the marks <!-- demo: ... --> and <!-- end --> are gone"
    readme.write_text(text)
    for source, target in PLOTS.items():
        shutil.copy(run / "plots" / source, ROOT / "docs" / target)
    print(table(last), end="")


if __name__ == "__main__":
    main()
