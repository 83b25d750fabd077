"""A first configuration as a file, each key with its reason, and what is said beside it."""

import json
import os
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from datasets.selection import open_selection
from errors import tell, without_secrets
from first_steps.choices import Situation, choose, look, rollout_stage
from first_steps.layout import Planned, lay_out
from first_steps.questions import Answers, read_output
from planning.report import number_of
from project_folder import PROJECT

WIDEST = 110  # characters of a line; a reason that would make it longer stands above


def begin(answers: Answers, with_preflight: bool) -> int:
    """Chooses, plans, writes, looks at this machine; the exit code. Raises ConfigError, DataError."""
    case, output = look(answers), answers.output
    stage = output.with_name(f"{output.stem}_rollout.toml")
    if answers.goal == "long":
        read_output(str(stage))  # nothing is written where one of the two cannot be
    first = lay_out(case, choose(case))
    there = not answers.is_coarser or os.path.exists(answers.data_path)
    if there:
        open_selection(first.config.data, first.config.model.patch_size, case.leads)  # as a run will
    print(f"\n{first.tables()}\n")
    files = {output: text_of(first, case, output)}
    if answers.goal == "long":
        folder = f"outputs/{output.stem}"  # of the project, where the run of the first one lies
        second = lay_out(case, rollout_stage(case, first.config, folder), first.config)
        files[stage] = text_of(second, case, stage, extends=output.name)
    for path, text in files.items():
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
        print(f"written: {path}")
    code = preflight(output) if answers.is_here and there and with_preflight else 0
    print("to begin:", flush=True)
    print("\n".join(f"  {line}" for line in commands(case, [*files])))
    return code


def preflight(output: Path) -> int:
    """Its exit code, in a process of its own: it makes a process group of as many ranks as there are."""
    paths = filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    print("\nwhether all is there (jobs.preflight):\n", flush=True)
    command = [sys.executable, "-P", "-m", "jobs.preflight", str(output)]
    code = subprocess.run(command, env=environment).returncode
    if code:
        tell(f"{output} is written; the table says what has to be mended before it can train")
    print()
    return code


def commands(case: Situation, files: list[Path]) -> list[str]:
    """What makes the data coarser, where they have to be, and what starts each of the runs."""
    answers, run = case.answers, shlex.quote(shown(PROJECT / "run_train.sh", "./run_train.sh"))
    cluster, ranks = answers.cluster, ""
    if cluster and not answers.is_here:
        ranks = f"NGPU={min(cluster.devices, cluster.devices_per_node)} "
        if cluster.nodes > 1:
            ranks = f"NNODES={cluster.nodes} {ranks}RDZV_ENDPOINT=node0:29500 "
    starts = [f"{ranks}{run} --job.config_file {shlex.quote(str(file))}" for file in files]
    return [*([conversion(answers)] if answers.is_coarser else []), *starts]


def conversion(answers: Answers) -> str:
    """The command that makes the coarser store; where it has been there since before, it adds what is new."""
    rows, columns = answers.shape
    path, select = answers.found.configured_path, answers.found.select
    words = ["-m", "datasets.convert", path, answers.data_path, "--grid", f"{rows}x{columns}"]
    words += ["--variables", *answers.variables, *(["--select", *select] if select else [])]
    return f"{shown(Path(sys.executable), '.venv/bin/python')} {shlex.join(words)}"


def shown(path: Path, here: str) -> str:
    """A program as the documents write it, where the caller is in the project's folder and it is that one."""
    return here if Path.cwd() == PROJECT and path.absolute() == (PROJECT / here).absolute() else str(path)


# -- the file


def text_of(planned: Planned, case: Situation, path: Path, extends: str = "") -> str:
    """TOML with the lines that every configuration begins with."""
    lines = [*header(planned, case, path, extends), ""]
    lines += [f"extends = {toml(extends)}", ""] if extends else []
    for section, keys in planned.choices.items():
        lines += [f"[{section}]", *(key_line(key, *chosen) for key, chosen in keys.items()), ""]
    return without_secrets("\n".join(lines))


def header(planned: Planned, case: Situation, path: Path, extends: str) -> list[str]:
    answers = case.answers
    devices = answers.cluster.devices if answers.cluster else case.devices
    what = "this machine" if answers.is_here else f"{answers.hardware}: {number_of(devices, 'device')}"
    run = [line for line in commands(case, [path]) if not extends or "datasets.convert" not in line]
    kind = f"after {extends}: forecasts of several steps of the model itself" if extends else "one step"
    opening = f"{answers.found.stem}, {len(answers.variables)} variables on {case.grid_text} points, {kind}."
    rows = {
        "Command:": " && ".join(run),
        "Data:": answers.found.path,
        "Hardware:": what,
        "Time:": planned.time_line(),
        "Memory:": planned.memory_line(),
        "Score:": "not trained yet",
    }
    body = [f"# {name:<9} {value}" for name, value in rows.items()]
    return [*(f"# {line}" for line in textwrap.wrap(opening, WIDEST)), "#", *body]


def key_line(key: str, value: Any, why: str) -> str:
    text = f"{key} = {toml(value)}"
    return f"{text} # {why}" if len(text) + len(why) + 3 <= WIDEST else f"# {why}\n{text}"


def toml(value: Any) -> str:
    """Texts, numbers and lists are written in TOML as in JSON; long lists have an item a line."""
    text = json.dumps(value, ensure_ascii=False)
    if isinstance(value, list) and len(text) > WIDEST:
        return "[\n" + "".join(f"    {json.dumps(each, ensure_ascii=False)},\n" for each in value) + "]"
    return text
