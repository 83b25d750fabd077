"""A Slurm on this machine for a test: Debian's slurm-wlm where it starts, and what stands in for it."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

START_SECONDS, JOB_SECONDS = 30, 400
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo")
CONFIGURATION = """
ClusterName=rossby
SlurmctldHost={host}
SlurmUser=root
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
MailProg=/bin/true
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} Gres=gpu:2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def until(there: Callable[[], object], seconds: float, what: Callable[[], str] = lambda: "") -> None:
    end = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < end, f"waited {seconds} s in vain\n{what()}"
        time.sleep(0.2)


class Slurm:
    """The real one: controller and node on this machine, with two graphics cards that are none."""

    def __init__(self, folder: Path) -> None:
        """AssertionError, OSError: it cannot be started here."""
        assert os.getuid() == 0 and all(shutil.which(name) for name in PROGRAMS), "slurm-wlm is not installed"
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        ports = [each.getsockname()[1] for each in sockets]
        for each in sockets:
            each.close()
        for name in ("state", "spool"):
            (folder / name).mkdir(parents=True)
        host = socket.gethostname().partition(".")[0]
        settings = {"host": host, "ports": ports, "folder": folder, "cpus": os.cpu_count()}
        (folder / "slurm.conf").write_text(CONFIGURATION.format(**settings))
        (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        self.processes: list[subprocess.Popen] = []
        try:
            for daemon in ("slurmctld", "slurmd"):
                self.processes.append(
                    subprocess.Popen([daemon, "-D"], env=self.environment, stderr=subprocess.DEVNULL)
                )
            until(lambda: self.ask("sinfo", "--noheader", "--format=%T") == "idle", START_SECONDS)
        except AssertionError:
            self.stop()
            raise
        self.cpus = min(os.cpu_count() or 1, 2)

    def ask(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        return done.stdout.strip()

    def submit(self, folder: Path, script: Path, arguments: list[str], environment: dict[str, str]) -> None:
        """From a folder."""
        options = ["--nodes=1", f"--cpus-per-task={self.cpus}", "--gpus-per-node=2", "--time=30"]
        done = subprocess.run(
            ["sbatch", *options, str(script), *arguments],
            cwd=folder,
            env=self.environment | environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        self.job = done.stdout.split()[-1]

    def told(self, field: str) -> str:
        """What `scontrol show job` says of the job."""
        words = self.ask("scontrol", "show", "job", self.job).split()
        return next((word.partition("=")[2] for word in words if word.startswith(f"{field}=")), "")

    def reach_limit(self) -> None:
        """Its time is nearly over, until it is queued again."""
        self.ask("scontrol", "update", f"JobId={self.job}", "TimeLimit=2")
        until(lambda: self.told("Restarts") == "1", JOB_SECONDS)
        self.ask("scontrol", "update", f"JobId={self.job}", "TimeLimit=30")

    def end(self) -> int:
        """The exit code of the job's script, once it has ended for good."""
        until(lambda: self.told("JobState") in ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED"), JOB_SECONDS)
        return int(self.told("ExitCode").partition(":")[0])

    def stop(self) -> None:
        if hasattr(self, "job"):
            self.ask("scancel", "--signal=KILL", "--full", self.job)
        for process in reversed(self.processes):
            process.terminate()
            process.wait(20)


class StandIn:
    """Its commands as tests/slurm_stand_in.py has them."""

    cpus = 64  # as docs/slurm.sbatch asks

    def __init__(self, folder: Path) -> None:
        self.folder, programs = folder / "job", folder / "bin"
        self.folder.mkdir(parents=True)
        programs.mkdir()
        for name in ("sbatch", "srun", "scontrol"):
            file = programs / name
            stand_in = Path(__file__).with_name("slurm_stand_in.py")
            file.write_text(f'#!/bin/sh\nexec {sys.executable} {stand_in} {name} "$@"\n')
            file.chmod(0o755)
        path = f"{programs}:{os.environ['PATH']}"
        self.environment = os.environ | {"PATH": path, "SLURM_STAND_IN": str(self.folder)}

    def submit(self, folder: Path, script: Path, arguments: list[str], environment: dict[str, str]) -> None:
        command = [str(self.folder.parent / "bin/sbatch"), str(script), *arguments]
        subprocess.run(command, cwd=folder, env=self.environment | environment, check=True)

    def reach_limit(self) -> None:
        (self.folder / "limit").touch()
        until((self.folder / "ends").exists, JOB_SECONDS)
        assert (self.folder / "ends").read_text() == "75\n"

    def task(self) -> dict[str, str]:
        """What srun's task was given."""
        return json.loads((self.folder / "task.json").read_text())

    def end(self) -> int:
        until((self.folder / "done").exists, JOB_SECONDS)
        return int((self.folder / "done").read_text())

    def stop(self) -> None:
        """Nothing of it is left once a job has ended."""
