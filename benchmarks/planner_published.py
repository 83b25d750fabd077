"""Comparison of the planner with published throughput: published_runs.toml and published_unseen.toml.

    .venv/bin/python benchmarks/planner_published.py

Nothing runs: efficiencies are those of clusters.toml and published_machines.toml, fitted to no row. "seen"
rows were on the screen while the planner was written, "term" ones while a term was chosen, "held out" ones
neither. Next to each figure is what needs no model: the utilisation of the nearest known run, copied. Errors
of layouts in PyTorch go into planning/error_bands.toml, which plan.py prints with every time. "unseen" runs
have a list and a line of their own: no constant is chosen by them. Since they were seen, bands hold nine
tenths of the runs (of four fifths too few of these were inside), and Megatron's optimizer is described.
"""

import itertools
import math
import statistics
import sys
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import pandas as pd

from benchmarks.results_file import record
from config import Model
from parallelisms.degrees import Degrees
from planning.clusters import Cluster, Device, load_cluster
from planning.constants import ALLOCATOR_SLACK, FLOAT8_BANDWIDTH, FLOAT8_CAST, FLOAT8_TRANSPOSE, GIB, PASSES
from planning.memory import memory, unit_bytes
from planning.network import route, seconds
from planning.step_time import ANCHORED, BANDS, Band, linear_seconds, spread, step_time
from planning.workload import ROW, Architecture, Shapes, Workload, architecture_of, cut, padded

RUNS = Path(__file__).with_name("published_runs.toml")
UNSEEN = RUNS.with_name("published_unseen.toml")
MACHINES = RUNS.with_name("published_machines.toml")
KINDS = ("data parallel", "tensor parallel", "context parallel", "pipeline")
GROUPS = ("seen", "term", "held out")
LISTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
PYTORCH, VIT = ", PyTorch", "vision transformer"  # Rossby's plans are judged by the first, of their layout
FEWEST, WIDEST = 5, 1.6  # runs of a kind that has a band, and its ends' ratio
CAUSAL_BLOCK = 128  # queries or keys of a tile of flash attention: tiles on the diagonal are computed whole
# Cross-entropy, bytes a logit: to float32 (6), log-softmax (8), its gradient (4 + 12), back (6). Blocks are
# compiled, the loss is not (TorchTitan's train.py at the end of 2024).
LOSS_BYTES = 36
# Reads and writes of SiLU times the other half of a gated MLP over those of GELU, (compiled, backward).
GATED = {(True, False): 3 / 2, (True, True): 5 / 3, (False, False): 5 / 2, (False, True): 9 / 3}


@dataclass(frozen=True)
class LanguageModel(Architecture):
    """A transformer that reads words: relatives of the ViT with published runs."""

    biases: bool = True
    gated: bool = False  # an MLP of three matrices (SwiGLU)
    causal: bool = False
    fused: bool = True  # q, k and v are one product


def published_model(
    name: str, tokens: int, models: dict[str, dict[str, Any]], changes: dict[str, Any] | None = None
) -> Architecture:
    """Return a language model, which looks up tokens, or a ViT, of which a token's values are given."""
    keys = models[name]
    if "vocabulary" not in keys:
        vit = Model("vit", (1, 1), keys["dim"], keys["layers"], keys["heads"], mlp_dim=keys["mlp_dim"])
        return architecture_of(vit, (tokens, 1), keys["in_features"], keys["out_features"])
    kind = keys | (changes or {})
    dim, layers, heads, mlp_dim = (kind.pop(key) for key in ("dim", "layers", "heads", "mlp_dim"))
    vocabulary, kv_heads = kind.pop("vocabulary"), kind.pop("kv_heads", 0)  # 0: as many as of queries
    qkv_bias, biases = kind.pop("qkv_bias", True), kind.get("biases", True)
    kind.pop("learned_position", False)

    def linear(name: str, inputs: int, outputs: int, bias: bool) -> Shapes:
        return {f"{name}.weight": (outputs, inputs)} | ({f"{name}.bias": (outputs,)} if bias else {})

    norm = lambda name: {f"{name}.weight": (dim,), f"{name}.bias": (dim,)}  # noqa: E731
    qkv = dim + 2 * dim // heads * (kv_heads or heads)
    block = norm("attention_norm") | linear("attention.qkv", dim, qkv, qkv_bias)
    block |= linear("attention.projection", dim, dim, biases) | norm("mlp_norm")
    block |= linear("mlp.up", dim, mlp_dim, biases) | linear("mlp.down", mlp_dim, dim, biases)
    block |= linear("mlp.gate", dim, mlp_dim, biases) if kind.get("gated") else {}
    parameters = sum(math.prod(shape) for shape in block.values() if len(shape) == 2)
    attention = 4 * tokens**2 * dim / (2 if kind.get("causal") else 1)
    flops = layers * (2 * tokens * parameters + attention) + 2 * tokens * dim * vocabulary
    ends = {"embedding.weight": (vocabulary, dim)}, norm("norm") | linear("head", dim, vocabulary, biases)
    return LanguageModel(tokens, dim, layers, heads, 0, vocabulary, flops, block, *ends, **kind)


