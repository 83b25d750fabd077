"""Entry points called in this process: a new one takes seconds to start."""

import contextlib
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch.distributed as dist
import xarray as xr

import errors
import forecast
import plan
from tests.started_jobs import ROOT, records
from train import train
from training.config_checks import load_checked


class Ended(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@contextlib.contextmanager
def no_group_left() -> Iterator[None]:
    """A run that an error ends leaves its process group."""
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_main(main: Callable[[], None], *words: str) -> Ended:
    """As from the project's folder; what it does to the environment is gone afterwards."""
    out, err = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(err)
    logging.getLogger().addHandler(handler)
    with (
        no_group_left(),
        contextlib.chdir(ROOT),
        patch.dict(os.environ),
        patch.object(errors, "exit_now", sys.exit),
        patch.object(sys, "argv", [f"{main.__module__}.py", *words]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code
        finally:
            logging.getLogger().removeHandler(handler)
    return Ended(int(code or 0), out.getvalue(), err.getvalue())


def run_plan(*words: str) -> Ended:
    """Run plan.py, whose errors are its only lines on stderr, without runs of this machine as anchors."""
    return run_main(plan.main, *words, *([] if "--anchor" in words else ["--anchor", "none"]))


def run_train(*words: str) -> list[dict]:
    """A training, which a refusal may end anywhere; the lines of its metrics.jsonl. No process writes its
    checkpoints, unless words ask for one: it takes seconds to start.
    """
    config = load_checked(["--checkpoint.async_mode=disabled", *words])
    with no_group_left():
        train(config)
    return records(config.dump_folder)


def run_forecast(options: Sequence[str], path: Path, *more: str, code: int = 0) -> xr.Dataset:
    """The forecasts of a run, in this process."""
    config = load_checked([*options, "--forecast.path", str(path), *more])
    with no_group_left():
        assert forecast.forecast(config) == code
    return xr.open_zarr(path, decode_timedelta=True).load()


def run_export(options: Sequence[str], folder: Path) -> None:
    done = run_main(forecast.main, *options, "--export", str(folder))
    assert done.returncode == 0, done.stderr
