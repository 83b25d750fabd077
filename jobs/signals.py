"""Signals that ask a program to end, handled from its first line on: imported before anything heavy is.

run_train.sh and jobs/torchrun.py start programs with these signals blocked, so that none comes before its
handler: `handle_stop_signals` unblocks them.
"""

import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterable
from typing import Any

import errors
from errors import EXIT_SAVED, INTERRUPTED, STOP_SIGNALS

TRAINER = "ROSSBY_TRAINER"  # environment variable of a trainer's processes: its process id


def handle_stop_signals(handler: Any, numbers: Iterable[int] = STOP_SIGNALS) -> None:
    """Set the handler (or SIG_IGN) of these signals, and unblock all that ask a program to end."""
    for number in numbers:
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def end_at_signals(trains: bool = False) -> None:
    """End this process with one line at Ctrl-C, and one that trains at all signals that ask it to end, until
    the run handles them itself.
    """
    sys.excepthook = errors.show_error
    has_ended = threading.Lock()
    os.environ.pop(TRAINER, None)  # of a program that has started this one

    def end(number: int, _: object) -> None:
        if not has_ended.acquire(blocking=False):
            return  # another signal, or another thread
        text, code = describe_early_end(number) if trains else ("interrupted", INTERRUPTED)
        if is_of_torchelastic(number):
            errors.exit_now(errors.FAILED)
        if errors.is_reporting_rank():
            os.write(2, f"rossby: {text}\n".encode())  # print fails where the signal interrupted a print
        errors.exit_now(code)

    handle_stop_signals(end, [number for number in STOP_SIGNALS if trains or number == signal.SIGINT])


def describe_early_end(number: int) -> tuple[str, int]:
    """Return the last line and the exit code of a run that a signal ends before its first step."""
    code = INTERRUPTED if number == signal.SIGINT else EXIT_SAVED
    name = signal.Signals(number).name
    return f"{name}: before the first step, with nothing to save (code {code})", code


def is_of_torchelastic(number: int) -> bool:
    """Return True for a SIGTERM that the launcher has not forwarded: torchelastic sends it to all ranks when
    one of them has failed, which is reported elsewhere.
    """
    folder = errors.attempt_folder()
    return number == signal.SIGTERM and folder is not None and not (folder / errors.SIGNALLED).exists()


def end_with_parent(parent: int) -> None:
    """Let this process end with the one that has started it, on Linux: after a kill it must not write into
    the folder of the next run.
    """
    if prctl := getattr(ctypes.CDLL(None), "prctl", None):
        prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, with the thread that has started it
    if os.getppid() != parent:  # which has ended before that
        os._exit(1)


def end_with_trainer() -> None:
    """Let this process end with its trainer, if one has started it and no conversion before the run."""
    if TRAINER in os.environ:
        end_with_parent(int(os.environ[TRAINER]))


def signal_socket() -> socket.socket:
    """Return a socket that gets the number of each handled signal as a byte, at once: a handler of Python
    waits until the main thread leaves C code, such as a collective. A byte 0 sent to `peer` wakes the reader.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
    return reader
