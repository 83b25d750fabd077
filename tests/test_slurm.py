"""Launch files in scripts/ that users copy; jobs of Slurm that are preempted and end as if undisturbed.

By Debian's slurm-wlm on this machine where it starts; what the script itself decides, without it.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml

from tests.started_jobs import ENDLESS, ROOT, Job, last_step, losses, run_program, wait_until, write_config

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


def edited(folder: Path) -> Path:
    """Return a copy of scripts/slurm.sbatch as a user edits it, for nodes without GPUs."""
    text = (ROOT / "scripts/slurm.sbatch").read_text()
    asked = ["--nodes=2", "--cpus-per-task=2", "--time=30", "--partition=spot"]
    for line in [*asked, f"--output={folder}/rossby-%j.log"]:
        name = line.partition("=")[0]
        text, count = re.subn(rf"#SBATCH {name}=.*", f"#SBATCH {line}", text)
        text = text if count else text.replace("#SBATCH --nodes", f"#SBATCH {line}\n#SBATCH --nodes", 1)
    path = folder / "job.sbatch"
    path.write_text(re.sub(r"#SBATCH --gpus-per-node=.*\n", "", text))
    return path


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
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        self.processes: list[subprocess.Popen] = []
        self.job = self.urgent = ""
        daemons = [["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in NODES)]
        try:
            for daemon in daemons:
                process = subprocess.Popen(
                    daemon, env=os.environ | self.environment, stderr=subprocess.DEVNULL
                )
                self.processes.append(process)
            idle = lambda: self.ask("sinfo", "-h", "-N", "-p", "spot", "-o", "%T").split()  # noqa: E731
            wait_until(lambda: idle() == ["idle", "idle"], START_SECONDS)
        except AssertionError:
            self.stop()
            raise

    def ask(self, *command: str) -> str:
        return run_program(*command, **self.environment).stdout.strip()

    def submit(self, script: Path, *arguments: str, **environment: str) -> None:
        """Submit from the project's folder."""
        done = run_program("sbatch", script, *arguments, **self.environment | environment)
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
        wait_until(lambda: self.field("Restarts") == "1" and self.field("JobState") == "PENDING", JOB_SECONDS)

    def let_go(self) -> None:
        self.ask("scancel", self.urgent)

    def end(self) -> int:
        """The exit code of the job's script, once it has ended for good."""
        wait_until(
            lambda: self.field("JobState") in ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED"), JOB_SECONDS
        )
        return int(self.field("ExitCode").partition(":")[0])

    def stop(self) -> None:
        for job in filter(None, (self.job, self.urgent)):
            self.ask("scancel", "--signal=KILL", "--full", job)
        for process in reversed(self.processes):
            process.terminate()
            process.wait(20)


@pytest.fixture
def slurm() -> Iterator[Slurm]:
    if os.getuid() or not all(map(shutil.which, PROGRAMS)):
        pytest.skip("needs root, and slurm-wlm installed")
    # Not in tmp_path: paths of its sockets have 108 characters at most.
    with TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        started = Slurm(Path(folder) / "slurm")
        yield started
        started.stop()


SETTINGS = {"NGPU": "2", "ROSSBY_PYTHON": sys.executable}


@pytest.mark.slow  # a minute or two
@pytest.mark.timeout(900)
def test_a_job_that_is_preempted_ends_as_if_undisturbed(
    slurm: Slurm, tmp_path: Path, start_job: Callable[..., Job]
) -> None:
    """By a job that comes first."""
    config_file, run = write_config(tmp_path), tmp_path / "run"
    files = ["--job.config_file", str(config_file), "--job.dump_folder", str(run)]
    slurm.submit(edited(tmp_path), *files, **SETTINGS)
    log = lambda: "".join(path.read_text() for path in tmp_path.glob("rossby-*.log"))  # noqa: E731
    wait_until(lambda: last_step(run) >= 10, 400, lambda: log() + slurm.ask("scontrol", "show", "job"))
    slurm.preempt()
    stopped = last_step(run)
    assert f"the checkpoint of step {stopped} is complete" in log()
    # The job starts again with the same command: the number of steps is in its file.
    text = config_file.read_text().replace(f"steps = {ENDLESS}", f"steps = {stopped + 10}", 1)
    config_file.write_text(text)
    slurm.let_go()
    assert slurm.end() == 0, log()
    assert f"from step {stopped} to {stopped + 10}" in log() and "4 ranks" in log()

    undisturbed = start_job(config_file, tmp_path / "undisturbed", NGPU="4")
    assert undisturbed.end(300) == 0, undisturbed.output
    assert losses(run) == losses(tmp_path / "undisturbed")


