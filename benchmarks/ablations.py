"""What a choice of the recipe gains: skill on dates that were not seen, at equal FLOPs of training.

    .venv/bin/python benchmarks/ablations.py [--task winds] [--choice Muon] [--seeds 3]

Every choice of benchmarks/ablations.toml is a shipped configuration with options of train.py, among them
those that take it back to what it was. Its first step is taken to count its FLOPs, and it is trained for as
many steps as the first choice of its task has FLOPs. `--choice` trains the first and those with this word
in their name. Printed is RMSE over a baseline's at two leads (TASKS), the mean over variables: the mean
over seeds, the lowest and the highest, and what that is over the first choice's mean. A difference within
the spread says nothing.
"""

import argparse
import statistics
import sys
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.results_file import record
from benchmarks.time_to_skill import ROOT, Task, records_of, train
from command_line import text_table

WINDS = ("10m_u_component_of_wind", "10m_v_component_of_wind")
OF_LEVELS = ("geopotential", "u_component_of_wind", "v_component_of_wind")
WEATHER = (*(f"{name}:{level}" for name in OF_LEVELS for level in (300, 850)), "total_column_water_vapour")
TASKS = {
    "winds": Task("gfs_winds", WINDS, (6, 24), "damped_persistence"),
    "simulated": Task("demo_unet", WEATHER, (6, 24), "training_mean"),
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=[*TASKS])
    parser.add_argument("--choice", default="")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    listed = tomllib.loads((ROOT / "benchmarks/ablations.toml").read_text())
    choices = [begun(choice, listed["before"]) for choice in listed["choice"]]
    rows = []
    for name in [options.task] if options.task else TASKS:
        task, all_own = TASKS[name], [choice for choice in choices if choice["task"] == name]
        own = [all_own[0], *(choice for choice in all_own[1:] if options.choice in choice["choice"])]
        budgets = [tflop_of_a_step(task, choice["options"]) for choice in own]
        steps = [round(own[0]["steps"] * budgets[0] / each) for each in budgets]
        for seed in range(options.seeds):
            for choice, number in zip(own, steps, strict=True):
                found = train(task, [*choice["options"], f"--training.steps={number}"], seed)
                rows.append({"task": name, "choice": choice["choice"], "seed": seed, **found})
                record("ablations", rows[-1:])  # an hour's work is not lost with its last minute
                print(rows[-1], flush=True)
    print(table(rows))
    return 0


def begun(choice: dict, before: dict[str, list[str]]) -> dict:
    """With what all choices of its task begin with; an option that is given twice counts as given last."""
    return {**choice, "options": [*before.get(choice["task"], []), *choice["options"]]}


def tflop_of_a_step(task: Task, options: list[str]) -> float:
    (only,) = records_of(task, [*options, "--training.steps=1", "--validation.enable=false"], 0)
    return only["tflops"] * only["step_seconds"]


def table(rows: list[dict]) -> str:
    lines: list[list] = [["task", "choice", "steps", "first lead", "", "last lead", ""]]
    firsts: dict[str, list[float]] = {}
    for task, choice in dict.fromkeys((row["task"], row["choice"]) for row in rows):
        own = [row for row in rows if (row["task"], row["choice"]) == (task, choice)]
        cells: list = []
        for lead in range(2):
            scores = [row["scores"][lead] for row in own]
            mean = statistics.mean(scores)
            first = firsts.setdefault(f"{task} {lead}", [mean])[0]
            cells += [f"{mean:.3f} ({min(scores):.3f} to {max(scores):.3f})", mean / first]
        lines.append([task, choice, own[0]["steps"], *cells])
    return text_table("<11 <50 >6 >25 >7.3f >25 >7.3f", lines)


if __name__ == "__main__":
    sys.exit(main())
