"""One plain paragraph: what a step loses most to, and the keys of the configuration that change it."""

from collections.abc import Iterator, Sequence

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
from traces.events import DATA, Trace
from traces.timeline import Timeline
from traces.work import Rates, operator_table, work_by_class

WORTH_TELLING = 0.03  # of a step
SENTENCES = 4
BUSY = 1.5  # times: mean over least time of the same work, above which something else takes the device
UNEVEN = 0.1  # of a step: more between the computing of two ranks, and the others wait for one
# Words of a cause of idle time -> what to do; the first that fits.
GAP_FIXES = {
    "wait of": "keep the value on the device, and read it on logging steps (metrics.log_freq)",
    "the host in": "that call of the host is slow; nothing is launched until it returns",
    "gap after": "nothing of torch runs there, so it is the loop's own code that takes long, or waits",
    "gap": "nothing of torch runs there: Python works or waits, or another process has the processor",
}
Loss = tuple[float, str]  # milliseconds a step that could be had, and how


def advice(timeline: Timeline, rates: Rates, ranks: Sequence[Timeline] = ()) -> str:
    """The largest losses first. `ranks`: the timelines of all ranks, this one included."""
    step = timeline.step_milliseconds
    losses = [data(timeline), communication(timeline), between(timeline), around(timeline), *gaps(timeline)]
    losses += [*slow_classes(timeline, rates), *uneven_ranks(ranks)]
    worth = sorted((loss for loss in losses if loss[0] > WORTH_TELLING * step), reverse=True)
    sentences = [f"{sentence} (up to {time / step:.0%} of a step)." for time, sentence in worth[:SENTENCES]]
    if not sentences:
        sentences = [
            f"Nothing that waits, or that is far from its floor, takes {WORTH_TELLING:.0%} of a step."
        ]
    return " ".join(sentences)


def data(timeline: Timeline) -> Loss:
    """The loop waits for a batch."""
    cause = "the loader's threads or processes are slower than the step"
    fix = "raise data.num_workers"
    if any("SingleProcess" in event.name for event in timeline.trace.loop_events):
        cause = "the training process reads them itself (data.num_workers = 0)"
        fix = "read ahead with data.num_workers, or keep all in memory with data.cache_gib"
    time = timeline.by_class[DATA_WAIT]
    return time, f"The loop waits {time:.1f} ms a step for data (span {DATA}): {cause}; {fix}"


def communication(timeline: Timeline) -> Loss:
    """Collectives that nothing hides."""
    exposed, hidden = timeline.by_class[COMMUNICATION], timeline.hidden_communication
    fix = "send less often: accumulate with training.global_batch_size"
    if any(event.name.startswith("FSDP::") for event in timeline.trace.loop_events):
        fix = (
            'gather less often with parallelism.fsdp_reshard_after_forward = "never", or shard over fewer '
            "ranks (parallelism.data_parallel_replicate_degree)"
        )
    larger = "a larger training.local_batch_size computes more for the same bytes"
    times = (
        f"{exposed:.1f} ms a step of communication are exposed, {hidden / (hidden + exposed or 1):.0%} of it"
    )
    return exposed, f"{times} is hidden: {fix}; {larger}"


def between(timeline: Timeline) -> Loss:
    """Idle time that is spread between operators."""
    time = sum(t for cause, t in timeline.idle_by_cause.items() if cause.startswith("Python and dispatch"))
    fix = "a larger training.local_batch_size gives each operator more to do"
    if not is_compiled(timeline):
        fix = f"compile.enable = true launches fewer of them; {fix}"
    idle = f"leave the {device(timeline.trace)} idle {time:.1f} ms a step"
    return time, f"Python and the dispatch of operators {idle}: {fix}"


def around(timeline: Timeline) -> Loss:
    """Logging, saving, validation."""
    time = timeline.by_class[AROUND]
    fix = "do it less often: metrics.log_freq, checkpoint.interval, validation.interval"
    return time, f"Logging, saving and validation take {time:.1f} ms a step: {fix}"


