"""The batch script of a run, from launch/slurm.sbatch."""

import argparse
import os
import shlex
from pathlib import Path

from command_line import load_config
from config import Config
from errors import ConfigError, refuse
from launch.forms import filled
from launch.options import num_ranks, number, setting, word
from project_folder import PROJECT

SUFFIX = ".sbatch"
SUBMIT = ("sbatch",)
LONGEST_WARNING = 300  # seconds before the end of its time that a job is told
MOST_RUNS = 1000  # of an array: Slurm's MaxArraySize, unless a site has raised it
THE_USERS = "${ROSSBY_PYTHON:-}"  # whatever it is where the job is submitted
name = word(r"[\w.,@+-]+", "a name without spaces")
time = word(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}", "minutes, hours:minutes:seconds or days-hours")


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--time", type=time, default="12:00:00", help="of one start, as Slurm writes it (default: 12:00:00)")
    add("--partition", type=name, help="or several, a,b: the job runs in the one that has room first")
    add(
        "--on-demand-partition",
        type=name,
        metavar="P",
        help="its first node is from here, the others are not",
    )
    add("--account", type=name)
    add("--tasks", choices=("node", "gpu"), default="node", help="one a node, or one a GPU (default: node)")
    add("--members", type=number(1), metavar="N", help="an array of runs, each with a seed of its own")
    add("--sweep", metavar="FILE", help="an array of runs: a line of the file is the options of one")
    add("--at-once", type=number(1), metavar="N", help="runs of an array that may run at the same time")
    more = "any other option of sbatch, such as qos=regular or mem=0; may be given again"
    add("--directive", type=setting, action="append", default=[], metavar="NAME=VALUE", help=more)


def check(options: argparse.Namespace) -> None:
    """ConfigError: options that do not go together."""
    if options.members and options.sweep:
        refuse("--sweep", options.sweep, "and --members: give one of them")
    if options.at_once and not (options.members or options.sweep):
        refuse("--at-once", options.at_once, "there is no array; add --members or --sweep")
    if not options.on_demand_partition:
        return
    for option in ("members", "sweep"):
        if getattr(options, option):
            reason = "Slurm has no arrays of jobs in two partitions; leave --on-demand-partition out"
            refuse(f"--{option}", getattr(options, option), reason)
    if options.tasks == "gpu" or options.nodes == 1 or not options.partition:
        reason = "needs --nodes 2 at least, --partition for the others, and --tasks node"
        refuse("--on-demand-partition", options.on_demand_partition, reason)


def seconds_of(limit: str) -> int:
    """Slurm's forms of a time: m, m:s, h:m:s, d-h, d-h:m, d-h:m:s."""
    days, dash, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return 86400 * int(days or 0) + sum(part * unit for part, unit in zip(parts, units, strict=False))


def write(options: argparse.Namespace, config: Config, arguments: list[str]) -> str:
    """arguments: of train.py, whose relative paths begin at the current folder, as the job does."""
    check(options)
    runs = runs_of(options, config, arguments)
    ranks = num_ranks(options)
    warning = min(LONGEST_WARNING, seconds_of(options.time) // 4)
    again = 'scontrol requeue "$SLURM_JOB_ID"'
    lost = 'echo "rossby: not queued again: checkpoint.enable is false, and it would begin anew" >&2'
    return filled(
        "slurm.sbatch",
        name=f"rossby-{Path(config.job.config_file).stem}",
        nodes=options.nodes,
        ranks=ranks,
        warning=warning,
        directives="\n".join(directives(options, config, len(runs), warning)),
        folder=shlex.quote(os.getcwd()),
        log="rossby-%A_%a.log" if runs else "rossby-%j.log",
        project=shlex.quote(str(PROJECT)),
        arguments=shlex.join(arguments),
        variants=variants(runs),
        python=shlex.quote(os.environ["ROSSBY_PYTHON"]) if os.environ.get("ROSSBY_PYTHON") else THE_USERS,
        fabric=options.fabric or "",
        nccl_debug="INFO" if options.nccl_debug else "",
        restarts=options.restarts,
        cpus_per_task=ranks * options.cpus_per_rank,
        components=" --het-group=0,1" if options.on_demand_partition else "",
        requeue=again if config.checkpoint.enable else lost,
        start=filled(f"task_a_{options.tasks}.sh", cpus_per_rank=options.cpus_per_rank).rstrip(),
    )


def directives(options: argparse.Namespace, config: Config, runs: int, warning: int) -> list[str]:
    """Lines for sbatch. A job in two partitions has two components, and says for each what it needs."""
    shared = [f"time={options.time}", *([f"account={options.account}"] if options.account else [])]
    shared += ["requeue" if config.checkpoint.enable else "no-requeue", *options.directive]
    if runs:
        shared.append(f"array=0-{runs - 1}" + (f"%{options.at_once}" if options.at_once else ""))
    if not options.on_demand_partition:
        asked = shared + component(options, options.nodes, options.partition)
        return [f"#SBATCH --{each}" for each in asked]
    first = shared + component(options, 1, options.on_demand_partition)
    others = shared + component(options, options.nodes - 1, options.partition)
    lines = [f"#SBATCH --{each}" for each in first]
    others.append(f"signal=USR1@{warning}")
    return [*lines, "#SBATCH hetjob", *(f"#SBATCH --{each}" for each in others)]  # all below is the others'


def component(options: argparse.Namespace, nodes: int, partition: str | None) -> list[str]:
    """What some nodes are asked for."""
    asked = [f"partition={partition}"] if partition else []
    asked += [f"nodes={nodes}", "ntasks-per-node=1"]  # a step of one task a GPU says so itself
    asked += [f"cpus-per-task={num_ranks(options) * options.cpus_per_rank}"]
    return asked + ([f"gpus-per-node={options.gpus_per_node}"] if options.gpus_per_node else [])


def runs_of(options: argparse.Namespace, config: Config, arguments: list[str]) -> list[list[str]]:
    """The options that each run of an array has beside the common ones; none: a single run."""
    if options.members:
        seeds = range(config.training.seed, config.training.seed + options.members)
        own = [["--training.seed", str(seed)] for seed in seeds]
        return [
            [*each, "--job.dump_folder", f"{config.dump_folder}/member-{k}"] for k, each in enumerate(own)
        ]
    if not options.sweep:
        return []
    lines = lines_of(options.sweep)
    runs = []
    for k, line in enumerate(lines):
        run = ["--job.dump_folder", f"{config.dump_folder}/run-{k}", *shlex.split(line)]
        try:
            load_config([*arguments, *run])
        except ConfigError as error:
            raise ConfigError(f"--sweep {options.sweep}: run {k}, {line!r}: {error}") from None
        runs.append(run)
    return runs


def lines_of(file: str) -> list[str]:
    """Those of a sweep's file that are neither empty nor comments. ConfigError: too many, none, no file."""
    try:
        text = Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        refuse("--sweep", file, f"{reason}; a file with the options of one run in every line expected")
    lines = [line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")]
    if not 1 <= len(lines) <= MOST_RUNS:
        refuse("--sweep", file, f"{len(lines)} runs; 1 to {MOST_RUNS} lines expected")
    return lines


def variants(runs: list[list[str]]) -> str:
    """The lines of bash that add a run's own options."""
    if not runs:
        return ""
    cases = [f"    {k}) arguments+=({shlex.join(run)}) ;;" for k, run in enumerate(runs)]
    return "\n".join(["case $SLURM_ARRAY_TASK_ID in", *cases, "esac"])
