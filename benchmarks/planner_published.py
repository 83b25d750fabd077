"""The planner against throughput that others published: benchmarks/published_runs.toml, one line a run.

    .venv/bin/python benchmarks/planner_published.py

Nothing runs: efficiencies are those of clusters.toml and published_machines.toml, fitted to no row. "seen"
rows were on the screen while the planner was written, "term" ones while a term was chosen, "held out" ones
neither. Next to each figure is what needs no model: the utilisation of the nearest known run, copied. Errors
of layouts in PyTorch go into planning/error_bands.toml, which plan.py prints with every time.
"""

import itertools
import math
import statistics
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.results_file import RESULTS, read_lines, record
from parallelisms.degrees import Degrees
from planning.anchor import KINDS, layout_kind
from planning.architecture import Architecture, Shapes, cut, padded
from planning.clusters import load_cluster
from planning.error_bands import ANCHORED, BANDS, CALIBRATED, Band
from planning.memory import GIB, memory, unit_bytes
from planning.step_time import step_time
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
    fused: bool = True  # q, k and v are one product, and kernels share keys among queries
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
        tiled = self.causal and attention != "math"  # which masks half of them
        return (1 + CAUSAL_BLOCK / self.tokens) / 2 if tiled else 1.0

    @property
    def gradient_sums(self) -> int:  # type: ignore[override]  # a constant of the ViT
        """Of what q, k and v are made of, and the MLP's two halves."""
        return 0 if self.fused else 2 + self.gated

    def activation_passes(self, compiled: bool, backward: bool) -> int:
        """Of GELU, or of SiLU times the other half."""
        if not self.gated:
            return super().activation_passes(compiled, backward)
        if compiled:
            return 5 if backward else 3
        return 9 if backward else 5

    def turning_units(self, itemsize: int, compiled: bool) -> float:
        """Uncompiled: three passes in complex float32 (16 bytes a value); RMSNorm's six, of 36 bytes for 4.

        Backward is twice as much. TorchTitan repeats keys and values for the queries that share them.
        """
        turned = 1 + self.heads_of_keys / self.heads
        uncompiled = (16 * turned + 2 * (36 - 4)) / itemsize
        repeated = 2 * turned * (not self.fused and self.heads_of_keys < self.heads)
        return self.rotary * (2 * turned if compiled else uncompiled) + repeated


RUNS = Path(__file__).with_name("published_runs.toml")
MACHINES = RUNS.with_name("published_machines.toml")
GROUPS = ("seen", "term", "held out")
LISTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
PYTORCH, VIT = ", PyTorch", "vision transformer"  # Rossby's plans are judged by the first, of their layout
# What torch's allocator reserves over what it gives out: 15 % of eight language models on an A100 with 80 GB
# (GMLake, arxiv.org/abs/2401.08156).
ALLOCATOR_SLACK = 0.15
FEWEST, WIDEST = 5, 1.6  # runs of a kind that has a band, and its ends' ratio


def main() -> None:
    rows = judged_runs()
    record("planner_published", rows)
    BANDS.write_text(bands_toml(rows), encoding="utf-8")
    print(table(rows), summaries(rows), peaks_table(), sep="\n\n")


def judged_runs() -> list[dict[str, Any]]:
    """Return rows, with what utilisations of runs not held out give: the nearest's, and a median."""
    rows = [judged(run, model) for run, model in published_runs()]
    seen = [row for row in rows if row["group"] != "held out"]
    for row in rows:
        nearest = min((other for other in seen if other is not row), key=lambda other: distance(row, other))
        row["neighbour"] = nearest["what"]
        row["neighbour_error"] = nearest["published_mfu"] / row["published_mfu"] - 1
        row["average_error"] = average_mfu(row, seen) / row["published_mfu"] - 1
    return rows


