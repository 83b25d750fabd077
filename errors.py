"""Errors, exit codes and messages: a user's mistake is one line, any other error keeps its traceback."""

import difflib
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import date
from datetime import time as clock_time
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

if sys.version_info < (3, 11):  # noqa: UP036  # before what an older one cannot read
    print(f"rossby: {sys.executable} is too old: Python 3.11 to 3.14 is needed", file=sys.stderr)
    sys.exit(2)

LONGEST = 300  # characters of a value in an error
SECRET_USER = re.compile(r"(\w://)[^/@\s'\"]+@")
SECRET_VALUE = re.compile(
    r"([?&;][^=&\s'\"]*(?:key|token|secret|sig|signature|credential|password|passwd|pwd|auth)[^=&\s'\"]*=)[^&\s'\"]+",
    re.IGNORECASE,
)
# Names of options with secret values: "key", "aws_secret_access_key", "sas_token". In a text they are
# in quotes, "secret=abc", as data.storage_options does; where to look for some ("token=cloud") is no secret.
SECRET_NAME = r"(?:\w*[_.-])?(?:key|secret|token|password|passwd|pwd|credentials?|connection_string)(?:_id)?"
SECRET_OPTION = re.compile(
    r"(?P<quote>[\"'])(?P<name>" + SECRET_NAME + r"\s*=\s*)"
    r"(?!(?:anon|cloud|google_default|browser|cache)(?P=quote))(?:\\.|(?!(?P=quote))[^\\\n])+(?P=quote)",
    re.IGNORECASE,
)
FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130  # exit codes
EXIT_SAVED = 75  # saved, to be started again: EX_TEMPFAIL of sysexits.h
# An inherited SIG_IGN is respected: nohup's of SIGHUP, a shell's of SIGINT for what it runs in the
# background.
STOP_SIGNALS = [
    number
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
    if signal.getsignal(number) != signal.SIG_IGN
]
# Marker files of a host's ranks: one has reported, they have saved, the launcher has sent them a signal, and
# they ignore signals because the exit code of the run is known.
REPORTED, SAVED, SIGNALLED, ENDED = "reported", "saved", "signalled", "ended"
# Errors of torch.compile where a compiler is missing or fails: torch's for a CPU, Triton's for a GPU.
COMPILER_ERRORS = ("InvalidCxxCompiler", "CppCompileError", "CalledProcessError")
COMPILER_REASON = re.compile(r"(fatal error: |cannot find |No working |Failed to find ).*")
REPORT_SECONDS = 60.0  # in which ranks without a launcher report once on each host


class RunFailed(RuntimeError):
    """Error of a run that cannot continue, not caused by input: one line, exit code 1."""


class UserError(ValueError):
    """Error in the input: one line on stderr with the value, the place and the fix, exit code 2."""


class ConfigError(UserError):
    """Error in the configuration or on the command line: key, value, reason, fix."""


class DataError(UserError):
    """Error in a file that is missing, unreadable, or without what is needed from it: path, reason, fix."""


def require(condition: object, key: str, value: Any, reason: str) -> None:
    """Raise ConfigError for a value of a key unless the condition is met."""
    if not condition:
        refuse(key, value, reason)


def refuse(key: str, value: Any, reason: str) -> NoReturn:
    """Raise ConfigError for a value of a key."""
    raise ConfigError(f"{key} = {format_value(value)}: {reason}")


def format_value(value: Any) -> str:
    """Return a value as Python writes it, dates as TOML does, shortened to fit into a line."""
    text = value.isoformat() if isinstance(value, date | clock_time) else repr(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 40]} ... {text[-30:]}"


def without_secrets(text: str) -> str:
    """Return a text with *** in place of passwords and keys: user:password@, ?token=... and "secret=..."."""
    # Functions, not templates: re imports a module for a template, which fails while Python shuts down.
    text = SECRET_USER.sub(lambda found: f"{found[1]}***@", text)
    text = SECRET_VALUE.sub(lambda found: f"{found[1]}***", text)
    return SECRET_OPTION.sub(lambda found: f"{found['quote']}{found['name']}***{found['quote']}", text)


