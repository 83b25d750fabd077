"""The tests on several versions of torch and Python, side by side.

    benchmarks/torch_versions.sh [--torch 2.11.0,2.12.1,2.13.0] [--python 3.11,3.12] [words for pytest]

Each pair has an environment of its own in outputs/torch_versions, from requirements.txt with another torch,
which later runs find there. Prints one table last, and the names of tests that failed; a row is recorded as
soon as its tests have ended. Ends with 1 when a test failed.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.results_file import record
from command_line import text_table

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "outputs" / "torch_versions"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch", default="2.11.0,2.12.1,2.13.0", help="versions, with commas between them")
    parser.add_argument("--python", default="3.11,3.12", help="versions, with commas between them")
    options, words = parser.parse_known_args()
    rows = []
    for python in options.python.split(","):
        for torch in options.torch.split(","):
            print(f"== torch {torch}, Python {python}", flush=True)
            interpreter = environment(python, torch)
            rows.append(
                run_tests(interpreter, words) if interpreter else {"failed": 0, "reason": "no Python"}
            )
            rows[-1] |= {"tested_torch": torch, "tested_python": python, "words": words}
            if interpreter:
                record("torch_versions", rows[-1:])
    print(f"\n{table(rows)}")
    return 1 if any(row["failed"] for row in rows) else 0


def environment(python: str, torch: str) -> Path | None:
    """Its interpreter; None: this Python is not on the machine. CalledProcessError: what pip says."""
    base, folder = shutil.which(f"python{python}"), FOLDER / f"python-{python}-torch-{torch}"
    interpreter, done = folder / "bin" / "python", folder / "installed.txt"
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    pinned = [f"torch=={torch}" if line.startswith("torch==") else line for line in lines]
    wanted = "\n".join(pinned) + "\n"
    if done.exists() and done.read_text(encoding="utf-8") == wanted:
        return interpreter
    if not base or subprocess.run([base, "--version"], capture_output=True).returncode:
        return None  # or a shim of a version that is not chosen
    subprocess.run([base, "-m", "venv", "--clear", str(folder)], check=True)
    requirements = folder / "requirements.txt"
    requirements.write_text(wanted, encoding="utf-8")
    subprocess.run([interpreter, "-m", "pip", "install", "--quiet", "-r", str(requirements)], check=True)
    done.write_text(wanted, encoding="utf-8")
    return interpreter


def run_tests(interpreter: Path, words: list[str]) -> dict[str, Any]:
    """Counts, seconds, and which failed."""
    report, started = interpreter.parent.parent / "report.xml", time.perf_counter()
    report.unlink(missing_ok=True)
    command = ["./run_tests.sh", f"--junitxml={report}", *words]
    ended = subprocess.run(command, cwd=ROOT, env=os.environ | {"ROSSBY_PYTHON": str(interpreter)})
    cases = list(ET.parse(report).getroot().iter("testcase")) if report.exists() else []
    if ended.returncode not in (0, 1) or not cases:
        name = f"pytest itself, exit code {ended.returncode}"
        return {"failed": 1, "names": [name], "seconds": time.perf_counter() - started}
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {
        "passed": len(cases) - len(bad) - skipped,
        "skipped": skipped,
        "failed": len(bad),
        "names": [f"{case.get('classname')}: {case.get('name')}" for case in bad],
        "seconds": time.perf_counter() - started,
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines: list[tuple[object, ...]] = [("torch", "Python", "passed", "skipped", "failed", "s")]
    for row in rows:
        counts = [row.get(key, row.get("reason", "")) for key in ("passed", "skipped", "failed")]
        lines.append((row["tested_torch"], row["tested_python"], *counts, round(row.get("seconds", 0))))
    names = [
        f"failed with torch {row['tested_torch']}: {name}" for row in rows for name in row.get("names", [])
    ]
    return "\n".join([text_table("<8 >8 >10 >9 >8 >7", lines), *names])


if __name__ == "__main__":
    sys.exit(main())
