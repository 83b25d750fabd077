"""Launch files in scripts/ that users copy."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
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


def without_unknown_fields(schema: Any) -> Any:
    """As `kubectl apply` has it: a field that the schema does not name is an error."""
    if isinstance(schema, list):
        return [without_unknown_fields(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: without_unknown_fields(value) for key, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        closed.setdefault("additionalProperties", False)
    return closed


def test_the_jobset_passes_its_schema() -> None:
    """ROSSBY_JOBSET_CRD: config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml of their repository."""
    jsonschema = pytest.importorskip("jsonschema")
    if "ROSSBY_JOBSET_CRD" not in os.environ:
        pytest.skip("ROSSBY_JOBSET_CRD does not name JobSet's schema")
    text = Path(os.environ["ROSSBY_JOBSET_CRD"]).read_text()
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # seconds, where the C library is not there
    (crd,) = filter(None, yaml.load_all(text, loader))
    (version,) = (each for each in crd["spec"]["versions"] if each["name"] == "v1alpha2")
    schema = without_unknown_fields(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}  # every object's, defined elsewhere
    valid = jsonschema.Draft202012Validator(schema).is_valid
    content = jobset()
    assert valid(content)
    assert not valid(content | {"spec": content["spec"] | {"failurePolicyy": "text"}})


def test_both_images_have_the_same_packages() -> None:
    texts = [(ROOT / "scripts" / name).read_text() for name in ("Dockerfile", "rossby.def")]
    packages = [
        re.search(r"--no-install-recommends \\\n(.*?)(?: \\)?\n", text).group(1).split()  # type: ignore[union-attr]
        for text in texts
    ]
    assert packages[0] == packages[1] and "python3-venv" in packages[0]
    for name in ("slurm.sbatch",):
        assert subprocess.run(["bash", "-n", str(ROOT / "scripts" / name)], check=False).returncode == 0
