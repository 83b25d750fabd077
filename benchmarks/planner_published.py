"""The planner against throughput that others published: benchmarks/published_runs.toml, one line a run.

    .venv/bin/python benchmarks/planner_published.py

Nothing runs: the efficiencies of each device are those of planning/clusters.toml, and of
published_machines.toml for machines that differ from it. No figure is fitted to a row. The errors of "seen"
rows were on the screen while the planner was written, those of "term" rows while a term was chosen, those of
"held out" rows neither.

Beside each figure stands what needs no model: the utilisation of the nearest seen run, copied. The errors of
each class go into planning/error_bands.toml, which plan.py prints beside every time.
"""

import itertools
import json
import math
import statistics
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.results_file import RESULTS, record
from parallelisms.degrees import Degrees
from planning.anchor import KINDS, layout_kind
from planning.architecture import Architecture, Shapes
from planning.clusters import load_cluster
from planning.error_bands import ANCHORED, BANDS, CALIBRATED, Band, classes_of
from planning.hardware import Cluster
from planning.step_time import StepTime, step_time
from planning.workload import Workload

CAUSAL_BLOCK = 128  # queries or keys of a tile of flash attention: tiles on the diagonal are computed whole


@dataclass(frozen=True)
class LanguageModel(Architecture):
    """A transformer that reads words: relatives of the ViT with published runs."""

    vocabulary: int = 0  # rows of the table that tokens are looked up in
    kv_heads: int = 0  # heads of keys and values; 0: as many as of queries
    biases: bool = True  # type: ignore[misc]  # a constant of the ViT
    gated: bool = False  # an MLP of three matrices (SwiGLU)
    causal: bool = False
    rotary: bool = False  # queries and keys are turned by their position, norms are RMSNorm
    reads_words: ClassVar[bool] = True
    # Cross-entropy, bytes a logit: to float32 (6), log-softmax (8), its gradient (4 + 12), back (6). Blocks
    # are compiled, the loss is not (TorchTitan's train.py at the end of 2024).
    loss_bytes: ClassVar[int] = 36

    @property
    def heads_of_keys(self) -> int:
        return self.kv_heads or self.heads

    @property
    def hidden_kept(self) -> float:
        return self.mlp_dim / self.dim * (3 if self.gated else 2) / 2

    def block(self) -> Shapes:
        shapes = super().block()
        return shapes | (self._linear("mlp.gate", self.dim, self.mlp_dim, self.biases) if self.gated else {})

    def first(self) -> Shapes:
        return {"embedding.weight": (self.vocabulary, self.dim)}

    def attention_flops(self) -> float:
        return super().attention_flops() / (2 if self.causal else 1)

    def computed_scores(self, attention: str) -> float:
        """The "math" kernel computes all scores, and masks half of them."""
        tiled = self.causal and attention != "math"
        return (1 + CAUSAL_BLOCK / self.tokens) / 2 if tiled else 1.0

    def activation_passes(self, compiled: bool, backward: bool) -> int:
        """Of GELU, or of SiLU times the other half."""
        if not self.gated:
            return super().activation_passes(compiled, backward)
        if compiled:
            return 5 if backward else 3
        return 9 if backward else 5

    def turning_units(self, itemsize: int, compiled: bool) -> float:
        """Compiled one pass. Uncompiled it is three in complex float32 (16 bytes a value), and RMSNorm is
        six, to float32 and back (36 bytes, LayerNorm 4); backward twice as much.
        """
        turned = 1 + self.heads_of_keys / self.heads
        uncompiled = (16 * turned + 2 * (36 - 4)) / itemsize
        return self.rotary * (2 * turned if compiled else uncompiled)


RUNS = Path(__file__).with_name("published_runs.toml")
MACHINES = RUNS.with_name("published_machines.toml")
GROUPS = ("seen", "term", "held out")
FRAMEWORKS = {  # part of a source's name -> what trained there
    "pytorch/torchtitan": "TorchTitan",
    "fms-fsdp": "fms-fsdp",
    "llm-foundry": "llm-foundry",
    "section 2": "case study",
    "section 3": "NERSC",
    "NERSC": "NERSC",
    "NVIDIA": "Megatron",
    "nvidia": "Megatron",
    "pytorch-image-models": "timm",
}
ABOUT = (
    *("model", "source", "cluster", "tokens", "rate", "unit", "use", "unlike", "accumulation", "degrees"),
    *("async_tp", "virtual_stages", "peak_gib"),
)


