"""Checkpoints: the same bits back, under plain names, complete or not there."""

import pytest
import torch
from torch import nn

from parallelisms.names import canonical
from training.checkpoint import (
    Checkpointer,
    check_steps,
    complete_steps,
    resume,
    run_state,
    step_folder,
    stored_tensors,
)
from training.gradients import LossScaler, total_norm
from training.optimizers import build_optimizer, parameter_groups, set_lr

DEVICE = torch.device("cpu")


class Run:
    """A small model with an optimiser and a scaler."""

    def __init__(self, width: int = 8, seed: int = 0, scaling: bool = True) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, width), nn.LayerNorm(width), nn.Linear(width, 3))
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = build_optimizer(self.parameters, (0.9, 0.95), 1e-8, 0.1, "fused")
        self.scaler = LossScaler(scaling, growth_interval=2)

    def step(self) -> float:
        set_lr(self.optimizer, 1e-2)
        loss = self.model(torch.randn(5, 4)).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.unscale(self.parameters.values())
        if self.scaler.good(total_norm(self.parameters.values())):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def state(self, step: int):
        return run_state(self.parameters, self.optimizer, self.scaler, None, step, DEVICE)

    def resume(self, checkpointer: Checkpointer) -> int:
        return resume(checkpointer, self.parameters, self.optimizer, self.scaler, None, DEVICE)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_resumed_run_is_the_same_run(one_rank, tmp_path, asynchronous):
    run = Run()
    for _ in range(3):
        run.step()
    checkpointer = Checkpointer(tmp_path / "checkpoints", asynchronous, 5, "config")
    checkpointer.save(3, run.state(3))
    expected = [run.step() for _ in range(3)]  # an asynchronous save must not see these updates
    checkpointer.wait()

    other = Run(seed=1)
    assert other.resume(Checkpointer(tmp_path / "checkpoints", asynchronous, 5, "config")) == 3
    assert [other.step() for _ in range(3)] == expected
    pairs = zip(run.model.parameters(), other.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert other.scaler.factor == run.scaler.factor == 2.0**19


def test_names_are_the_models_own_and_nothing_is_pickled(one_rank, tmp_path):
    run = Run()
    run.step()
    checkpointer = Checkpointer(tmp_path, False, 5, "x = 1")
    checkpointer.save(1, run.state(1))
    stored = stored_tensors(step_folder(tmp_path, 1))
    assert {"model.0.weight", "optimizer.0.weight.exp_avg", "train.step", "random.0.cpu"} <= set(stored)
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    metadata = FileSystemReader(str(step_folder(tmp_path, 1))).read_metadata()
    assert set(stored) == set(metadata.state_dict_metadata)  # tensors only
    assert (step_folder(tmp_path, 1) / "config.toml").read_text() == "x = 1"
    assert canonical("module.blocks.0._orig_mod.mlp.up.weight") == "blocks.0.mlp.up.weight"


def test_only_complete_checkpoints_count_and_the_newest_stay(one_rank, tmp_path):
    run = Run()
    checkpointer = Checkpointer(tmp_path, True, 2, "")
    for step in (10, 20, 30, 40):
        run.step()
        checkpointer.save(step, run.state(step))
    checkpointer.wait()
    assert complete_steps(tmp_path) == [30, 40]
    (tmp_path / "step-00000050.incomplete").mkdir()
    assert complete_steps(tmp_path) == [30, 40]
    assert Run().resume(Checkpointer(tmp_path, True, 2, "")) == 40
    assert not list(tmp_path.glob("*.incomplete"))


def test_an_empty_folder_resumes_nothing(one_rank, tmp_path):
    assert Run().resume(Checkpointer(tmp_path, True, 2, "")) == 0


def test_another_model_is_refused_by_name(one_rank, tmp_path):
    run = Run()
    run.step()
    Checkpointer(tmp_path, False, 2, "").save(1, run.state(1))
    with pytest.raises(ValueError, match=r"step-00000001: model.0.weight is \[8, 4\] there and \[16, 4\]"):
        Run(width=16).resume(Checkpointer(tmp_path, False, 2, ""))


def test_a_failed_background_write_is_raised(one_rank, tmp_path):
    run = Run()
    checkpointer = Checkpointer(tmp_path / "checkpoints", True, 2, "")
    (tmp_path / "checkpoints").rmdir()
    (tmp_path / "checkpoints").write_text("a file where the folder was")
    with pytest.raises(RuntimeError, match="the checkpoint of step 1 could not be written"):
        checkpointer.save(1, run.state(1))
        checkpointer.wait()


def test_fewer_steps_than_the_folder_holds_is_an_error(tmp_path):
    step_folder(tmp_path, 100).mkdir()
    check_steps(tmp_path, 100)
    with pytest.raises(ValueError, match="training.steps = 60: .* already holds step 100"):
        check_steps(tmp_path, 60)


def test_norms_biases_and_positions_do_not_decay():
    model = nn.ModuleDict(
        {"linear": nn.Linear(3, 2), "norm": nn.LayerNorm(2), "position": nn.Embedding(4, 2)}
    )
    decayed, still = parameter_groups(dict(model.named_parameters()), 0.1)
    assert [p.shape for p in decayed["params"]] == [(2, 3)] and decayed["weight_decay"] == 0.1
    assert len(still["params"]) == 4 and still["weight_decay"] == 0.0