def gaps(timeline: Timeline) -> Iterator[Loss]:
    """Idle time of one part of the loop with one cause."""
    for cause, time in timeline.idle_by_cause.items():
        if fix := next((fix for words, fix in GAP_FIXES.items() if words in cause), ""):
            idles = f"The {device(timeline.trace)} idles {time:.1f} ms a step"
            yield time, f"{idles} in a {cause}: {fix}"


def slow_classes(timeline: Timeline, rates: Rates) -> Iterator[Loss]:
    """Computation above its floor; where the floor is not known, half of what may be fused away."""
    work, fixes, fusible = work_by_class(timeline, rates), class_fixes(timeline), not is_compiled(timeline)
    if (spread := spread_of_calls(timeline)) > BUSY:
        lost = sum(timeline.by_class[name] for name in fixes) * (1 - 1 / spread)
        times = f"The same multiplication takes {spread:.1f} x as long on average as at best"
        yield lost, f"{times}: something else uses the {device(timeline.trace)}"
        return
    for name, fix in fixes.items():
        time, floor = timeline.by_class[name], work[name].floor
        takes = f"{name} takes {time:.1f} ms a step"
        if floor is not None and time > floor:
            yield time - floor, f"{takes}, {time / floor:.2f} x its floor: {fix}"
        elif floor is None and name in (ELEMENTWISE, OPTIMIZER, COPIES) and fusible:
            yield time / 2, f"{takes}: {fix}"


def class_fixes(timeline: Timeline) -> dict[str, str]:
    """Class -> what makes it faster."""
    classes = operator_table(timeline)["class"]  # by operator
    gemm = "larger matrices (training.local_batch_size, model.dim) come nearer to it"
    if any("float" in operator.args.get("Input type", [])[:1] for operator in classes.index[classes == GEMM]):
        gemm += ', training.mixed_precision_param = "bfloat16" lowers it'
    attention = 'at few tokens model.attention_backend = "math" is faster on a CPU'
    if any(operator.name == "aten::bmm" for operator in classes.index[classes == ATTENTION]):
        attention = 'model.attention_backend = "math" is for few tokens on a CPU; compare "sdpa"'
    elif timeline.trace.on_gpu:
        attention = 'set model.attention_backend = "auto": it takes the fastest'
    fused = "compile.enable = true fuses such operators"
    if is_compiled(timeline):
        fused = "what is left is outside the compiled blocks, or limited by memory"
    optimizer = "update less often, with more samples a step (training.global_batch_size)"
    return {GEMM: gemm, ATTENTION: attention, ELEMENTWISE: fused, COPIES: fused, OPTIMIZER: optimizer}


def spread_of_calls(timeline: Timeline) -> float:
    """Mean over least time of multiplications of the same shapes, weighted by time."""
    table = operator_table(timeline)
    table = table[table["name"].isin(["aten::mm", "aten::addmm"])]
    least = table.groupby("call")["ms"].transform("min").sum()
    return table["ms"].sum() / least if least else 1.0


def uneven_ranks(ranks: Sequence[Timeline]) -> Iterator[Loss]:
    """One rank computes longer than another, which waits for it in a collective."""
    busy = sorted(
        (t.step_milliseconds - t.by_class[COMMUNICATION], t.trace.rank, t.step_milliseconds) for t in ranks
    )
    if not busy:
        return
    (least, fast, _), (most, slow, step) = busy[0], busy[-1]
    if most - least > UNEVEN * step:
        behind = f"Rank {slow} is {most - least:.1f} ms a step behind rank {fast}, which waits for it"
        yield most - least, f"{behind}: compare the two traces; one machine may be slower or busy"


def is_compiled(timeline: Timeline) -> bool:
    return any(event.name.startswith("Torch-Compiled") for event in timeline.trace.host_events())


def device(trace: Trace) -> str:
    return "GPU" if trace.on_gpu else "CPU"
