"""What --launch writes for Kubernetes, what it refuses, and what every way to start shares."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from errors import ConfigError
from jobs.heartbeat import leave_sign
from launch import slurm
from launch.__main__ import main, split_kind
from launch.options import FABRICS
from tests.started_jobs import ROOT

IMAGE = ["--image", "registry.example/rossby:1", "--claim", "runs"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NNODES", "1")  # which the launcher sets for the checks
    monkeypatch.setenv("NGPU", "1")


def jobset(*words: str) -> dict[str, Any]:
    assert main(["--launch", "kubernetes", *IMAGE, *words]) == 0
    return yaml.safe_load(Path("demo.yaml").read_text())


@pytest.mark.parametrize(
    "words, said",
    [
        (["--launch", "slrum"], "--launch = 'slrum': did you mean slurm?"),
        (["--launch"], "--launch = '': valid: slurm, kubernetes"),
        (["--launch=slurm", "--node", "4"], "--node: not an option; did you mean --nodes?"),
        (["--launch=slurm", "--nodes", "none"], "--nodes: 'none': a whole number from 1 on expected"),
        (["--launch=slurm", "--time", "soon"], "--time: 'soon': minutes"),
        (["--launch=slurm", "--partition", "a b"], "--partition: 'a b': a name without spaces"),
        (["--launch=slurm", "--at-once", "2"], "--at-once = 2: there is no array"),
        (["--launch=slurm", "--on-demand-partition", "a"], "needs --nodes 2"),
        (["--launch=slurm", "--sweep", "none.txt"], "--sweep = 'none.txt': No such file"),
        (["--launch=slurm", "--sweep", "typo.txt"], "run 1, '--optimizer.lrr 1': optimizer.lrr: unknown key"),
        (["--launch=slurm", "--training.stepz", "3"], "did you mean training.steps?"),
        (["--launch=slurm", "--parallelism.tensor_parallel_degree", "2"], "the run has 1 rank(s)"),
        (["--launch=slurm", "--script", "no/where"], "--script = 'no/where': No such file or directory"),
        (["--launch=kubernetes"], "the following arguments are required: --image, --claim"),
        (["--launch=kubernetes", *IMAGE, "--name", "A"], "--name: 'A': small letters"),
        (["--launch=kubernetes", *IMAGE, "--job.config_file", "my.toml"], "is not in the image"),
    ],
)
def test_what_is_refused(words: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("typo.txt").write_text("# two runs\n--optimizer.lr 1\n--optimizer.lrr 1\n")
    Path("my.toml").write_text(f'extends = "{ROOT}/train_configs/demo.toml"\n')
    with pytest.raises(ConfigError) as refused:
        main(words)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value) and not list(Path().glob("*.sbatch"))


def test_the_shell_passes_it_on() -> None:
    """Exit code 2 and one line, from run_train.sh; the script is shown, and said how it is submitted."""
    start = [str(ROOT / "run_train.sh"), "--launch=slurm", "--training.steps", "3"]
    environment = os.environ | {"ROSSBY_PYTHON": sys.executable}

    def run(*words: str) -> subprocess.CompletedProcess:
        return subprocess.run([*start, *words], env=environment, capture_output=True, text=True, check=False)

    done = run()
    assert done.returncode == 0 and done.stdout.strip() == Path("demo.sbatch").read_text().strip()
    assert done.stderr == "rossby: written to demo.sbatch; it is started by: sbatch demo.sbatch\n"
    refused = run("--node", "4")
    assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1


def test_without_sbatch_nothing_is_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="sbatch is not on this machine; run `sbatch demo.sbatch`"):
        main(["--launch=slurm", "--submit"])


def test_times_are_those_of_slurm() -> None:
    """The six forms of sbatch's manual page."""
    seconds = {"90": 5400, "1:30": 90, "1:00:00": 3600, "1-0": 86400, "1-2:30": 95400, "1-2:30:15": 95415}
    assert {each: slurm.seconds_of(each) for each in seconds} == seconds


def test_a_sweep_is_an_array_of_its_lines() -> None:
    Path("lines.txt").write_text("--optimizer.lr 1e-3\n\n# a comment\n--optimizer.lr 2e-3 --model.dim 48\n")
    main(["--launch=slurm", "--sweep", "lines.txt"])
    text = Path("demo.sbatch").read_text()
    assert "--array=0-1\n" in text
    assert re.search(
        r"1\) arguments\+=\(--job.dump_folder \S*/run-1 --optimizer.lr 2e-3 --model.dim 48\)", text
    )


def test_members_have_seeds_of_their_own() -> None:
    main(["--launch=slurm", "--members", "2", "--training.seed", "7"])
    text = Path("demo.sbatch").read_text()
    assert re.search(r"0\) arguments\+=\(--training.seed 7 --job.dump_folder \S*/member-0\)", text)
    assert re.search(r"1\) arguments\+=\(--training.seed 8 --job.dump_folder \S*/member-1\)", text)


# -- Kubernetes