def published_runs(file: Path) -> list[tuple[dict[str, Any], Architecture]]:
    lists = [tomllib.loads(path.read_text(encoding="utf-8")) for path in (RUNS, file)]
    models, runs = lists[0]["models"] | lists[1]["models"], []
    for run in lists[1]["run"]:
        # Models of these programs have a matrix each for q, k and v.
        is_apart = any(part in run["source"] for part in ("torchtitan", "fms-fsdp"))
        changes = {"fused": False} if is_apart else {}
        runs.append(({"use": "unseen"} | run, published_model(run["model"], run["tokens"], models, changes)))
    return runs


def judged_runs(file: Path = RUNS, seen: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    """Return the rows of a file, with what the utilisation of the nearest run of `seen` gives.

    seen: rows of published_runs.toml; by default those of this file that are not held out.
    """

    def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
        """Return doublings of parameters, tokens and GPUs; 4 more for each other kind of run."""
        sizes = sum(abs(math.log2(one[key] / other[key])) for key in ("parameters", "tokens", "devices"))
        kinds = ("peak", "float8", "dtype", "checkpointing", "language")
        return sizes + 4 * sum(one[key] != other[key] for key in kinds)

    rows = [judged(run, model) for run, model in published_runs(file)]
    seen = seen or [row for row in rows if row["group"] != "held out"]
    for row in rows:
        nearest = min((other for other in seen if other is not row), key=lambda other: distance(row, other))  # noqa: B023
        row["neighbour"] = nearest["what"]
        row["neighbour_error"] = nearest["published_mfu"] / row["published_mfu"] - 1
    return rows


@dataclass(frozen=True)
class PublishedRun(Workload):
    """A job of another program, which may have more than two pipeline stages per rank."""

    virtual_stages: int = 0  # of a rank; 0: as many as the schedule has here
    attention: str = "flash"  # FlashAttention-2, of their time
    # Megatron's optimizer: weights are gathered once a step while the first layers compute, gradients reduced
    # and scattered once, behind the last backward pass, with a pipeline as well.
    distributed_optimizer: bool = False

    @property
    def reductions(self) -> int:
        return 1 if self.distributed_optimizer else super().reductions

    @property
    def reduces_last(self) -> bool:
        return not self.distributed_optimizer and super().reduces_last

    @property
    def stays_gathered(self) -> bool:
        return self.distributed_optimizer or super().stays_gathered

    @property
    def stages_of_rank(self) -> int:
        return self.virtual_stages or super().stages_of_rank


@dataclass(frozen=True)
class OtherDevice(Device):
    """A device with the operations of another program, for a run with workload `work` of `model`."""

    run: dict[str, Any] = field(default_factory=dict)
    work: Any = None
    model: Any = None

    def attention_seconds(self, *arguments: Any) -> float:  # type: ignore[override]
        """A causal mask leaves half of the tiles, where a kernel has tiles."""
        tiled = self.model.causal and self.work.attention != "math"
        scores = (1 + CAUSAL_BLOCK / self.model.tokens) / 2 if tiled else 1.0
        return scores * super().attention_seconds(*arguments)

    def elementwise_seconds(self, size: float, operation: str = "copy") -> float:
        return self.factor(operation) * super().elementwise_seconds(size)

    def factor(self, operation: str) -> float:
        """Bytes that they move over those of this program."""
        model, work, backward = self.model, self.work, operation.endswith("_backward")
        if operation.startswith("gelu") and model.gated:
            return GATED[work.compiled, backward]
        if operation == "sum":  # of biases, and of gradients of what several matrices multiply
            biases = 5 + model.mlp_dim / model.dim
            apart = 0 if model.fused else 2 + model.gated
            return model.biases + 3 * work.degrees.tp * apart / biases
        if operation.startswith("layer_norm"):
            return 1 + self.rotated(backward) / PASSES[work.compiled, backward][operation]
        if operation == "norm cast":  # FSDP's mixed precision has no autocast, or norms in half precision
            return float(not work.uses_fsdp)
        if operation.startswith("float8"):  # Transformer Engine's kernels are fused
            return FLOAT8_BANDWIDTH if is_nvidias(self.run) else self.casts(backward)
        if operation == "exchange" and work.degrees.tp > 1:  # torchao casts to float8 before it gathers
            return 0.0 if self.run.get("async_tp") else 0.75 if work.float8 and not model.fused else 1.0
        return 1.0

    def rotated(self, backward: bool) -> float:
        """Units of rotating queries and keys, uncompiled in three passes of complex float32 (16 bytes a
        value), and of RMSNorm's six, of 36 bytes for 4. TorchTitan repeats keys and values for the queries
        that share them.
        """
        keys = (self.model.qkv_features / self.model.dim - 1) / 2
        uncompiled = (16 * (1 + keys) + 2 * (36 - 4)) / self.work.itemsize * (1 + backward)
        once = 2 * (1 + keys) if self.work.compiled else uncompiled
        return self.model.rotary * once + 2 * (1 + keys) * (not self.model.fused and keys < 1)

    def casts(self, backward: bool) -> float:
        """Part of the casts to float8: torchao gathers inputs of column-wise matrices, and gradients of the
        outputs of row-wise ones, that the rank of their tokens has cast.
        """
        tp, all_casts, here = self.work.degrees.tp, 0.0, 0.0
        for name, shape in cut(self.model.block, tp).items():
            if len(shape) == 2:
                cast, rest = FLOAT8_CAST * shape[0 if backward else 1], FLOAT8_TRANSPOSE * sum(shape)
                is_gathered = not self.model.fused and (name in ROW) == backward
                here += cast / (tp if is_gathered else 1) + rest * backward
                all_casts += cast + rest * backward
        return here / all_casts


def is_nvidias(run: dict[str, Any]) -> bool:
    """True for NVIDIA's programs and Transformer Engine's kernels in others."""
    return "nvidia" in run["source"].lower() or run.get("transformer_engine", False)


def workload(run: dict[str, Any], model: Architecture) -> Workload:
    degrees = Degrees(**run.get("degrees", {}))
    settings = {key: value for key, value in run.items() if key not in LISTS["about"]}
    is_distributed = is_nvidias(run) and isinstance(model, LanguageModel) and degrees.dp_replicate > 1
    if settings.get("zero1") and is_distributed:
        degrees = replace(degrees, dp_replicate=1, dp_shard=degrees.dp_replicate)
        settings |= {"zero1": False, "distributed_optimizer": True}
    if settings.get("ac_mode") == "every_second_product":
        settings["ac_mode"] = "selective"  # and half of the products, in planned_seconds
    batch = run["local_batch"] * degrees.dp * run.get("accumulation", 1)
    values = model.tokens * model.out_features * (not isinstance(model, LanguageModel))
    return PublishedRun(
        model, degrees, global_batch=batch, field_values=values, input_values=values, **settings
    )


def planned_seconds(run: dict[str, Any], work: Workload, cluster: Cluster) -> float:
    """Seconds of a step, with what other programs do that this one has no option for."""
    model, device, tp = work.model, cluster.device, work.degrees.tp
    if not isinstance(model, LanguageModel):
        return step_time(work, cluster).total
    others = OtherDevice(**vars(device), run=run, work=work, model=model)
    cluster = replace(cluster, device=others)
    time = step_time(work, cluster)
    tokens = work.states_at_once * work.rank_tokens * work.itemsize
    more = tokens * model.out_features * LOSS_BYTES / 2 / device.bandwidth
    if run.get("ac_mode") == "every_second_product":  # TorchTitan's "selective op": attention is kept
        more += work.rank_layers * sum(linear_seconds(work, others, False).values()) / 2
    overlapped = run.get("async_tp", False) and tp > 1
    if overlapped and not is_nvidias(run):
        # Products with a reduce-scatter copy partial sums of all tokens to their ranks (torch's
        # _symmetric_memory), which read and add them; in the passes forward, back, and forward again.
        moved = 2 * (3 * tp + 1) * (3 if work.ac_mode == "full" else 2) * tokens * model.dim
        more += work.rank_layers * moved / device.bandwidth
    if work.degrees.cp > 1 and "torchtitan" in run["source"]:
        more += work.rank_layers * context_seconds(work, cluster)
    more *= work.passes * spread(work.degrees.world)
    # Products hide all but the first part of their collectives, or torchao gathers in float8.
    exposed, computing = time.classes.get("exposed tensor parallel", 0.0), sum(time.computing.values())
    part = 1 / tp if overlapped else 0.75 if work.float8 and not model.fused else 1.0
    part *= 1.25 if run.get("ac_mode") == "every_second_product" else 1.0  # which gathers again
    saved = min(exposed * (1 - part), time.classes["matmul"])
    idle = time.classes.get("bubble", 0.0) * (more - saved) / (computing + exposed)
    return time.total + more - saved + idle


def context_seconds(work: Workload, cluster: Cluster) -> float:
    """Return the seconds that torch's context_parallel takes of a block and micro-batch, more than a ring
    that hides its sends: it gathers all keys and values in each pass, repeated for the queries that share
    them, and sends their gradients on in float32. Each is launched behind a kernel of attention that fills
    the device, and so runs when that is done. Parts are added up and copied operator by operator.
    """
    cp, on = work.degrees.cp, route(cluster, work.degrees, "cp")
    values = work.states_at_once * work.rank_tokens * work.model.dim  # of keys; as many of values
    forwards = 2 if work.ac_mode == "full" else 1
    gathers = (forwards + 1) * seconds("all-gather", 2 * work.itemsize * cp * values, on)
    sends = cp * seconds("send", 2 * 4 * values, on)
    # Bytes a value and part: 54 forward and 60 backward (torch's _SDPAMerger), less those of this program.
    copied = cp * values * (forwards * (54 - 26) + 60 - 54)
    return gathers + sends + copied / cluster.device.bandwidth


def judged(run: dict[str, Any], model: Architecture) -> dict[str, Any]:
    work, cluster = workload(run, model), load_cluster(run["cluster"], [MACHINES])
    layout, is_language = work.kind, isinstance(model, LanguageModel)
    rate = work.global_batch / planned_seconds(run, work, cluster)
    mfu = work.sample_flops * rate / (cluster.device.peak["bf16"] * work.degrees.world)
    devices = work.degrees.world
    if run["unit"] != "samples/s":
        rate *= model.tokens / (1 if run["unit"] == "tokens/s" else devices)
    if run["unit"] == "TFLOP/s/GPU":  # all scores count, those that a causal mask leaves out as well
        masked = 2 * model.tokens**2 * model.dim * model.layers * getattr(model, "causal", False)
        rate *= 3 * (model.flops + masked) / model.tokens / 1e12
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
        "kind": f"{layout if is_language else VIT}, {family}",
        "group": run["use"],
        "framework": framework,
        "machine": cluster.device.name,
        "layout": layout,
        "source": run["source"],
        "unlike": run.get("unlike", ""),
        "paper_table": run.get("paper_table", 0),
        # What makes two runs neighbours.
        "parameters": work.model.parameters,
        "tokens": work.model.tokens,
        "devices": devices,
        "peak": cluster.device.peak["bf16"],
        "float8": work.float8,
        "dtype": work.dtype,
        "checkpointing": run.get("ac_mode", "none"),
        "language": is_language,
    }


