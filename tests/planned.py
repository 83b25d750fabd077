"""plan.py called in this process: a new one takes seconds to start."""

import contextlib
import io
import os
import sys
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import plan

ROOT = Path(__file__).parent.parent


class Ended(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def run_plan(*words: str) -> Ended:
    """As from the project's folder; what it does to the environment is gone afterwards."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(ROOT),
        patch.dict(os.environ),
        patch.object(sys, "argv", ["plan.py", *words]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            plan.main()
            code = 0
        except SystemExit as end:
            code = end.code
    return Ended(int(code or 0), out.getvalue(), err.getvalue())
