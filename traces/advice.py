"""One plain paragraph: what a step loses most to, and the keys of the configuration that change it."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from traces.classes import (
    AROUND,
    ATTENTION,
    COMMUNICATION,
    COPIES,
    DATA_WAIT,
    ELEMENTWISE,
    GEMM,
    OPTIMIZER,
)
from traces.events import DATA, Event, Trace
from traces.timeline import Timeline
from traces.work import Rates, dims, operator_times, work_by_class

WORTH_SAYING = 0.03  # of a step
SENTENCES = 4
BUSY = 1.5  # times: mean over least time of the same work, above which something else takes the device
UNEVEN = 0.1  # of a step: more between the computing of two ranks, and the others wait for one


class Loss(NamedTuple):
    """What could be had, and how."""

    milliseconds: float  # a step
    sentence: str


def advice(timeline: Timeline, rates: Rates, ranks: Sequence[Timeline] = ()) -> str:
    """The largest losses first. `ranks`: the timelines of all ranks, this one included."""
    step = timeline.step_milliseconds
    losses = [
        loss
        for find in (data, communication, gaps, between, around, slow_classes)
        for loss in find(timeline, rates)
    ]
    losses += uneven_ranks(ranks)
    worth = sorted((loss for loss in losses if loss.milliseconds > WORTH_SAYING * step), reverse=True)
    said = [
        f"{loss.sentence} (up to {loss.milliseconds / step:.0%} of a step)." for loss in worth[:SENTENCES]
    ]
    if not said:
        said = [f"Nothing that waits, or that is far from its floor, takes {WORTH_SAYING:.0%} of a step."]
    return " ".join([*said, *waits(timeline)])


def data(timeline: Timeline, rates: Rates) -> list[Loss]:
    """The loop waits for a batch."""
    own = any("SingleProcess" in event.name for event in timeline.trace.threads[timeline.trace.main])
    if own:
        who = "the training process reads them itself (data.num_workers = 0)"
        fix = (
            "let processes read ahead with data.num_workers, or keep the period in memory with data.cache_gib"
        )
    else:
        who = "the loader's processes are slower than the step"
        fix = "raise data.num_workers, and data.prefetch_factor where reading is uneven"
    time = timeline.by_class[DATA_WAIT]
    return [Loss(time, f"The loop waits {time:.1f} ms a step for data (span {DATA}): {who}; {fix}")]


def communication(timeline: Timeline, rates: Rates) -> list[Loss]:
    """Collectives that nothing hides."""
    exposed, hidden = timeline.by_class[COMMUNICATION], timeline.hidden_communication
    sharded = any(e.name.startswith("FSDP::") for e in timeline.trace.threads[timeline.trace.main])
    fix = (
        'gather less often with parallelism.fsdp_reshard_after_forward = "never", or shard over fewer ranks '
        "(parallelism.data_parallel_replicate_degree)"
        if sharded
        else "send less often: accumulate with training.global_batch_size"
    )
    part = hidden / (hidden + exposed) if hidden + exposed else 0.0
    sentence = (
        f"{exposed:.1f} ms a step of communication are exposed, {part:.0%} of it is hidden: {fix}; "
        "a larger training.local_batch_size computes more for the same bytes"
    )
    return [Loss(exposed, sentence)]


def gaps(timeline: Timeline, rates: Rates) -> list[Loss]:
    """Idle time that has one place and one cause."""
    found, what = [], device(timeline.trace)
    for cause, time in timeline.idle_by_cause.items():
        fix = next((fix for words, fix in GAP_FIXES.items() if words in cause), "")
        if fix:
            found.append(Loss(time, f"The {what} idles {time:.1f} ms a step in a {cause}: {fix}"))
    return found


# Words of a cause -> what to do; the first that fits.
GAP_FIXES = {
    "wait of": "keep the value on the device, and read it on logging steps (metrics.log_freq)",
    "the host in": "that call of the host is slow; nothing is launched until it returns",
    "gap after": "nothing of torch runs there, so it is the loop's own code that takes long, or waits",
    "gap": "nothing of torch runs there: Python works or waits, or another process has the processor",
}


def between(timeline: Timeline, rates: Rates) -> list[Loss]:
    """Idle time that is spread between operators."""
    time = sum(t for cause, t in timeline.idle_by_cause.items() if cause.startswith("Python and dispatch"))
    fix = "a larger training.local_batch_size gives each operator more to do"
    if not is_compiled(timeline):
        fix = f"compile.enable = true launches fewer of them; {fix}"
    idle = f"leave the {device(timeline.trace)} idle {time:.1f} ms a step"
    return [Loss(time, f"Python and the dispatch of operators {idle}: {fix}")]


def is_compiled(timeline: Timeline) -> bool:
    return any(event.name.startswith("Torch-Compiled") for event in timeline.trace.host_events())


def around(timeline: Timeline, rates: Rates) -> list[Loss]:
    """Logging, saving, validation."""
    time = timeline.by_class[AROUND]
    fix = "do it less often: metrics.log_freq, checkpoint.interval, validation.interval"
    return [Loss(time, f"Logging, saving and validation take {time:.1f} ms a step: {fix}")]


def slow_classes(timeline: Timeline, rates: Rates) -> list[Loss]:
    """Computation above its floor; where the floor is not known, half of what may be fused away."""
    work, found = work_by_class(timeline, rates), []
    if (spread := spread_of_calls(timeline)) > BUSY:
        lost = sum(timeline.by_class[name] for name in CLASS_FIXES) * (1 - 1 / spread)
        times = f"The same multiplication takes {spread:.1f} x as long on average as at best"
        return [Loss(lost, f"{times}: something else uses the {device(timeline.trace)}")]
    for name, fix in CLASS_FIXES.items():
        time, floor = timeline.by_class[name], work[name].floor
        if floor is not None and time > floor:
            above = f"{name} takes {time:.1f} ms a step, {time / floor:.2f} x its floor"
            found.append(Loss(time - floor, f"{above}: {fix(timeline)}"))
        elif floor is None and name in (ELEMENTWISE, OPTIMIZER, COPIES) and not is_compiled(timeline):
            found.append(Loss(time / 2, f"{name} takes {time:.1f} ms a step: {fix(timeline)}"))
    return found


def operators_of(timeline: Timeline, name: str) -> list[Event]:
    return [piece.operator for piece in timeline.pieces if piece.name == name and piece.operator]


def fix_gemm(timeline: Timeline) -> str:
    types = [operator.args.get("Input type", []) for operator in operators_of(timeline, GEMM)]
    larger = "larger matrices (training.local_batch_size, model.dim) come nearer to it"
    in_float32 = any("float" in kinds[:1] for kinds in types)
    return f'{larger}, training.mixed_precision_param = "bfloat16" lowers it' if in_float32 else larger


def spread_of_calls(timeline: Timeline) -> float:
    """Mean over least time of multiplications of the same shapes, weighted by time."""
    groups: dict[str, list[float]] = defaultdict(list)
    for operator, milliseconds in operator_times(timeline).items():
        if operator.name in ("aten::mm", "aten::addmm"):
            groups[f"{operator.name} {dims(operator)}"].append(milliseconds)
    least = sum(len(times) * min(times) for times in groups.values())
    return sum(sum(times) for times in groups.values()) / least if least else 1.0


def fix_attention(timeline: Timeline) -> str:
    if any(operator.name == "aten::bmm" for operator in operators_of(timeline, ATTENTION)):
        return 'model.attention_backend = "math" is for few tokens on a CPU; compare "sdpa"'
    if timeline.trace.on_gpu:
        return 'set model.attention_backend = "auto": it takes the fastest'
    return 'at few tokens model.attention_backend = "math" is faster on a CPU'


def fix_elementwise(timeline: Timeline) -> str:
    if is_compiled(timeline):
        return "what is left is outside the compiled blocks, or limited by memory"
    return "compile.enable = true fuses such operators"


def fix_optimizer(timeline: Timeline) -> str:
    return 'optimizer.implementation = "fused", or steps that take more samples (training.global_batch_size)'


CLASS_FIXES: dict[str, Callable[[Timeline], str]] = {
    GEMM: fix_gemm,
    ATTENTION: fix_attention,
    ELEMENTWISE: fix_elementwise,
    COPIES: fix_elementwise,
    OPTIMIZER: fix_optimizer,
}


def uneven_ranks(ranks: Sequence[Timeline]) -> list[Loss]:
    """One rank computes longer than another, which waits for it in a collective."""
    if len(ranks) < 2:
        return []
    busy = {t: t.step_milliseconds - t.by_class[COMMUNICATION] for t in ranks}
    slow, fast = max(ranks, key=lambda t: busy[t]), min(ranks, key=lambda t: busy[t])
    late = busy[slow] - busy[fast]
    if late < UNEVEN * slow.step_milliseconds:
        return []
    sentence = (
        f"Rank {slow.trace.rank} is {late:.1f} ms a step behind rank {fast.trace.rank}, which waits for it"
    )
    return [Loss(late, f"{sentence}: compare the two traces; one machine may be slower or busy")]


def waits(timeline: Timeline) -> list[str]:
    """Said even where they cost nothing yet: on a CPU nobody waits, and on a GPU it is a matter of luck."""
    found = [wait for wait in timeline.waits if wait.count >= len(timeline.windows)]
    if not found:
        return []
    places = ", ".join(
        f"{w.what} {w.count / len(timeline.windows):.0f} x a step {w.where}" for w in found[:3]
    )
    if timeline.trace.on_gpu:
        return [f"The host waits for the device outside logging steps: {places}."]
    return [f"Python reads values of tensors: {places}; a GPU would be waited for each time."]


def device(trace: Trace) -> str:
    return "GPU" if trace.on_gpu else "CPU"