def label(run: dict[str, Any], work: Workload) -> str:
    named = {axis.removeprefix("dp_"): n for axis, n in vars(work.degrees).items() if n > 1}
    degrees = " ".join(f"{axis}{n}" for axis, n in named.items())
    layout = f"fsdp{work.degrees.world}" if list(named) == ["shard"] else degrees or "one"
    kind = "float8" if work.float8 else {"float32": "fp32", "bfloat16": "bf16"}[work.dtype]
    again = {"none": "", "every_second_product": ", op", "every_n_blocks": f", every {work.segment}"}
    compiled = (" compiled" if work.compiled else "") + (" async" if run.get("async_tp") else "")
    tokens = f"{work.model.tokens / 1024:.0f}k" if work.model.tokens > 9999 else str(work.model.tokens)
    mode = run.get("ac_mode", "none")
    recomputed = again.get(mode, f", {mode}")
    schedule = f", {work.schedule}" if work.degrees.pp > 1 else ""
    return f"{run['model']} {tokens} {run['cluster']}: {layout}, {kind}{compiled}{recomputed}{schedule}"


def error_table(groups: dict[str, list[dict[str, Any]]], known: dict[str, Band]) -> str:
    """Return a line a group: runs, those inside their kind's band, errors of the planner and of copying."""
    lines = {}
    for name, rows in groups.items():
        with_band = [row for row in rows if row["kind"] in known]
        bands = [(known[row["kind"]], 1 + row["error"]) for row in with_band]
        inside = sum(band.fastest <= factor <= band.slowest for band, factor in bands)
        line: dict[str, Any] = {"runs": len(rows), "in band": f"{inside}/{len(with_band)}"}
        for key, suffix in (("error", ""), ("neighbour_error", ", copied")):
            errors = [abs(row[key]) for row in rows if key in row]
            if errors:
                line[f"10 %{suffix}"] = sum(error <= 0.10 for error in errors)
                line[f"20 %{suffix}"] = sum(error <= 0.20 for error in errors)
                line[f"mean{suffix}"] = f"{statistics.mean(errors):.1%}"
                line[f"median{suffix}"] = f"{statistics.median(errors):.1%}"
        lines[name] = line | {"signed median": f"{statistics.median(row['error'] for row in rows):+.1%}"}
    return pd.DataFrame.from_dict(lines, orient="index").to_string()


