"""A step of 8 ranks in one process: memory and communication of a rank, against closed forms."""

import pytest
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from datasets.grid import global_grid
from models.registry import build_model
from parallelisms.degrees import Degrees
from planning.architecture import architecture_of
from planning.dry_run import DryRun, StepTracker, dry_run
from planning.workload import Workload
from tests.collective_formulas import step_collectives
from tests.planned import run_plan
from training.config_checks import load_checked

GRID = (16, 32)


def run(monkeypatch: pytest.MonkeyPatch, *options: str, world: int = 8) -> DryRun:
    monkeypatch.setenv("WORLD_SIZE", str(world))
    arguments = ["--data.forcings=[]", "--data.static_variables=[]", "--model.dim=64", "--optimizer.lr=1e-3"]
    arguments += ["--data.history=1", "--model.attention_windows=[]", "--optimizer.name=AdamW"]
    return dry_run(load_checked([*arguments, *options]), world, global_grid(GRID), 7)


def test_a_rank_has_its_part_of_everything(monkeypatch):
    """An eighth with FSDP; with tensor parallelism a quarter, and norms, positions and some biases whole."""
    result = run(monkeypatch)
    model = build_model(load_checked(["--model.dim=64"]).model, 7, 0, GRID, True)
    assert result.total_parameters == 4 * sum(p.numel() for p in model.parameters())
    assert result.parameters == result.gradients == pytest.approx(result.total_parameters / 8, rel=0.01)
    assert result.optimizer == pytest.approx(2 * result.parameters, rel=1e-2)  # and a step counter each
    assert result.peak["Total"] > result.parameters + result.gradients
    tensor = run(monkeypatch, "--parallelism.tensor_parallel_degree=4", world=4)
    assert 0.25 < tensor.parameters / tensor.total_parameters < 0.3


def test_collectives_are_those_of_the_formula(monkeypatch):
    result = run(monkeypatch, "--training.local_batch_size=2", "--training.global_batch_size=48")
    model = architecture_of(load_checked(["--model.dim=64"]).model, GRID, 7, 7)
    work = Workload(model, Degrees(dp_shard=8), local_batch=2, global_batch=48, dtype="float32")
    for call, number in step_collectives(work).items():
        assert result.calls[call] == number


def test_accumulated_gradients_stay_sharded(monkeypatch):
    """Micro-batches add one shard of the gradients to the peak, and not all gradients whole."""
    options = ["--training.local_batch_size=2", "--training.global_batch_size"]
    once, four = (run(monkeypatch, *options, str(batch)) for batch in (16, 64))
    assert four.peak["Total"] - once.peak["Total"] < 2 * once.gradients < 0.3 * once.total_parameters
    hsdp = run(monkeypatch, *options, "64", "--parallelism.data_parallel_replicate_degree=2")
    sums = {
        axis: sum(n for call, n in hsdp.calls.items() if call.axis == axis and "reduce" in call.kind)
        for axis in ("fsdp", "dp_replicate")
    }
    units = 4 + 1  # blocks, and the rest
    assert sums == {"fsdp": 4 * units, "dp_replicate": units}


@pytest.mark.parametrize(
    "layout",
    (
        "",
        "--activation_checkpoint.mode=selective --parallelism.tensor_parallel_degree=2",
        "--activation_checkpoint.mode=full --training.global_batch_size=64 --training.local_batch_size=2",
        "--activation_checkpoint.mode=every_n_blocks --parallelism.data_parallel_replicate_degree=8",
        "--model.name=unet --model.num_heads=2",
    ),
)
def test_the_peak_is_that_of_torchs_tracker(monkeypatch, layout: str):
    """The tracker leaves out the peaks of modules, which take most of its time, and nothing else."""
    options = ["--model.num_layers=2", *layout.split()]
    _clear_sharding_prop_cache()  # shapes that DTensor computes for the first time are no memory
    found = run(monkeypatch, *options)
    monkeypatch.setattr(StepTracker, "_update_peak_stats", MemTracker._update_peak_stats)
    assert found == run(monkeypatch, *options)


def test_the_dry_run_has_what_the_run_has(monkeypatch):
    """Optimiser states of ZeRO-1, float8 matrices: all were left out once."""
    replicas = "--parallelism.data_parallel_replicate_degree=8"
    ddp, zero1 = (run(monkeypatch, replicas, f"--parallelism.data_parallel={n}") for n in ("auto", "zero1"))
    assert zero1.optimizer < 0.3 * ddp.optimizer
    half = "--training.mixed_precision_param=bfloat16"
    bf16, float8 = (run(monkeypatch, half, f"--float8.enable={on}") for on in ("false", "true"))
    assert float8.peak != bf16.peak and float8.parameters == bf16.parameters


def test_command_line_prints_the_table_and_refuses_what_does_not_fit():
    command = ["--dry_run", "--data.grid_shape=[32,64]", "--world_size", "4"]
    done = run_plan(*command)
    assert done.returncode == 0 and "reduce-scatter" in done.stdout, done.stderr
    on_cluster = run_plan("--dry_run", "--data.grid_shape=[32,64]", "--cluster", "a100x4")
    assert on_cluster.stdout.splitlines()[:9] == done.stdout.splitlines()[:9]
    refused = run_plan(*command, "--parallelism.data_parallel_shard_degree", "3")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert "valid: data_parallel_shard_degree = -1 or 4" in refused.stderr
    piped = run_plan(*command, "--parallelism.pipeline_parallel_degree", "2")
    assert piped.returncode == 2 and "plan without --dry_run" in piped.stderr
