"""Toys of what CONTRIBUTING.md adds, in a copy of the project: which files each touches, and that a run takes
them.
"""

import sys
from pathlib import Path

from tests.started_jobs import ROOT, records, run_program
from tests.test_house import tracked_files

Edits = dict[str, tuple[str, str]]  # file -> text, and what takes its place; "": a new file

LOSS: Edits = {
    "config.py": ('loss: Literal["mse",', 'loss: Literal["quartic", "mse",'),
    "training/losses/pointwise.py": (
        '    "mse": SQUARE,\n',
        '    "mse": SQUARE,\n    "quartic": Penalty(4, lambda e: e**4, lambda e: e.pow_(3).mul_(4)),\n',
    ),
}
OPTIMIZER: Edits = {
    "config.py": ('Literal["AdamW",', 'Literal["Sign", "AdamW",'),
    "training/optimizers/build.py": (
        '        case "LAMB":\n',
        '        case "Sign":\n            from training.optimizers.sign import Sign\n\n'
        '            return Sign(groups, {})\n        case "LAMB":\n',
    ),
    "training/optimizers/sign.py": (
        "",
        """
import torch

from training.optimizers.shards import local


class Sign(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                rate = group["lr"] * (1 - getattr(self, "found_inf", 0.0))
                local(p).sub_(local(p.grad).sign() * rate)
""",
    ),
}
LOGGER: Edits = {
    "config.py": ('tuple[Literal["tensorboard",', 'tuple[Literal["text", "tensorboard",'),
    "training/loggers/text_run.py": (
        "",
        """
class Logger:
    def __init__(self, config, resume_step, written):
        self.file = (config.dump_folder / "losses.txt").open("a")

    def log(self, record):
        self.file.write(f"{record['step']}\\n")

    def close(self):
        self.file.close()
""",
    ),
}
OPTION: Edits = {
    "config.py": (
        "    qk_norm: bool",
        '    doubled: bool = option(False, "ViT: twice the output.")\n    qk_norm: bool',
    ),
    "models/registry.py": ('VIT_KEYS += ("qk_norm",', 'VIT_KEYS += ("doubled", "qk_norm",'),
    "models/vit.py": (
        "        self.qkv = nn.Linear(dim",
        "        self.doubled = model.doubled\n        self.qkv = nn.Linear(dim",
    ),
}


def test_a_toy_of_each_runs(tmp_path: Path) -> None:
    for path in tracked_files():
        name = path.relative_to(ROOT)
        if name.parts[0] not in ("tests", "benchmarks", "docs", ".ci"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(path.read_bytes())
    for edits, most in ((LOSS, 2), (OPTIMIZER, 3), (LOGGER, 2), (OPTION, 3)):
        assert len(edits) <= most
        for name, (old, new) in edits.items():
            text = (tmp_path / name).read_text() if old else ""
            assert text.count(old) == 1 or not old, (name, old)
            (tmp_path / name).write_text(text.replace(old, new) if old else new)
    words = """
        --data.path random --data.variables ["2m_temperature"] --data.levels [] --data.static_variables []
        --data.forcings [] --data.grid_shape [8,16] --data.train_period ["2020-01-01","2020-01-20"]
        --data.validation_period [] --validation.enable false --job.dump_folder run --training.steps 3
        --model.patch_size [2,2] --model.dim 16 --model.num_heads 2 --model.num_layers 2 --model.doubled
        --training.loss quartic --optimizer.name Sign --metrics.loggers ["text"] --metrics.log_freq 1
    """.split()
    done = run_program(sys.executable, "train.py", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [record["loss"] for record in records(tmp_path / "run")]
    assert len(losses) == 3 and all(loss > 0 for loss in losses)
    assert (tmp_path / "run/losses.txt").read_text().split() == ["1", "2", "3"]
    assert len(list((tmp_path / "run/checkpoints").glob("step-*"))) == 1  # of states that the optimizer lacks