def nearest(name: str, valid: Iterable[Any], prefix: str = "") -> str:
    """Return 'did you mean X?' for a typo, else the list of valid names."""
    names = [str(v) for v in valid]
    close = difflib.get_close_matches(name, names, 1, cutoff=0.6)
    return f"did you mean {prefix}{close[0]}?" if close else f"valid: {', '.join(names)}"


def as_user_error(error: PermissionError, path: object = "") -> DataError:
    """Return the DataError for a file or folder without permission."""
    name = error.filename or path or "a file"
    return DataError(f"{name}: permission denied; give the user of this run the right to it")


def as_known_error(error: BaseException) -> BaseException:
    """Return the user's error in the place of a library's that a user can mend, or else `error`."""
    if isinstance(error, PermissionError):
        return as_user_error(error)
    # torch.compile needs a compiler, Python's headers, and for a CPU a folder without spaces.
    cause = getattr(error, "inner_exception", None)
    if type(cause).__name__ in COMPILER_ERRORS or "C compiler" in str(cause):
        reason = COMPILER_REASON.search(str(cause))
        return ConfigError(
            f"compile.enable = True: no C++ compiler that works ({reason[0] if reason else cause}); install "
            "g++ and Python's headers (python3-dev), have no space in the path of torch, or set it to false"
        )
    return error


def one_line(error: BaseException) -> str | None:
    """Return the line of a user's error or of a failed run; None for a bug of the project."""
    error = as_known_error(error)
    if isinstance(error, UserError | RunFailed):
        return without_secrets(" ".join(str(error).splitlines()))
    return None


def exit_code(error: BaseException) -> int:
    return BAD_INPUT if isinstance(as_known_error(error), UserError) else FAILED


def print_message(text: str) -> None:
    """Print a line on stderr; on a terminal it replaces a progress bar in the current line."""
    erased = "\r\x1b[K" if sys.stderr.isatty() else ""
    print(f"{erased}rossby: {text}", file=sys.stderr, flush=True)


def attempt_folder() -> Path | None:
    """Return torchelastic's folder of this host's ranks until they restart; None without torchelastic."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # <attempt>/<local rank>/error.json
    return Path(error_file).parents[1] if error_file else None


def is_reporting_rank() -> bool:
    """Return True on the first rank of a host that asks, before it reports what others may report, too."""
    if not {"RANK", "MASTER_PORT"} <= set(os.environ):
        return True
    name = f"rossby-{os.getuid()}-{os.getppid()}-{os.environ['MASTER_PORT']}"  # of srun's tasks
    folder = attempt_folder()
    marker = folder / REPORTED if folder else Path(tempfile.gettempdir(), name)
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        if folder or time.time() - marker.stat().st_mtime < REPORT_SECONDS:
            return False
        marker.touch()  # of another run
    return True


def end_process(code: int) -> NoReturn:
    """End this process at once: in Python's shutdown threads of obstore and of gloo crash, and a signal would
    print a traceback. Torchelastic treats every code except 0 as a failure and restarts the ranks: a rank
    that has saved ends with 0 there, and a marker file makes jobs/torchrun.py return 75.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    folder = attempt_folder()
    if code == EXIT_SAVED and folder:
        (folder / SAVED).touch()
        code = 0
    exit_now(code)


def exit_now(code: int) -> NoReturn:
    """Replaced in tests, which have to go on."""
    os._exit(code)


def show_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Show a package that this Python lacks in one line, and other errors as usual (sys.excepthook)."""
    name = (getattr(error, "name", None) or "").partition(".")[0]
    ours = any(Path(__file__).with_name(name + suffix).exists() for suffix in ("", ".py"))
    if not isinstance(error, ModuleNotFoundError) or ours:
        sys.__excepthook__(kind, error, trace)
        return
    if is_reporting_rank():
        fix = "run it with .venv/bin/python, which ./run_train.sh sets up, or install requirements.txt"
        print_message(f"{sys.executable} has no package {name}; {fix}")
    end_process(BAD_INPUT)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Guard a program: a user's mistake ends it after one line, which one rank of a host reports."""
    try:
        yield
    except BrokenPipeError:  # the program that reads this output has closed the pipe
        exit_now(0)
    except KeyboardInterrupt:
        print_message("interrupted")
        end_process(INTERRUPTED)
    except Exception as error:
        text = one_line(error)
        if text is None:
            raise
        if is_reporting_rank():
            print_message(text)
        end_process(exit_code(error))