def average_mfu(row: dict[str, Any], known: list[dict[str, Any]]) -> float:
    """Median utilisation of the other runs of a device and precision, or else of the precision."""
    others = [other for other in known if other is not row]
    for keys in (("peak", "float8", "dtype"), ("float8", "dtype")):
        if alike := [r["published_mfu"] for r in others if all(r[key] == row[key] for key in keys)]:
            return statistics.median(alike)
    return statistics.median(other["published_mfu"] for other in others)


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return doublings of parameters, tokens and GPUs; 4 more for each other kind of run."""
    sizes = sum(abs(math.log2(one[key] / other[key])) for key in ("parameters", "tokens", "devices"))
    kinds = ("peak", "float8", "dtype", "checkpointing", "language")
    return sizes + 4 * sum(one[key] != other[key] for key in kinds)


def published_runs() -> list[tuple[dict[str, Any], Architecture]]:
    published = tomllib.loads(RUNS.read_text(encoding="utf-8"))
    found = []
    for run in published["run"]:
        # Models of these programs have a matrix each for q, k and v.
        apart = any(part in run["source"] for part in ("torchtitan", "fms-fsdp"))
        changes = {"fused": False} if apart else {}
        model = published_model(run["model"], run["tokens"], published["models"], changes)
        found.append((run, model))
    return found


def published_model(
    name: str, tokens: int, models: dict[str, dict[str, Any]], changes: dict[str, Any] | None = None
) -> Architecture:
    """Tokens of a language model are looked up, and its head gives one value a word."""
    model = models[name] | (changes or {})
    if words := model.get("vocabulary"):
        return LanguageModel(**{"tokens": tokens, "in_features": 0, "out_features": words, **model})
    return Architecture(tokens=tokens, **model)


@dataclass(frozen=True)
class PublishedRun(Workload):
    """A job of another program, whose pipelines may have more than two stages a rank."""

    virtual_stages: int = 0  # of a rank; 0: as many as the schedule has here
    attention: str = "flash"  # FlashAttention-2, of their time

    @property
    def casts_norms(self) -> bool:
        """These programs use FSDP's mixed precision without autocast, or norms in half precision."""
        return super().casts_norms and not self.uses_fsdp

    @property
    def gathered_itemsize(self) -> int:
        """TorchTitan casts to float8 before it gathers (torchao's Float8ColwiseParallel and Rowwise)."""
        fused = isinstance(self.model, LanguageModel) and self.model.fused
        return 1 if self.float8 and not fused else self.itemsize

    @property
    def stages_of_rank(self) -> int:
        return self.virtual_stages or super().stages_of_rank


def workload(run: dict[str, Any], model: Architecture) -> Workload:
    degrees = Degrees(**run.get("degrees", {}))
    own = {key: value for key, value in run.items() if key not in LISTS["about"]}
    own["fused_casts"] = "nvidia" in run["source"].lower()
    batch = run["local_batch"] * degrees.dp * run.get("accumulation", 1)
    values = model.tokens * model.out_features * (not model.reads_words)
    return PublishedRun(model, degrees, global_batch=batch, field_values=values, input_values=values, **own)


