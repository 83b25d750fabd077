"""Entry points called in this process: a new one takes seconds to start."""

import contextlib
import io
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch.distributed as dist

import plan
from train import train
from training.config_checks import load_checked

ROOT = Path(__file__).parent.parent


class Ended(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def run_main(main: Callable[[], None], *words: str) -> Ended:
    """As from the project's folder; what it does to the environment is gone afterwards."""
    out, err = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(err)
    logging.getLogger().addHandler(handler)
    with (
        contextlib.chdir(ROOT),
        patch.dict(os.environ),
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
    """Run plan.py, whose errors are its only lines on stderr."""
    return run_main(plan.main, *words)


def run_train(*words: str) -> None:
    """A training, which a refusal may end anywhere."""
    try:
        train(load_checked(list(words)))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
