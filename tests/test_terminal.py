"""Terminal output of a run: complete lines, and no unexpected ones."""

import os
import pty
import re
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path

from tests.started_jobs import ROOT, VALIDATION, run_options, write_config

STAMP = r"\d\d:\d\d:\d\d  "  # before every line of the log


def shown(*command: str) -> str:
    """All that a program writes to a terminal."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 110))
    process = subprocess.Popen(command, cwd=ROOT, stdout=theirs, stderr=theirs)
    os.close(theirs)
    parts = []
    with suppress(OSError):  # of Linux, where all processes have closed the other end; others read nothing
        while part := os.read(ours, 65536):
            parts.append(part)
    os.close(ours)
    text = b"".join(parts).decode()
    assert process.wait() == 0, text
    return text


def test_a_line_of_the_log_is_alone_in_its_line(tmp_path: Path) -> None:
    """Validation says what it took; a recording of the profiler says nothing."""
    files = run_options(write_config(tmp_path), tmp_path / "run")
    options = ["--profiling.enable_profiling", "--profiling.profile_freq=4", "--checkpoint.enable=false"]
    text = shown(sys.executable, "train.py", *files, *VALIDATION, *options, "--training.steps=8")
    lines = re.split(r"[\r\n]|\x1b\[A", text)  # \r: written over; ESC [A: one line up
    stamped = [line for line in lines if re.search(STAMP, line)]
    assert len(stamped) >= 5 and all(re.match(STAMP, line) for line in stamped), text
    assert re.search(r"validated \d+ dates in \d+\.\d s", text)
    assert "USDT" not in text and ".cpp:" not in text, text


def test_an_error_takes_the_place_of_a_bar() -> None:
    program = """
import sys
from tqdm import tqdm
import errors
from errors import RunFailed, one_line_errors
errors.exit_now = sys.exit
bar = tqdm(total=9)
try:
    with one_line_errors():
        raise RunFailed("the run cannot go on")
except SystemExit as ended:
    assert ended.code == 1
bar.disable = True
"""
    text = shown(sys.executable, "-c", program)
    assert text.partition("\x1b[K")[2].strip() == "rossby: the run cannot go on"
