"""Advice on the largest losses of time in a step, with the configuration keys that reduce them."""

from collections.abc import Iterator

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
from traces.events import DATA
from traces.timeline import Timeline
from traces.work import Rates, work_by_class

SMALLEST = 0.03  # of a step
SENTENCES = 4
# What makes a class of computation faster, where it is far from its floor.
CLASS_FIXES = {
    GEMM: "larger matrices (training.local_batch_size, model.dim) come nearer to it, "
    'training.mixed_precision_param = "bfloat16" lowers it',
    ATTENTION: 'compare the backends of model.attention_backend ("math" is for few tokens on a CPU)',
    ELEMENTWISE: "compile.enable = true fuses such operators",
    COPIES: "compile.enable = true fuses such operators",
    OPTIMIZER: "update less often, with more samples a step (training.global_batch_size)",
}
# Words of a cause of idle time -> what to do; the first that fits.
GAP_FIXES = {
    "wait of": "keep the value on the device, and read it on logging steps (metrics.log_freq)",
    "gap": "nothing of torch runs there: Python works or waits, or another process has the processor",
}
SEND = (
    "accumulate with training.global_batch_size, raise training.local_batch_size, or with FSDP gather less "
)
SEND += 'often (parallelism.fsdp_reshard_after_forward = "never"; parallelism.data_parallel_replicate_degree)'
READ = "read ahead with more threads (data.num_workers)"
RARELY = "do it less often: metrics.log_freq, checkpoint.interval, validation.interval"
Loss = tuple[float, str]  # milliseconds per step that could be saved, and how


def advice(timeline: Timeline, rates: Rates) -> str:
    """Return the largest losses as text, the largest first."""
    step = timeline.step_milliseconds
    losses = [*avoidable_parts(timeline), *idle_causes(timeline), *slow_classes(timeline, rates)]
    worth = sorted((loss for loss in losses if loss[0] > SMALLEST * step), reverse=True)
    if not worth:
        return f"Nothing that waits, or that is far from its floor, takes {SMALLEST:.0%} of a step."
    return " ".join(f"{text} (up to {time / step:.0%} of a step)." for time, text in worth[:SENTENCES])


def avoidable_parts(timeline: Timeline) -> Iterator[Loss]:
    """Yield waiting for data, exposed collectives, and logging, saving, validation."""
    time = timeline.by_class
    yield time[DATA_WAIT], f"The loop waits {time[DATA_WAIT]:.1f} ms a step for data (span {DATA}): {READ}"
    yield time[COMMUNICATION], f"{time[COMMUNICATION]:.1f} ms a step of communication are exposed: {SEND}"
    yield time[AROUND], f"Logging, saving and validation take {time[AROUND]:.1f} ms a step: {RARELY}"


def idle_causes(timeline: Timeline) -> Iterator[Loss]:
    """Yield idle time between operators together, and each other cause of its own."""
    device, dispatch = "GPU" if timeline.trace.on_gpu else "CPU", 0.0
    for cause, time in timeline.idle_by_cause.items():
        if cause.startswith("Python and dispatch"):
            dispatch += time
        elif fix := next((fix for words, fix in GAP_FIXES.items() if words in cause), ""):
            yield time, f"The {device} idles {time:.1f} ms a step in a {cause}: {fix}"
    fix = "a larger training.local_batch_size gives each operator more to do"
    fix = fix if is_compiled(timeline) else f"compile.enable = true launches fewer of them; {fix}"
    text = f"Python and the dispatch of operators leave the {device} idle {dispatch:.1f} ms a step"
    yield dispatch, f"{text}: {fix}"


def slow_classes(timeline: Timeline, rates: Rates) -> Iterator[Loss]:
    """Yield computation above its floor; where the floor is not known, half of what may be fused away."""
    work, fusible = work_by_class(timeline, rates), not is_compiled(timeline)
    for name, fix in CLASS_FIXES.items():
        time, floor = timeline.by_class[name], work[name].floor
        takes = f"{name} takes {time:.1f} ms a step"
        if floor is not None and time > floor:
            yield time - floor, f"{takes}, {time / floor:.2f} x its floor: {fix}"
        elif floor is None and name in (ELEMENTWISE, OPTIMIZER, COPIES) and fusible:
            yield time / 2, f"{takes}: {fix}"


def is_compiled(timeline: Timeline) -> bool:
    return any(event.name.startswith("Torch-Compiled") for event in timeline.trace.host_events())
