"""Slurm on this machine for a test: Debian's slurm-wlm where it starts, else a replacement."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.started_jobs import ROOT

START_SECONDS, JOB_SECONDS = 30, 400
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo")
CONFIGURATION = """
ClusterName=rossby
SlurmctldHost={host}
SlurmUser=root
SlurmctldPort={ports[0]}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=5,bf_interval=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
MailProg=/bin/true
ReturnToService=2
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=16 Gres=gpu:2 State=UNKNOWN
NodeName={host}-2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=16 Gres=gpu:2 State=UNKNOWN
PartitionName=spot Nodes=ALL Default=YES PriorityTier=1 GraceTime=120 MaxTime=INFINITE State=UP
PartitionName=ondemand Nodes=ALL PriorityTier=1 PreemptMode=OFF MaxTime=INFINITE State=UP
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF MaxTime=INFINITE State=UP
"""
NODES = (socket.gethostname().partition(".")[0], socket.gethostname().partition(".")[0] + "-2")


def edited(folder: Path, nodes: int, *lines: str) -> Path:
    """Return a copy of scripts/slurm.sbatch as a user edits it, for nodes without GPUs."""
    text = (ROOT / "scripts/slurm.sbatch").read_text()
    asked = (f"--nodes={nodes}", "--cpus-per-task=2", "--time=30", f"--output={folder}/rossby-%j.log", *lines)
    for line in asked:
        name = line.partition("=")[0]
        text, count = re.subn(rf"#SBATCH {name}=.*", f"#SBATCH {line}", text)
        text = text if count else text.replace("#SBATCH --nodes", f"#SBATCH {line}\n#SBATCH --nodes", 1)
    path = folder / "job.sbatch"
    path.write_text(re.sub(r"#SBATCH --gpus-per-node=.*\n", "", text))
    return path


def until(there: Callable[[], object], seconds: float, what: Callable[[], str] = lambda: "") -> None:
    end = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < end, f"waited {seconds} s in vain\n{what()}"
        time.sleep(0.2)


class Slurm:
    """The real one: controller and two nodes on this machine, each with two graphics cards that are none."""

    def __init__(self, folder: Path) -> None:
        """AssertionError, OSError: it cannot be started here."""
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
        ports = [each.getsockname()[1] for each in sockets]
        for each in sockets:
            each.close()
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir(parents=True)
        host = socket.gethostname().partition(".")[0]
        settings = {"host": host, "ports": ports, "folder": folder}
        (folder / "slurm.conf").write_text(CONFIGURATION.format(**settings))
        (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
        self.folder = folder
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        self.processes: list[subprocess.Popen] = []
        self.job = self.urgent = ""
        daemons = [["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in NODES)]
        try:
            for daemon in daemons:
                self.processes.append(
                    subprocess.Popen(daemon, env=self.environment, stderr=subprocess.DEVNULL)
                )
            idle = lambda: self.ask("sinfo", "-h", "-N", "-p", "spot", "-o", "%T").split()  # noqa: E731
            until(lambda: idle() == ["idle", "idle"], START_SECONDS)
        except AssertionError:
            self.stop()
            raise

    def ask(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        return done.stdout.strip()

    def submit(self, script: Path, *arguments: str, **environment: str) -> None:
        """Submit from the project's folder."""
        settings = self.environment | environment
        command = ["sbatch", str(script), *arguments]
        done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        self.job = done.stdout.split()[-1]

    def field(self, name: str) -> str:
        """Output of `scontrol show job` for the job."""
        words = self.ask("scontrol", "show", "job", self.job).split()
        return next((word.partition("=")[2] for word in words if word.startswith(f"{name}=")), "")

    def preempt(self) -> None:
        """A job that comes first takes all nodes, until `let_go`. Returns when ours waits for them."""
        options = ["--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null"]
        said = self.ask("sbatch", *options, "--wrap", "exec sleep 1000")
        self.urgent = said.split()[-1]
        until(lambda: self.field("Restarts") == "1" and self.field("JobState") == "PENDING", JOB_SECONDS)

    def let_go(self) -> None:
        self.ask("scancel", self.urgent)

    def end(self) -> int:
        """The exit code of the job's script, once it has ended for good."""
        until(lambda: self.field("JobState") in ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED"), JOB_SECONDS)
        return int(self.field("ExitCode").partition(":")[0])

    def told_of_the_job(self) -> str:
        """For who looks why it did not begin: where it stands, and the ends of what the daemons wrote."""
        answers = [self.ask("scontrol", "show", "job", self.job), self.ask("sinfo", "-N", "-l")]
        logs = [path.read_text()[-2000:] for path in sorted(self.folder.glob("*.log"))]
        return "\n".join([*answers, *logs])

    def stop(self) -> None:
        for job in filter(None, (self.job, self.urgent)):
            self.ask("scancel", "--signal=KILL", "--full", job)
        for process in reversed(self.processes):
            process.terminate()
            process.wait(20)


class StandIn:
    """Its commands as tests/slurm_stand_in.py has them."""

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

    def submit(self, script: Path, *arguments: str, **environment: str) -> None:
        command = [str(self.folder.parent / "bin/sbatch"), str(script), *arguments]
        subprocess.run(command, cwd=ROOT, env=self.environment | environment, check=True)

    def preempt(self) -> None:
        """At the limit of its time."""
        (self.folder / "limit").touch()
        until((self.folder / "ends").exists, JOB_SECONDS)
        assert (self.folder / "ends").read_text() == "75\n"

    def let_go(self) -> None:
        """Nobody else wants its node."""

    def task(self) -> dict[str, str]:
        """Environment and arguments of srun's task."""
        return json.loads((self.folder / "task.json").read_text())

    def end(self) -> int:
        until((self.folder / "done").exists, JOB_SECONDS)
        return int((self.folder / "done").read_text())

    def told_of_the_job(self) -> str:
        return f"files of the stand-in: {sorted(path.name for path in self.folder.iterdir())}"

    def stop(self) -> None:
        """Nothing of it is left once a job has ended."""
