"""What plan.py prints: memory by component, the step by class, speed, and what the whole run costs."""

from typing import Any

from planning.clusters import Cluster
from planning.compute import hardware_flops
from planning.memory import GIB, Memory
from planning.search import Plan, capacity
from planning.step_time import StepTime
from planning.workload import Workload


def describe(work: Workload, cluster: Cluster) -> str:
    """The job in two lines."""
    model = work.model
    return (
        f"{model.parameters / 1e6:,.0f} M parameters, {model.tokens} tokens, "
        f"{3 * model.flops() / 1e12:,.1f} TFLOP a sample; "
        f"{cluster.name}: {cluster.devices} x {cluster.device.name}\n"
        f"{layout(work)}; global batch {work.global_batch} = {work.local_batch} x {work.degrees.dp} ranks x "
        f"{work.accumulation}; {work.dtype}, checkpointing {checkpointing(work)}"
    )


def layout(work: Workload) -> str:
    """As short as it can be said: "dp_shard 8 x tp 4"."""
    named = {axis: n for axis, n in vars(work.degrees).items() if n > 1}
    said = " x ".join(f"{axis} {n}" for axis, n in named.items()) or "one rank"
    if work.degrees.pp > 1:
        said += f" ({work.schedule}, {work.micro_batches} micro-batches of {work.micro_batch})"
    return said + (", zero1" if work.zero1 else "") + (", cpu_offload" if work.offload else "")


def checkpointing(work: Workload) -> str:
    return f"every {work.every_n} blocks" if work.ac_mode == "every_n_blocks" else work.ac_mode


def memory_table(memory: Memory, cluster: Cluster) -> str:
    """Components at the peak, and the peaks of all moments of the step."""
    room = capacity(cluster)
    rows = [f"{'memory of a rank':<36}{'GiB':>10}   at the peak: {memory.peak_moment}"]
    parts = sorted(memory.components.items(), key=lambda item: -item[1])
    rows += [
        f"  {name:<34}{value / GIB:>10.2f}"
        for name, value in parts
        if value > 0.005 * GIB or memory.peak < GIB
    ]
    verdict = "fits" if memory.peak <= room else "DOES NOT FIT"
    rows.append(
        f"  {'peak':<34}{memory.peak / GIB:>10.2f}   {verdict}: {room / GIB:.2f} of a device can be used"
    )
    moments = ", ".join(f"{name} {sum(m.values()) / GIB:.2f}" for name, m in memory.moments.items())
    rows.append(f"  moments: {moments}")
    host = ", ".join(f"{name} {value / GIB:.2f}" for name, value in memory.host.items() if value)
    return "\n".join([*rows, f"  host memory a rank: {host}"] if host else rows)


def time_table(work: Workload, time: StepTime, cluster: Cluster) -> str:
    """Classes add up to the step."""
    rows = [f"{'a step':<36}{'s':>10}{'share':>9}"]
    for name, value in sorted(time.classes.items(), key=lambda item: -item[1]):
        rows.append(f"  {name:<34}{value:>10.3f}{value / time.total:>9.1%}")
    again = hardware_flops(work) / (3 * work.model.flops()) - 1  # attention's own recomputation counts
    ratio = time.communication / max(time.computation, 1e-12)
    peak = cluster.device.peak["bf16"]
    return "\n".join(
        [
            *rows,
            f"  {'total':<34}{time.total:>10.3f}",
            f"{time.samples_per_second:,.2f} samples/s, MFU {time.mfu(work, peak):.1%} "
            f"of {peak / 1e12:,.0f} TFLOP/s; kernels run {again:.0%} more FLOPs than the model has",
            f"communication / computation {ratio:.3f}; exposed communication {time.exposed:.3f} s a step "
            f"({time.exposed / time.total:.1%})",
        ]
    )


def layouts_table(plans: list[Plan], cluster: Cluster) -> str:
    rows = [
        f"{'':>3} {'layout':<44}{'batch':>6}{'accum':>6}{'checkpointing':>16}{'GiB':>8}"
        f"{'step s':>9}{'MFU':>7}{'exposed':>9}"
    ]
    for number, plan in enumerate(plans, 1):
        work, time = plan.work, plan.time
        rows.append(
            f"{number:>3} {layout(work):<44}{work.micro_batch:>6}{work.accumulation:>6}"
            f"{checkpointing(work):>16}{plan.memory.peak / GIB:>8.1f}{time.total:>9.3f}"
            f"{time.mfu(work, cluster.device.peak['bf16']):>7.1%}{time.exposed / time.total:>9.1%}"
        )
    return "\n".join(rows)


def reason(first: Plan, second: Plan) -> str:
    """Why the first layout stands before the second: the classes in which they differ most."""
    names = first.time.classes | second.time.classes
    gains = {name: second.time.classes.get(name, 0) - first.time.classes.get(name, 0) for name in names}
    largest = sorted(gains.items(), key=lambda item: -abs(item[1]))[:2]
    said = ", ".join(f"{name} {-gain:+.3f} s" for name, gain in largest if abs(gain) > 1e-4) or "nothing else"
    gap = first.time.total / second.time.total - 1
    simpler = " and it is simpler" if first.techniques < second.techniques else ""
    if gap > 0:
        return (
            f"1 before 2: {gap:.1%} slower, simpler ({first.techniques} techniques, not {second.techniques})"
        )
    return f"1 before 2: {-gap:.1%} faster ({said}){simpler}"


def keys(work: Workload) -> str:
    """The options that give this layout to train.py."""
    d = work.degrees
    options = {
        "parallelism.data_parallel_replicate_degree": d.dp_replicate,
        "parallelism.tensor_parallel_degree": d.tp,
        "parallelism.context_parallel_degree": d.cp,
        "parallelism.pipeline_parallel_degree": d.pp,
    }
    said = [f"--{key} {value}" for key, value in options.items() if value > 1]
    said += [f"--parallelism.fsdp_reshard_after_forward {work.reshard}"] if work.reshard != "default" else []
    said += [f"--parallelism.pipeline_parallel_microbatch_size {work.micro_batch}"] if d.pp > 1 else []
    said += [
        f"--training.local_batch_size {work.local_batch}",
        f"--activation_checkpoint.mode {work.ac_mode}",
    ]
    return " ".join(said)


def as_json(plan: Plan, cluster: Cluster, cost: dict[str, Any]) -> dict[str, Any]:
    """Everything in base units: bytes, seconds, dollars."""
    work, time = plan.work, plan.time
    return {
        "cluster": cluster.name,
        "devices": cluster.devices,
        "degrees": vars(work.degrees),
        "local_batch_size": work.local_batch,
        "micro_batch_size": work.micro_batch,
        "global_batch_size": work.global_batch,
        "accumulation": work.accumulation,
        "activation_checkpoint": work.ac_mode,
        "parameters": work.model.parameters,
        "model_flops_per_sample": 3 * work.model.flops(),
        "hardware_flops_per_sample": hardware_flops(work),
        "memory": {"peak": plan.memory.peak, "moment": plan.memory.peak_moment, **plan.memory.components},
        "host_memory": plan.memory.host,
        "capacity": capacity(cluster),
        "fits": plan.memory.peak <= capacity(cluster),
        "step_seconds": time.total,
        "classes": time.classes,
        "communication_seconds": time.communication,
        "exposed_seconds": time.exposed,
        "samples_per_second": time.samples_per_second,
        "mfu": time.mfu(work, cluster.device.peak["bf16"]),
        "cost": cost,
    }