def main() -> None:
    rows = judged_runs()
    record("planner_published", rows)
    BANDS.write_text(bands_toml(rows), encoding="utf-8")
    print(table(rows), summaries(rows), bands_table(rows), sep="\n\n")


def judged_runs() -> list[dict[str, Any]]:
    """All rows, each with what the utilisation of the nearest run that is not held out would have given."""
    rows = [judged(run, model) for run, model in published_runs()]
    seen = [row for row in rows if row["group"] != "held out"]
    for row in rows:
        nearest = min((other for other in seen if other is not row), key=lambda other: distance(row, other))
        row["neighbour"] = nearest["what"]
        row["neighbour_error"] = nearest["published_mfu"] / row["published_mfu"] - 1
    return rows


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Doublings of parameters, tokens and GPUs between two runs; 4 for another device, precision, mode of
    checkpointing or kind of model.
    """
    sizes = sum(abs(math.log2(one[key] / other[key])) for key in ("parameters", "tokens", "devices"))
    kinds = ("peak", "float8", "dtype", "checkpointing", "language")
    return sizes + 4 * sum(one[key] != other[key] for key in kinds)


def published_runs() -> list[tuple[dict[str, Any], Architecture]]:
    """Each run with the architecture that it trained."""
    published = tomllib.loads(RUNS.read_text(encoding="utf-8"))
    runs, models = published["run"], published["models"]
    return [(run, published_model(run["model"], run["tokens"], models)) for run in runs]


def published_model(name: str, tokens: int, models: dict[str, dict[str, Any]]) -> Architecture:
    """Tokens of a language model are looked up, and its head gives one value a word."""
    model = models[name]
    if words := model.get("vocabulary"):
        return LanguageModel(**{"tokens": tokens, "in_features": 0, "out_features": words, **model})
    return Architecture(tokens=tokens, **model)


def workload(run: dict[str, Any], model: Architecture) -> Workload:
    """Other keys of a run are the workload's own."""
    degrees, own = Degrees(**run.get("degrees", {})), {k: v for k, v in run.items() if k not in ABOUT}
    batch = run["local_batch"] * degrees.dp * run.get("accumulation", 1)
    values = model.tokens * model.out_features * (not model.reads_words)
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
    mfu = time.mfu(work, cluster.device.peak["bf16"])
    return {
        "what": label(run, work),
        "predicted": rate,
        "published": run["rate"],
        "unit": run["unit"],
        "error": rate / run["rate"] - 1,
        "mfu": mfu,
        "published_mfu": mfu * run["rate"] / rate,
        "classes": classes_of(work, cluster),
        "group": run["use"],
        "framework": next(name for part, name in FRAMEWORKS.items() if part in run["source"]),
        "machine": cluster.device.name,
        "layout": layout_kind(work),
        "source": run["source"],
        "unlike": run.get("unlike", ""),
        **about(work, cluster),
    }