def judged(run: dict[str, Any], model: Architecture) -> dict[str, Any]:
    work, cluster = workload(run, model), load_cluster(run["cluster"], [MACHINES])
    time, layout = step_time(work, cluster), layout_kind(work)
    rate, mfu = time.samples_per_second, time.mfu(work, cluster.device.peak["bf16"])
    if run["unit"] == "tokens/s/GPU":
        rate = rate * model.tokens / work.degrees.world
    framework = next(name for part, name in LISTS["frameworks"].items() if part in run["source"])
    family = "PyTorch" if framework in LISTS["families"] else framework
    return {
        "what": label(run, work),
        "predicted": rate,
        "published": run["rate"],
        "unit": run["unit"],
        "error": rate / run["rate"] - 1,
        "mfu": mfu,
        "published_mfu": mfu * run["rate"] / rate,
        "kind": f"{layout if model.reads_words else VIT}, {family}",
        "group": run["use"],
        "framework": framework,
        "machine": cluster.device.name,
        "layout": layout,
        "source": run["source"],
        "unlike": run.get("unlike", ""),
        # What makes two runs neighbours.
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
    compiled = (" compiled" if work.compiled else "") + (" async" if work.async_tp else "")
    tokens = f"{work.model.tokens / 1024:.0f}k" if work.model.tokens > 9999 else str(work.model.tokens)
    recomputed = again.get(work.ac_mode, f", {work.ac_mode}")
    schedule = f", {work.schedule}" if work.degrees.pp > 1 else ""
    return f"{run['model']} {tokens} {run['cluster']}: {whole}, {kind}{compiled}{recomputed}{schedule}"


def table(rows: list[dict[str, Any]]) -> str:
    """Tokens/s of one GPU, or samples/s of all; "copied": with the nearest known run's utilisation."""
    heads = f"{'published':>10}{'planned':>9} {'unit':<8}{'error':>8}{'copied':>9}"
    lines = [f"{'run':<80}{heads}  use      kind, framework"]
    for row in rows:
        digits = 2 if row["published"] < 10 else 0
        numbers = f"{row['published']:>10,.{digits}f}{row['predicted']:>9,.{digits}f} "
        errors = f"{row['error']:>+8.1%}{row['neighbour_error']:>+9.1%}"
        where = f"{row['group']:<9}{row['kind']}, {row['framework']}"
        lines.append(f"{row['what']:<80}{numbers}{row['unit'].split('/')[0]:<8}{errors}  {where}")
    return "\n".join(lines)


def summaries(rows: list[dict[str, Any]]) -> str:
    """Return a line a use and kind: errors of the planner, and of the two ways that need no model."""
    heads = "".join(f"  {name:<23}" for name in ("planner", "nearest run's MFU", "one MFU a device"))
    columns = "".join(f"{'10 %':>5}{'20 %':>5}{'mean':>7}{'med.':>7} " for _ in range(3))
    lines = [f"{'':<53}{heads}", f"{'use, kind':<40}{'runs':>5}{'in band':>9}{columns}"]
    for group in GROUPS:
        found = [row for row in rows if row["group"] == group]
        for kind in sorted({row["kind"] for row in found}):
            lines.append(summary(f"  {kind}", [row for row in found if row["kind"] == kind], rows))
        lines.append(summary(group, found, rows))
    lines += [summary("all", rows, rows), "", f"{'':<54}{'10 %':>5}{'20 %':>5}{'mean':>7}{'med.':>7}"]
    factors = {kind: anchored_factors(rows, kind) for kind in KINDS}
    for kind, found in (*factors.items(), ("all", sum(factors.values(), []))):
        if errors := [abs(1 - 1 / factor) for factor in found]:
            lines.append(f"{f'anchored, {kind}: {len(errors)} pairs':<54}{accuracy(errors)}")
    return "\n".join(lines)


def summary(name: str, found: list[dict[str, Any]], rows: list[dict[str, Any]]) -> str:
    known = bands_by_kind([row for row in rows if row["group"] != "held out"])
    judged_by = [(row, known[row["kind"]]) for row in found if row["kind"] in known]
    inside = sum(band.fastest <= 1 + row["error"] <= band.slowest for row, band in judged_by)
    share = f"{inside}/{len(judged_by)}" if judged_by else "-"
    errors = ([abs(row[key]) for row in found] for key in ("error", "neighbour_error", "average_error"))
    return f"{name:<40}{len(found):>5}{share:>9}" + "".join(map(accuracy, errors))


def accuracy(errors: list[float]) -> str:
    tenth, fifth = (sum(error <= limit for error in errors) for limit in (0.10, 0.20))
    return f"{tenth:>5}{fifth:>5}{statistics.mean(errors):>7.1%}{statistics.median(errors):>7.1%} "


def anchored_factors(rows: list[dict[str, Any]], kind: str) -> list[float]:
    """Seconds as published over seconds as planned and scaled by the other run of each pair."""
    alike = [row for row in rows if row["layout"] == kind]
    return [
        (1 + row["error"]) / (1 + anchor["error"])
        for row, anchor in itertools.permutations(alike, 2)
        if all(row[key] == anchor[key] for key in ("machine", "framework", "kind"))
    ]


def bands_by_kind(rows: list[dict[str, Any]]) -> dict[str, Band]:
    """Kind and framework -> seconds as published over seconds as planned."""
    factors: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        programs = factors.setdefault(row["kind"], {})
        programs.setdefault(row["framework"], []).append(1 + row["error"])
    return {kind: band(*programs.values()) for kind, programs in sorted(factors.items())}


def bands(rows: list[dict[str, Any]]) -> dict[str, Band]:
    """Those that plan.py prints, of all runs: of layouts in PyTorch, and with a measured machine or run."""
    found = {
        kind.removesuffix(PYTORCH): each for kind, each in bands_by_kind(rows).items() if PYTORCH in kind
    }
    found[CALIBRATED] = band(calibrated_factors())
    found |= {ANCHORED + kind: band(anchored_factors(rows, kind)) for kind in KINDS}
    return {kind: each for kind, each in found.items() if is_useful(each)}


def band(*programs: list[float]) -> Band:
    """Four fifths of the factors of each program are inside; ends are rounded outwards."""
    inner = [sorted(each)[len(each) // 10 : len(each) - len(each) // 10] for each in programs]
    low, high = math.floor(1000 * min(map(min, inner))), math.ceil(1000 * max(map(max, inner)))
    factors = [factor for each in programs for factor in each]
    return Band(len(factors), low / 1000, round(statistics.median(factors), 3), high / 1000)


def is_useful(band: Band) -> bool:
    return band.runs >= FEWEST and band.slowest <= WIDEST * band.fastest


def bands_toml(rows: list[dict[str, Any]]) -> str:
    head = (
        "# Written by benchmarks/planner_published.py: seconds of a step over those planned, of published\n"
        "# runs and, where the machine was calibrated, of the last run of benchmarks/planner_accuracy.py.\n"
        f"# Four fifths of each program's runs are inside; {FEWEST} runs at least, {WIDEST} wide at most.\n"
    )
    tables = (
        f'"{kind}" = {{ ' + ", ".join(f"{key} = {value}" for key, value in vars(found).items()) + " }\n"
        for kind, found in bands(rows).items()
    )
    return head + "".join(tables)


def peaks_table() -> str:
    """Peaks of reserved memory as TorchTitan prints them, GiB. None is held out."""
    lines = [f"{'peak of reserved memory, GiB':<92}{'published':>10}{'planned':>9}{'slack':>7}{'error':>8}"]
    for run, model in published_runs():
        if published := run.get("peak_gib"):
            work = workload(run, model)
            peak = allocated_peak(work, run.get("compiled_loss", False)) / GIB
            planned = peak * (1 + ALLOCATOR_SLACK)
            numbers = f"{published:>10.1f}{planned:>9.1f}{planned - peak:>7.1f}"
            lines.append(f"{label(run, work):<92}{numbers}{planned / published - 1:>+8.1%}")
    return "\n".join(lines)


def allocated_peak(work: Workload, compiled_loss: bool) -> float:
    """Bytes of the planner's moments, with what TorchTitan does otherwise."""
    if work.ac_mode != "every_second_product":
        return max(sum(parts.values()) for parts in moments(work, compiled_loss))
    # Recomputes wk, wo and w3: keeps attention's output, wq, wv, w1 and w2 next to the block's input.
    model, kept = work.model, work.replace(ac_mode="full")
    units = 2 + model.heads_of_keys / model.heads + model.mlp_dim / model.dim + 1
    more = work.rank_layers * units * unit_bytes(work)
    return max(sum(parts.values()) + more for parts in moments(kept, compiled_loss) if "activations" in parts)


def moments(work: Workload, compiled_loss: bool) -> list[dict[str, float]]:
    """Logits are in float32, with their log-softmax and its gradient, with tensor parallelism once more.

    Of a compiled loss there is the gradient in half precision. Blocks of 405B are gathered in float8.
    """
    found = memory(work).moments
    logits = 4 * work.states_at_once * work.rank_tokens * work.model.out_features
    if work.degrees.pp == 1:
        found["loss"]["loss"] = logits * (0.5 if compiled_loss else 3 + (work.degrees.tp > 1))
    elif work.float8:
        gathered = work.rank_layers * padded(cut(work.model.block(), work.degrees.tp), work.fsdp_ranks)
        found = {name: {**parts, "float8": -gathered} for name, parts in found.items()}
    return list(found.values())


def calibrated_factors() -> list[float]:
    """Return those of the last run of benchmarks/planner_accuracy.py."""
    found = read_lines(RESULTS / "planner_accuracy.jsonl", kind="time")
    return [row["measured"] / row["predicted"] for row in found if row["time"] == found[-1]["time"]]


if __name__ == "__main__":
    main()