def test_a_jobset_says_what_a_run_needs() -> None:
    """Names that pods find each other by, what exit codes mean, who looks whether it lives."""
    written = jobset("--nodes", "3", "--gpus-per-node", "8", "--node-selector", "pool=gpu")
    assert (written["apiVersion"], written["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (job,) = written["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"] == 3
    rules = spec["podFailurePolicy"]["rules"]
    actions = {
        code: rule["action"] for rule in rules for code in rule.get("onExitCodes", {}).get("values", [])
    }
    assert actions == {2: "FailJob", 75: "Ignore"}
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never" and pod["nodeSelector"] == {"pool": "gpu"}
    (container,) = pod["containers"]
    environment = {each["name"]: each["value"] for each in container["env"]}
    name = written["metadata"]["name"]
    assert (
        environment["RDZV_ENDPOINT"] == f"{name}-{job['name']}-0-0.{name}:29500"
    )  # as JobSet names its pods
    assert (environment["NNODES"], environment["NGPU"]) == ("3", "8")
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert container["args"][-4:-2] == ["--job.config_file", "/rossby/train_configs/demo.toml"]
    probe = container["livenessProbe"]["exec"]["command"][0].removeprefix("/rossby/")
    assert os.access(ROOT / probe, os.X_OK)
    assert os.access(ROOT / container["command"][0].removeprefix("/rossby/"), os.X_OK)


def test_without_checkpoints_a_jobset_does_not_begin_anew() -> None:
    (job,) = jobset("--checkpoint.enable=false", "--gpus-per-node", "0")["spec"]["replicatedJobs"]
    rules = job["template"]["spec"]["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["FailJob", "FailJob", "Ignore"]


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


def test_a_jobset_passes_its_schema() -> None:
    """ROSSBY_JOBSET_CRD: config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml of their repository."""
    jsonschema = pytest.importorskip("jsonschema")
    if "ROSSBY_JOBSET_CRD" not in os.environ:
        pytest.skip("ROSSBY_JOBSET_CRD does not name JobSet's schema")
    text = Path(os.environ["ROSSBY_JOBSET_CRD"]).read_text()
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # seconds, where the C library is not there
    (crd,) = filter(None, yaml.load_all(text, loader))
    (version,) = (each for each in crd["spec"]["versions"] if each["name"] == "v1alpha2")
    schema = without_unknown_fields(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}  # every object's, and said elsewhere
    valid = jsonschema.Draft202012Validator(schema).is_valid
    bare = jobset()
    assert valid(bare)
    assert valid(jobset("--nodes", "4", "--gpus-per-node", "0", "--node-selector", "a=b"))
    for damage in ("failurePolicyy", "suspend"):
        assert not valid(bare | {"spec": bare["spec"] | {damage: "text"}})


def test_a_pod_looks_at_its_node_and_then_trains(tmp_path: Path) -> None:
    """launch/pod.sh in a project whose run_train.sh and Python say how they were called."""
    for name in ("launch/pod.sh", "launch/fabric.sh", "setup.sh"):
        copy = tmp_path / name
        copy.parent.mkdir(exist_ok=True)
        copy.write_text((ROOT / name).read_text())
    for name, text in (("run_train.sh", "echo train $*"), ("python", "echo look $*; exit ${CODE:-0}")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    settings = {"ROSSBY_PYTHON": str(tmp_path / "python"), "RDZV_ENDPOINT": "localhost:29500"}
    command = ["bash", str(tmp_path / "launch/pod.sh"), "--training.steps", "3"]

    def run(**more: str) -> subprocess.CompletedProcess:
        environment = os.environ | settings | more
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    done = run()
    look = "look -P -m jobs.preflight --training.steps 3"
    assert done.stdout.splitlines() == [look, "train --training.steps 3"]
    failed = run(CODE="2")
    assert failed.returncode == 2 and failed.stdout.splitlines() == [look]


def test_ranks_that_live_leave_signs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSSBY_HEARTBEAT", str(tmp_path / "heartbeat"))
    alive = lambda: subprocess.run([ROOT / "launch/alive.sh"], check=False).returncode == 0  # noqa: E731
    assert not alive()
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        leave_sign()
    assert alive()
    long_ago = time.time() - 61
    os.utime(tmp_path / "heartbeat/rank-1", (long_ago, long_ago))
    assert not alive()


# -- the network


def test_settings_of_the_network_stand_in_one_place() -> None:
    """Each with its reason; what the user has set stays; an unknown network is refused."""
    text = (ROOT / "launch/fabric.sh").read_text()
    assert tuple(re.findall(r"^    (\w+)\)$", text, re.MULTILINE)) == FABRICS
    lines = text.splitlines()
    for number, line in enumerate(lines):
        assert not line.strip().startswith("setting ") or "#" in line or "#" in lines[number - 1], line

    def after(**environment: str) -> subprocess.CompletedProcess:
        show = f"source {ROOT}/launch/fabric.sh; env"
        clean = {"PATH": os.environ["PATH"]} | environment
        return subprocess.run(["bash", "-c", show], env=clean, capture_output=True, text=True, check=False)

    assert "NCCL_NET=IB\n" in after(ROSSBY_FABRIC="infiniband").stdout
    assert "NCCL_NET=mine\n" in after(ROSSBY_FABRIC="infiniband", NCCL_NET="mine").stdout
    assert "FI_PROVIDER=efa\n" in after(ROSSBY_FABRIC="efa").stdout
    assert "NCCL" not in after(NCCL_DEBUG="").stdout
    assert "NCCL_DEBUG_SUBSYS=INIT,NET,ENV\n" in after(NCCL_DEBUG="INFO").stdout
    refused = after(ROSSBY_FABRIC="token ring")
    assert refused.returncode == 2 and "ROSSBY_FABRIC = 'token ring'" in refused.stderr


def test_the_kind_may_stand_anywhere() -> None:
    assert split_kind(["--a.b", "1", "--launch", "slurm", "--nodes", "2"]) == (
        "slurm",
        ["--a.b", "1", "--nodes", "2"],
    )