def summaries(rows: list[dict[str, Any]]) -> str:
    """Return a line a use and one for all, and a line a kind of pairs of which one is the other's anchor."""
    groups = {group: [row for row in rows if row["group"] == group] for group in GROUPS} | {"all": rows}
    known = bands_by_kind([row for row in rows if row["group"] != "held out"])
    factors = {kind: anchored_factors(rows, kind) for kind in KINDS}
    factors["all"] = sum(factors.values(), [])
    pairs = {}
    for kind, values in factors.items():
        pairs[f"anchored, {kind}"] = [{"kind": "", "error": 1 - 1 / factor} for factor in values]
    pairs = {name: errors for name, errors in pairs.items() if errors}
    return f"{error_table(groups, known)}\n\n{error_table(pairs, known)}"


def unseen_summary(unseen: list[dict[str, Any]], rows: list[dict[str, Any]]) -> str:
    """Return a line for all unseen runs, those of papers' tables, and each program, with bands of `rows`."""
    groups = {"unseen": unseen, "of a paper's table": [row for row in unseen if row["paper_table"]]}
    for name in sorted({row["framework"] for row in unseen}):
        groups[name] = [row for row in unseen if row["framework"] == name]
    return error_table(groups, bands_by_kind(rows))


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
    """Bands that plan.py prints, from all runs: of layouts in PyTorch, and anchored by another run."""
    of_kinds = {k.removesuffix(PYTORCH): v for k, v in bands_by_kind(rows).items() if PYTORCH in k}
    of_kinds |= {ANCHORED + kind: band(anchored_factors(rows, kind)) for kind in KINDS}
    return {k: v for k, v in of_kinds.items() if v.runs >= FEWEST and v.slowest <= WIDEST * v.fastest}