def about(work: Workload, cluster: Cluster) -> dict[str, Any]:
    """What makes two runs neighbours."""
    return {
        "parameters": work.model.parameters,
        "tokens": work.model.tokens,
        "devices": work.degrees.world,
        "peak": cluster.device.peak["bf16"],
        "float8": work.float8,
        "dtype": work.dtype,
        "checkpointing": work.ac_mode,
        "language": work.model.reads_words,
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
    """Tokens/s of one GPU, or samples/s of all; "copied": with the nearest known run's utilisation."""
    heads = f"{'published':>10}{'planned':>9} {'unit':<8}{'error':>8}{'copied':>9}"
    lines = [f"{'run':<70}{heads}  group    framework, classes"]
    for row in rows:
        digits = 2 if row["published"] < 10 else 0
        numbers = f"{row['published']:>10,.{digits}f}{row['predicted']:>9,.{digits}f} "
        unit, where = row["unit"].split("/")[0], f"{row['framework']}, {', '.join(row['classes'])}"
        errors = f"{row['error']:>+8.1%}{row['neighbour_error']:>+9.1%}"
        lines.append(f"{row['what']:<70}{numbers}{unit:<8}{errors}  {row['group']:<9}{where}")
    return "\n".join(lines)


def summaries(rows: list[dict[str, Any]]) -> str:
    """A line a group, and of the held-out runs one for each framework and machine."""
    groups = [(group, [row for row in rows if row["group"] == group]) for group in GROUPS]
    lines = [summary(group, found) for group, found in groups if found]
    held = [row for row in rows if row["group"] == "held out"]
    for name in dict.fromkeys((row["framework"], row["machine"]) for row in held):
        lines.append(
            summary(f"  {', '.join(name)}", [r for r in held if (r["framework"], r["machine"]) == name])
        )
    lines += [summary("all", rows), *anchored_summaries(rows)]
    return "\n".join(lines)


def anchored_summaries(rows: list[dict[str, Any]]) -> list[str]:
    """A line a kind of layout: errors with another run of its machine, framework and kind as the anchor."""
    lines = []
    for kind in KINDS:
        if errors := [abs(1 - 1 / factor) for factor in anchored_factors(rows, kind)]:
            lines.append(f"anchored, {kind}: of {len(errors)} pairs {accuracy(errors)}")
    return lines


def anchored_factors(rows: list[dict[str, Any]], kind: str) -> list[float]:
    """Seconds as published over seconds as planned and scaled by the other run of each pair."""
    alike = [row for row in rows if row["layout"] == kind]
    return [
        (1 + row["error"]) / (1 + anchor["error"])
        for row, anchor in itertools.permutations(alike, 2)
        if all(row[key] == anchor[key] for key in ("machine", "framework"))
    ]


def summary(name: str, rows: list[dict[str, Any]]) -> str:
    planned, copied = ([abs(row[key]) for row in rows] for key in ("error", "neighbour_error"))
    return f"{name}: of {len(rows)} runs {accuracy(planned)}; copied from the nearest {accuracy(copied)}"


def accuracy(errors: list[float]) -> str:
    within = sum(error <= 0.10 for error in errors)
    return f"{within} within 10 %, median {statistics.median(errors):.1%}, mean {statistics.mean(errors):.1%}"


def bands(rows: list[dict[str, Any]]) -> dict[str, Band]:
    """Class -> seconds as published over seconds as planned; a run counts in all its classes.

    Those held out are not in it: they test it.
    """
    factors: dict[str, list[float]] = {}
    rows = [row for row in rows if row["group"] != "held out"]
    for row in rows:
        for kind in row["classes"]:
            factors.setdefault(kind, []).append(1 + row["error"])
    factors = dict(sorted(factors.items())) | {CALIBRATED: calibrated_factors()}
    for kind in KINDS:
        pairs = sorted(anchored_factors(rows, kind))
        tenth = len(pairs) // 10  # 80 % of the pairs are inside
        factors[ANCHORED + kind] = pairs[tenth : len(pairs) - tenth]
    return {kind: band(found) for kind, found in factors.items()}


def band(factors: list[float]) -> Band:
    ends = (min(factors), statistics.median(factors), max(factors))
    return Band(len(factors), *(round(factor, 3) for factor in ends))


def bands_table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'a step as it was, over as planned':<40}{'runs':>6}{'fastest':>9}{'median':>9}{'slowest':>9}"]
    for kind, found in bands(rows).items():
        ends = f"{found.fastest:>9.2f}{found.median:>9.2f}{found.slowest:>9.2f}"
        lines.append(f"{kind:<40}{found.runs:>6}{ends}")
    return "\n".join(lines)


def bands_toml(rows: list[dict[str, Any]]) -> str:
    """planning/error_bands.toml."""
    head = (
        "# Written by benchmarks/planner_published.py: seconds of a step over those planned, of published\n"
        "# runs and, where the machine was calibrated, of the last run of benchmarks/planner_accuracy.py.\n"
    )
    tables = (
        f'\n["{kind}"]\n' + "".join(f"{key} = {value}\n" for key, value in vars(found).items())
        for kind, found in bands(rows).items()
    )
    return head + "".join(tables)


def calibrated_factors() -> list[float]:
    """Of the last run of benchmarks/planner_accuracy.py."""
    lines = (RESULTS / "planner_accuracy.jsonl").read_text(encoding="utf-8").splitlines()
    found = [row for row in map(json.loads, lines) if row["kind"] == "time"]
    return [row["measured"] / row["predicted"] for row in found if row["time"] == found[-1]["time"]]


if __name__ == "__main__":
    main()
