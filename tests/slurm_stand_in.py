"""sbatch, srun and scontrol for one job on this machine, as Slurm's manual pages describe them.

Where no Slurm can be started these stand on PATH: `python slurm_stand_in.py sbatch ...`. A job is a folder in
SLURM_STAND_IN. Its time limit comes when the test writes the file "limit" there.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from itertools import dropwhile
from pathlib import Path

NUMBER = "4711"


def sbatch(folder: Path, arguments: list[str]) -> None:
    """Run a copy of the script in the background, in the caller's folder."""
    script, *words = Path(arguments[0]).absolute(), *arguments[1:]
    shutil.copy(script, folder / "slurm_script")
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", script.read_text(), re.MULTILINE))
    job = {
        "SLURM_JOB_ID": NUMBER,
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_CPUS_PER_TASK": asked["cpus-per-task"],
        "SLURM_SUBMIT_DIR": os.getcwd(),
    }
    log = open(asked["output"].replace("%j", NUMBER), "a")  # noqa: SIM115  (it outlives this process)
    command = [sys.executable, __file__, "daemon", asked["signal"], *words]
    environment = os.environ | job
    subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    print(f"Submitted batch job {NUMBER}")


def daemon(folder: Path, arguments: list[str]) -> None:
    """The job until it has ended and is not queued again. USR1@ goes to its steps, not to its script."""
    number = signal.Signals[f"SIG{arguments[0].partition('@')[0]}"]
    while True:
        script = subprocess.Popen(["bash", str(folder / "slurm_script"), *arguments[1:]])
        while script.poll() is None and not (folder / "limit").exists():
            time.sleep(0.05)
        if script.poll() is None:
            (folder / "limit").unlink()
            os.killpg(int((folder / "step").read_text()), number)
        code = script.wait()
        if not (folder / "requeued").exists():
            break
        (folder / "requeued").unlink()
        with (folder / "ends").open("a") as file:
            file.write(f"{code}\n")
    (folder / "done").write_text(str(code))


def srun(folder: Path, arguments: list[str]) -> None:
    """One task. Since 22.05 it has the processors of SRUN_CPUS_PER_TASK, not of SLURM_CPUS_PER_TASK."""
    words = list(dropwhile(lambda word: word.startswith("--"), arguments))
    cpus = os.environ.get("SRUN_CPUS_PER_TASK", "1")
    known = {
        name: os.environ[name]
        for name in ("RDZV_ENDPOINT", "NNODES", "NGPU", "ROSSBY_PYTHON", "MAX_RESTARTS")
    }
    (folder / "task.json").write_text(json.dumps(known | {"cpus": cpus, "command": words[0]}))
    environment = os.environ | {"SLURM_CPUS_PER_TASK": cpus}
    task = subprocess.Popen(words, env=environment, start_new_session=True)
    (folder / "step").write_text(str(task.pid))
    sys.exit(task.wait())


def scontrol(folder: Path, arguments: list[str]) -> None:
    if arguments[:2] == ["show", "hostnames"]:
        print(arguments[2])
    else:
        assert arguments == ["requeue", NUMBER], arguments
        (folder / "requeued").touch()


if __name__ == "__main__":
    roles = {"sbatch": sbatch, "srun": srun, "scontrol": scontrol, "daemon": daemon}
    roles[sys.argv[1]](Path(os.environ["SLURM_STAND_IN"]), sys.argv[2:])
