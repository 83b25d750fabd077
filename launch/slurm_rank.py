"""Becomes the rank that Slurm's variables name: one task a GPU, and no launcher.

    srun python -m launch.slurm_rank train.py --section.key value

MASTER_ADDR, MASTER_PORT: where rank 0 keeps the ranks' store. NGPU: tasks a node. All else is srun's.
"""

import os
import signal
import sys

from errors import one_line_errors, refuse
from jobs.interfaces import interface_towards

# Slurm's name of what torch calls otherwise.
NAMES = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
NAMES |= {"GROUP_RANK": "SLURM_NODEID"}


def rank_environment(environment: dict[str, str]) -> dict[str, str]:
    """What torch and the trainer look for. ConfigError: srun has not started this."""
    for name in NAMES.values():
        if not environment.get(name, "").isdecimal():
            refuse(
                name,
                environment.get(name, ""),
                "an environment variable that srun sets; start this with srun",
            )
    found = {ours: environment[theirs] for ours, theirs in NAMES.items()}
    found["LOCAL_WORLD_SIZE"] = environment["NGPU"]
    found["TORCH_CPP_LOG_LEVEL"] = environment.get("TORCH_CPP_LOG_LEVEL", "FATAL")  # one line, no C++ frames
    found["TORCH_FR_BUFFER_SIZE"] = environment.get(
        "TORCH_FR_BUFFER_SIZE", "2000"
    )  # written when a run hangs
    found["RES_OPTIONS"] = environment.get("RES_OPTIONS", "timeout:1 attempts:5")  # as in jobs/launch.py
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    if "GLOO_SOCKET_IFNAME" not in environment and (name := interface_towards(address, port)):
        found["GLOO_SOCKET_IFNAME"] = name  # else gloo takes what the host's name stands for
    return found


def main(command: list[str]) -> None:
    with one_line_errors():
        os.environ |= rank_environment(dict(os.environ))
    # A signal to stop would kill a rank that cannot hear it yet: held back, also through exec, until it can.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1))
    os.execv(sys.executable, [sys.executable, "-u", *command])


if __name__ == "__main__":
    main(sys.argv[1:])
