"""The planner against throughput that others published: benchmarks/published_runs.toml, one line a run.

    .venv/bin/python benchmarks/planner_published.py

Nothing runs: the efficiencies of each device are those of planning/clusters.toml, and of
published_machines.toml for machines that differ from it. No figure is fitted to a row. The errors of "seen"
rows were looked at while the terms of the model were chosen; "held out" ones were added afterwards.
"""

import dataclasses
import statistics
import sys
import tomllib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.results_file import record
from parallelisms.degrees import Degrees
from planning.architecture import Architecture
from planning.clusters import load_cluster
from planning.hardware import Cluster
from planning.scenarios import LLAMA_70B
from planning.step_time import StepTime, step_time
from planning.workload import Workload

RUNS = Path(__file__).with_name("published_runs.toml")
MACHINES = RUNS.with_name("published_machines.toml")
ABOUT = ("model", "source", "cluster", "tokens", "rate", "unit", "seen", "unlike", "accumulation", "degrees")


def main() -> None:
    rows = [judged(run, model) for run, model in published_runs()]
    record("planner_published", rows)
    print(table(rows))
    for group in ("seen", "held out", ""):
        errors = [abs(row["error"]) for row in rows if group in ("", row["group"])]
        within = sum(error <= 0.10 for error in errors)
        print(
            f"{group or 'all'}: {within} of {len(errors)} within 10 %, "
            f"median error {statistics.median(errors):.1%}, mean {statistics.mean(errors):.1%}"
        )


def published_runs() -> list[tuple[dict[str, Any], Architecture]]:
    """Each run with the architecture that it trained."""
    published = tomllib.loads(RUNS.read_text(encoding="utf-8"))
    runs, models = published["run"], published["models"]
    return [(run, published_model(run["model"], run["tokens"], models)) for run in runs]


def published_model(name: str, tokens: int, models: dict[str, dict[str, Any]]) -> Architecture:
    """Tokens of a language model are looked up, and its head gives one value a word."""
    if name == "llama3-70b":
        return dataclasses.replace(LLAMA_70B, tokens=tokens)
    words = models[name].get("vocabulary", 0)
    return Architecture(**{"tokens": tokens, "in_features": 0, "out_features": words, **models[name]})


def workload(run: dict[str, Any], model: Architecture) -> Workload:
    """Other keys of a run are the workload's own."""
    degrees, own = Degrees(**run.get("degrees", {})), {k: v for k, v in run.items() if k not in ABOUT}
    batch = run["local_batch"] * degrees.dp * run.get("accumulation", 1)
    values = model.tokens * model.out_features * (not model.vocabulary)
    return Workload(model, degrees, global_batch=batch, field_values=values, input_values=values, **own)


def predict(run: dict[str, Any], model: Architecture) -> tuple[float, StepTime, Workload, Cluster]:
    """In the unit in which the run was published."""
    work, cluster = workload(run, model), load_cluster(run["cluster"], [MACHINES])
    time = step_time(work, cluster)
    rate = time.samples_per_second
    tokens = run["unit"] == "tokens/s/GPU"
    return rate * model.tokens / work.degrees.world if tokens else rate, time, work, cluster


def judged(run: dict[str, Any], model: Architecture) -> dict[str, Any]:
    rate, time, work, cluster = predict(run, model)
    return {
        "what": label(run, work),
        "predicted": rate,
        "published": run["rate"],
        "unit": run["unit"],
        "error": rate / run["rate"] - 1,
        "mfu": time.mfu(work, cluster.device.peak["bf16"]),
        "group": "seen" if run.get("seen") else "held out",
        "source": run["source"],
        "unlike": run.get("unlike", ""),
    }


def label(run: dict[str, Any], work: Workload) -> str:
    named = {axis.removeprefix("dp_"): n for axis, n in vars(work.degrees).items() if n > 1}
    degrees = " ".join(f"{axis}{n}" for axis, n in named.items())
    whole = f"fsdp{work.degrees.world}" if list(named) == ["shard"] else degrees or "one"
    kind = "float8" if work.float8 else {"float32": "fp32", "bfloat16": "bf16"}[work.dtype]
    again = {"none": "", "every_second_product": ", op", "every_n_blocks": f", every {work.every_n}"}
    compiled = " compiled" if work.compiled else ""
    tokens = f"{work.model.tokens / 1024:.0f}k" if work.model.tokens > 9999 else str(work.model.tokens)
    recomputed = again.get(work.ac_mode, f", {work.ac_mode}")
    return f"{run['model']} {tokens} {run['cluster']}: {whole}, {kind}{compiled}{recomputed}"


def table(rows: list[dict[str, Any]]) -> str:
    """Tokens/s of one GPU, or samples/s of all."""
    lines = [f"{'run':<68}{'published':>10}{'planned':>9} {'unit':<8}{'error':>7}  group"]
    for row in rows:
        digits = 2 if row["published"] < 10 else 0
        numbers = f"{row['published']:>10,.{digits}f}{row['predicted']:>9,.{digits}f} "
        unit = row["unit"].split("/")[0]
        lines.append(f"{row['what']:<68}{numbers}{unit:<8}{row['error']:>+7.1%}  {row['group']}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
