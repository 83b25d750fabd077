"""Ranks that srun starts: `srun python train.py` without a launcher. Standard library only."""

import os
import re
from collections.abc import Mapping

SAME = {  # torch's name -> Slurm's
    "RANK": "SLURM_PROCID",
    "WORLD_SIZE": "SLURM_STEP_NUM_TASKS",
    "LOCAL_RANK": "SLURM_LOCALID",
    "GROUP_RANK": "SLURM_NODEID",
}


def set_rank_from_slurm() -> None:
    """Set torch's variables in a task of srun with several tasks. A launcher's, or the user's, are left as
    they are.
    """
    if "RANK" not in os.environ and int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        os.environ.update({**rank_variables(os.environ), **os.environ})


def rank_variables(slurm: Mapping[str, str]) -> dict[str, str]:
    """Return torch's variables of the task. Rank 0 is on the first host."""
    variables = {name: slurm[theirs] for name, theirs in SAME.items()}
    tasks = slurm["SLURM_STEP_TASKS_PER_NODE"]  # "2(x2),1": of each node
    counts = [
        int(count)
        for count, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks)
        for _ in range(int(nodes or "1"))
    ]
    variables["LOCAL_WORLD_SIZE"] = str(counts[int(slurm["SLURM_NODEID"])])
    one_host = len(counts) == 1
    variables["MASTER_ADDR"] = "127.0.0.1" if one_host else first_host(slurm["SLURM_JOB_NODELIST"])
    # Jobs, and steps of a job, that share a host have ports of their own.
    number = int(slurm["SLURM_JOB_ID"]) + int(slurm.get("SLURM_STEP_ID", "0"))
    variables["MASTER_PORT"] = str(10_000 + number % 20_000)
    return variables


def first_host(nodes: str) -> str:
    """Return the first host of a list in Slurm's form: "gpu[003-008,11],login1" -> "gpu003"."""
    prefix, number, suffix = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes).groups("")  # type: ignore[union-attr]
    return f"{prefix}{number}{suffix}"