def band(*programs: list[float]) -> Band:
    """Nine tenths of the factors of each program are inside; ends are rounded outwards."""
    inner = [sorted(factors)[len(factors) // 20 : len(factors) - len(factors) // 20] for factors in programs]
    low, high = math.floor(1000 * min(map(min, inner))), math.ceil(1000 * max(map(max, inner)))
    factors = [factor for factors in programs for factor in factors]
    return Band(len(factors), low / 1000, round(statistics.median(factors), 3), high / 1000)


def bands_toml(rows: list[dict[str, Any]]) -> str:
    head = (
        "# Written by benchmarks/planner_published.py: seconds of a step over those planned, of published\n"
        "# runs, and of these planned with another of them as an anchor.\n"
        f"# Nine tenths of each program's runs are inside; {FEWEST} runs at least, {WIDEST} wide at most.\n"
    )
    tables = (
        f'"{kind}" = {{ ' + ", ".join(f"{key} = {value}" for key, value in vars(band).items()) + " }\n"
        for kind, band in bands(rows).items()
    )
    return head + "".join(tables)


def peaks_table() -> str:
    """Peaks of reserved memory as TorchTitan prints them, GiB. None is held out."""
    lines = []
    for run, model in published_runs(RUNS):
        if "peak_gib" not in run:
            continue
        work, more = workload(run, model), 0.0
        if is_half := run.get("ac_mode") == "every_second_product":
            # Recomputes wk, wo and w3: keeps attention's output, wq, wv, w1 and w2 next to the block's input.
            units = 2 + (model.qkv_features / model.dim - 1) / 2 + model.mlp_dim / model.dim + 1
            work = work.replace(ac_mode="full")
            more = work.rank_layers * units * unit_bytes(work)
        moments = memory(work).moments
        # Logits are in float32, with their log-softmax and its gradient, with tensor parallelism once more;
        # of a compiled loss there is the gradient in half precision. Blocks of 405B are gathered in float8.
        logits = 4 * work.states_at_once * work.rank_tokens * model.out_features
        if work.degrees.pp == 1:
            parts = 0.5 if run.get("compiled_loss", False) else 3 + (work.degrees.tp > 1)
            moments["loss"]["loss"] = logits * parts
        elif work.float8:
            gathered = work.rank_layers * padded(cut(model.block, work.degrees.tp), work.fsdp_ranks)
            moments = {name: {**parts, "float8": -gathered} for name, parts in moments.items()}
        sums = [sum(parts.values()) for parts in moments.values() if "activations" in parts or not is_half]
        peak, published = (max(sums) + more) / GIB, run["peak_gib"]
        planned = peak * (1 + ALLOCATOR_SLACK)
        line = {"peak of reserved memory, GiB": label(run, work), "published": published, "planned": planned}
        lines.append(line | {"slack": planned - peak, "error": f"{planned / published - 1:+.1%}"})
    return pd.DataFrame(lines).to_string(index=False, float_format="%.1f")


def main() -> None:
    rows = judged_runs()
    unseen = judged_runs(UNSEEN, rows)
    record("planner_published", rows + unseen)
    BANDS.write_text(bands_toml(rows), encoding="utf-8")
    # Tokens/s of one GPU, or samples/s of all; "copied": with the nearest known run's utilisation.
    names = {"what": "run", "predicted": "planned", "neighbour_error": "copied", "group": "use"}
    frame: Any = pd.DataFrame(rows + unseen).rename(columns=names)
    frame = frame[["run", "published", "planned", "unit", "error", "copied", "use", "kind", "framework"]]
    formatters: Any = dict.fromkeys(("error", "copied"), "{:+.1%}".format)
    formatters |= dict.fromkeys(("published", "planned"), "{:,.5g}".format)
    print(frame.to_string(index=False, formatters=formatters))
    print(summaries(rows), unseen_summary(unseen, rows), peaks_table(), sep="\n\n")


if __name__ == "__main__":
    main()