@pytest.mark.slow
def test_srun_starts_ranks_without_a_launcher(
    slurm: Slurm, tmp_path: Path, start_job: Callable[..., Job]
) -> None:
    config_file, run = write_config(tmp_path), tmp_path / "run"
    options = ["--job.config_file", str(config_file), "--training.steps", "12"]
    srun = ["srun", "--partition=spot", "--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1"]
    page = (ROOT / "docs/launch.md").read_text()
    task = page.partition("```sh\n")[2].partition("```")[0].replace(".venv/bin/python", sys.executable)
    (tmp_path / "task.sh").write_text(task)
    command = [*srun, "bash", str(tmp_path / "task.sh"), *options, "--job.dump_folder", str(run)]
    done = run_program(*command, **slurm.environment | SETTINGS)
    assert done.returncode == 0 and "4 ranks" in done.stderr, done.stderr
    undisturbed = start_job(config_file, tmp_path / "four", "--training.steps", "12", NGPU="4")
    assert undisturbed.end(300) == 0, undisturbed.output
    assert losses(run) == losses(tmp_path / "four") and len(losses(run)) == 12


@pytest.mark.parametrize(("code", "is_queued_again"), [(0, False), (2, False), (75, True), (143, True)])
def test_what_srun_is_given_and_whether_a_job_is_queued_again(
    tmp_path: Path, code: int, is_queued_again
) -> None:
    """srun and scontrol are two lines of shell, which note what they are asked."""
    programs = {
        "srun": f"env > {tmp_path}/given; echo $@ >> {tmp_path}/given; exit {code}",
        "scontrol": f"[ $1 = show ] && echo $3 || echo $@ >> {tmp_path}/queued",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    job = {"JOB_ID": "4711", "JOB_NUM_NODES": "1", "JOB_NODELIST": "node7", "CPUS_PER_TASK": "2"}
    environment = {f"SLURM_{key}": value for key, value in (job | {"SUBMIT_DIR": str(ROOT)}).items()}
    environment |= SETTINGS | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert (
        run_program("bash", "scripts/slurm.sbatch", "--training.steps", "3", **environment).returncode == code
    )
    *given, task = (tmp_path / "given").read_text().splitlines()
    assert task.endswith("./run_train.sh --training.steps 3")
    wanted = {"SRUN_CPUS_PER_TASK=2", "NGPU=2", "NNODES=1", "MAX_RESTARTS=2", "RDZV_ENDPOINT=node7:14711"}
    assert wanted | {f"ROSSBY_PYTHON={sys.executable}"} <= set(given)
    queued = tmp_path / "queued"
    assert (queued.read_text() if queued.exists() else "") == "requeue 4711\n" * is_queued_again


def test_names_numbers_and_exit_codes_of_a_jobset_agree() -> None:
    content = yaml.safe_load((ROOT / "scripts/jobset.yaml").read_text())
    (job,) = content["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    environment = {each["name"]: each["value"] for each in container["env"]}
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(environment["NNODES"])
    assert container["resources"]["limits"] == {"nvidia.com/gpu": environment["NGPU"]}
    name = content["metadata"]["name"]  # as JobSet names its pods:
    assert environment["RDZV_ENDPOINT"] == f"{name}-{job['name']}-0-0.{name}:29500"
    rules = spec["podFailurePolicy"]["rules"]
    codes = {code: rule["action"] for rule in rules for code in rule.get("onExitCodes", {}).get("values", [])}
    assert codes == {2: "FailJob", 75: "Ignore"}
    assert spec["template"]["spec"]["restartPolicy"] == "Never"


def test_both_images_have_the_same_packages() -> None:
    texts = [(ROOT / "scripts" / name).read_text() for name in ("Dockerfile", "rossby.def")]
    packages = [
        re.search(r"--no-install-recommends \\\n(.*?)(?: \\)?\n", text).group(1).split()  # type: ignore[union-attr]
        for text in texts
    ]
    assert packages[0] == packages[1] and "python3-venv" in packages[0]
