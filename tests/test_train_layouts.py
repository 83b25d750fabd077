"""train.py on every kind of layout for a few steps, compared with one process.

FSDP2 alone and the U-Net on tiles are in tests/test_train.py.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.started_jobs import Job, records, started_by, write_config

STEPS, GLOBAL_BATCH = 3, 4
AVERAGED = ("--training.ema_decay=0.5",)


def degree(axis: str, *more: str, number: int = 2) -> tuple[str, ...]:
    return (f"--parallelism.{axis}={number}", *more)


# Name -> ranks, what they are asked for, what the one process is asked for.
LAYOUTS: dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    "ulysses 2": (2, degree("context_parallel_degree"), ()),
    "all-gather 2": (
        2,
        degree("context_parallel_degree", "--parallelism.context_parallel_method=all_gather"),
        (),
    ),
    "ring 2": (2, degree("context_parallel_degree", "--parallelism.context_parallel_method=ring"), ()),
    "pp 2": (2, degree("pipeline_parallel_degree"), ()),
    "hsdp 2 x 2": (4, degree("data_parallel_replicate_degree"), ()),
    "tp 2, averages": (2, degree("tensor_parallel_degree", *AVERAGED), AVERAGED),
}


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("layouts"))


def train(config_file: Path, ranks: int, options: tuple[str, ...]) -> list[dict[str, Any]]:
    """Records in metrics.jsonl of a run on this number of ranks."""
    folder = config_file.parent / f"{ranks}{hash(options)}"
    splits = any(word in option for option in options for word in ("tensor", "context", "pipeline"))
    local = GLOBAL_BATCH if splits or ranks == 1 else GLOBAL_BATCH // ranks
    settings = [f"--training.steps={STEPS}", f"--training.local_batch_size={local}", "--metrics.log_freq=1"]
    settings += [
        "--validation.enable",
        '--data.validation_period=["2020-01-10", "2020-01-11"]',
        "--validation.lead_hours=[6]",
    ]
    job = Job(config_file, folder, *settings, *options, command=started_by("train.py", ranks))
    assert job.end(200) == 0, job.output
    return records(folder)


one_process = cache(train)


# tests/test_parity.py has these numbers of every layout; here it is what train.py makes of them.
RARE = ("all-gather 2", "ring 2", "ulysses 2", "pp 2", "hsdp 2 x 2", "tp 2, averages")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in RARE else []) for name in LAYOUTS]
)
def test_train_py_on_a_layout_is_train_py_in_one_process(config_file: Path, name: str) -> None:
    """Losses and gradient norms of every step, scores at the end."""
    ranks, asked, alone = LAYOUTS[name]
    expected, found = one_process(config_file, 1, alone), train(config_file, ranks, asked)
    assert len(found) == len(expected) == STEPS + 1
    for there, here in zip(expected, found, strict=True):
        for key in ("loss", "grad_norm", "val/loss", "val/rmse/10m_u_component_of_wind"):
            if key in there:
                assert here[key] == pytest.approx(there[key], rel=1e-4), (there["step"], key)
