"""Adapters against training from nothing on the dates after those of the base run, at no less time.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/lora.py [--seeds 3] [--base FOLDER]

Trains train_configs/gfs_winds_vit.toml once (`--base`: takes that run, which has ended), then for each seed
gfs_winds_lora.toml as it stands, the same week and steps from nothing, and from the base with all weights
training, both with the base's learning rate. A step from nothing costs more than one of adapters, so that
equal steps are no less time: processor seconds are those of each process, with its start and its validation,
which are alike. The score is the RMSE at 6 h over damped persistence's, the mean of both winds, on dates
that no run has seen. Ends with 1 where adapters do not beat training from nothing, or take longer, or more
than 2 % of the parameters train.
"""

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.results_file import record
from command_line import text_table

ROOT = Path(__file__).parent.parent
WINDS = ("10m_u_component_of_wind", "10m_v_component_of_wind")
OPTIONS = ["--metrics.enable_tensorboard=false", "--validation.plots=false", "--validation.lead_hours=[6]"]
PLAIN = ["--lora.enable=false", "--optimizer.lr=1e-3"]
CHOICES = {
    "adapters": [],
    "from nothing": [*PLAIN, "--checkpoint.initial_load_path="],
    "all weights": PLAIN,
}
TRAIN = re.compile(r"LoRA: ([\d,]+) of ([\d,]+) parameters")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--base", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        base = options.base.absolute() if options.base else Path(folder) / "base"
        if not options.base:
            train("gfs_winds_vit", base, [])
        for seed in range(options.seeds):
            for number, (choice, changes) in enumerate(CHOICES.items()):
                own = [f"--training.seed={seed}", f"--checkpoint.initial_load_path={base}", *changes]
                found = train("gfs_winds_lora", Path(folder) / f"{seed}-{number}", own)
                rows.append({"choice": choice, "seed": seed, **found})
                print(rows[-1], flush=True)
        rows.append({**rows[0], **unchanged(base, rows[0]["damped"])})
    record("lora", rows)
    print(table(rows))
    return judge(rows)


def train(config: str, folder: Path, changes: list[str]) -> dict:
    """One run in a process of its own: its score, what it cost, and how much of it trained."""
    command = [sys.executable, "train.py", "--job.config_file", f"train_configs/{config}.toml", *OPTIONS]
    command += ["--job.dump_folder", str(folder), *without_repeats(changes)]
    before = processor_seconds()
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    said = TRAIN.search(done.stdout + done.stderr)
    some, every = (int(number.replace(",", "")) for number in said.groups()) if said else (1, 1)
    own, damped = errors(records[-1], "rmse"), errors(records[-1], "rmse_damped_persistence")
    return {
        "score": score(own, damped),
        "rmse": own,
        "damped": damped,
        "seconds": processor_seconds() - before,
        "steps": max(each["step"] for each in records),
        "trained": some / every,
        "threads": os.environ.get("OMP_NUM_THREADS", ""),
    }


def without_repeats(changes: list[str]) -> list[str]:
    """The last value of a key counts."""
    return [f"{key}={value}" for key, value in dict(change.split("=", 1) for change in changes).items()]


def processor_seconds() -> float:
    """Of all processes that have been waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def errors(validation: dict, kind: str) -> list[float]:
    return [validation[f"val/{kind}/{wind}"] for wind in WINDS]


def score(own: list[float], damped: list[float]) -> float:
    return statistics.mean(mine / theirs for mine, theirs in zip(own, damped, strict=True))


def unchanged(base: Path, damped: list[float]) -> dict:
    """The base as it is, beside the same damped persistence as the others, that of the week between."""
    last = json.loads((base / "metrics.jsonl").read_text().splitlines()[-1])
    own = errors(last, "rmse")
    nothing = {"seconds": 0.0, "steps": 0, "trained": 0.0}
    return {"choice": "the base", "score": score(own, damped), "rmse": own, **nothing}


def mean_of(rows: list[dict], choice: str, key: str) -> float:
    return statistics.mean(row[key] for row in rows if row["choice"] == choice)


def table(rows: list[dict]) -> str:
    """A line a choice, the mean over its seeds."""
    head = ["choice", "seeds", "RMSE over damped", "least", "most", "u10", "v10", "trained"]
    lines: list[list] = [[*head, "seconds", "steps"]]
    for choice in dict.fromkeys(row["choice"] for row in rows):
        own = [row for row in rows if row["choice"] == choice]
        scores = [row["score"] for row in own]
        winds = [statistics.mean(row["rmse"][number] for row in own) for number in (0, 1)]
        costs = [statistics.mean(row[key] for row in own) for key in ("trained", "seconds", "steps")]
        lines.append([choice, len(own), statistics.mean(scores), min(scores), max(scores), *winds, *costs])
    return text_table("<14 >7d >18.3f >8.3f >8.3f >8.3f >8.3f >9.2% >9.0f >7.0f", lines)


def judge(rows: list[dict]) -> int:
    better = mean_of(rows, "adapters", "score") < mean_of(rows, "from nothing", "score")
    no_less = mean_of(rows, "adapters", "seconds") <= mean_of(rows, "from nothing", "seconds")
    thin = mean_of(rows, "adapters", "trained") <= 0.02
    print(f"\nbetter: {better}; at no more time: {no_less}; at most 2 % train: {thin}")
    return 0 if better and no_less and thin else 1


if __name__ == "__main__":
    sys.exit(main())
