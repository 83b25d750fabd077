"""Launch files in scripts/ that users copy."""

import re
import subprocess
from typing import Any

import yaml

from tests.started_jobs import ROOT

JOBSET = ROOT / "scripts/jobset.yaml"


def jobset() -> dict[str, Any]:
    return yaml.safe_load(JOBSET.read_text())


def container() -> dict[str, Any]:
    (job,) = jobset()["spec"]["replicatedJobs"]
    (found,) = job["template"]["spec"]["template"]["spec"]["containers"]
    return found


def test_names_numbers_and_exit_codes_of_a_jobset_agree() -> None:
    content = jobset()
    (job,) = content["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    environment = {each["name"]: each["value"] for each in container()["env"]}
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(environment["NNODES"])
    assert container()["resources"]["limits"] == {"nvidia.com/gpu": environment["NGPU"]}
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
    for name in ("slurm.sbatch",):
        assert subprocess.run(["bash", "-n", str(ROOT / "scripts" / name)], check=False).returncode == 0
