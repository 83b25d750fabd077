"""What a user can get wrong, said in one line; every other error is ours, and keeps its traceback."""

import difflib
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import date, time
from pathlib import Path
from typing import Any, NoReturn

LONGEST = 300  # characters of a value in an error
SECRET_USER = re.compile(r"(\w://)[^/@\s'\"]+@")
SECRET_VALUE = re.compile(
    r"([?&;][^=&\s'\"]*(?:key|token|secret|sig|signature|credential|password|passwd|pwd|auth)[^=&\s'\"]*=)[^&\s'\"]+",
    re.IGNORECASE,
)
# Names of options whose values are secrets: "key", "aws_secret_access_key", "sas_token". In a text they stand
# in quotes, "secret=abc", as data.storage_options does; where to look for some ("token=cloud") is no secret.
SECRET_NAME = r"(?:\w*[_.-])?(?:key|secret|token|password|passwd|pwd|credentials?|connection_string)(?:_id)?"
SECRET_OPTION = re.compile(
    r"(?P<quote>[\"'])(?P<name>" + SECRET_NAME + r"\s*=\s*)"
    r"(?!(?:anon|cloud|google_default|browser|cache)(?P=quote))(?:\\.|(?!(?P=quote))[^\\\n])+(?P=quote)",
    re.IGNORECASE,
)
FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130  # exit codes
EXIT_SAVED = 75  # saved, to be started again: EX_TEMPFAIL of sysexits.h
SAVED = "saved"  # file in torchelastic's folder that means it


class RunFailed(RuntimeError):
    """The run cannot go on, and nobody's input is to blame: one line that says where and why, exit code 1."""


class UserError(ValueError):
    """Bad input: one line on stderr that names what, where and the fix, then exit code 2."""


class ConfigError(UserError):
    """What the configuration or the command line asks for cannot be done: key, value, reason, fix."""


class DataError(UserError):
    """A file is not there, cannot be read, or does not hold what was asked of it: path, reason, fix."""


def refuse(key: str, value: Any, reason: str) -> NoReturn:
    raise ConfigError(f"{key} = {shown(value)}: {reason}")


def shown(value: Any) -> str:
    """A value in an error: as Python writes it, but dates as TOML does, and no more than fits a line."""
    text = value.isoformat() if isinstance(value, date | time) else repr(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 40]} ... {text[-30:]}"


def without_secrets(text: str) -> str:
    """A text whose URLs and options say neither password nor key: user:password@, ?token=... and "secret=..."
    become ***.
    """
    # Functions: a template is looked up in a module, and there is none any more when Python shuts down.
    text = SECRET_USER.sub(lambda found: f"{found[1]}***@", text)
    text = SECRET_VALUE.sub(lambda found: f"{found[1]}***", text)
    return SECRET_OPTION.sub(lambda found: f"{found['quote']}{found['name']}***{found['quote']}", text)


def nearest(name: str, valid: Iterable[Any], prefix: str = "") -> str:
    """'did you mean X?' for a typo, else the list of valid names."""
    names = [str(v) for v in valid]
    close = difflib.get_close_matches(name, names, 1, cutoff=0.6)
    return f"did you mean {prefix}{close[0]}?" if close else f"valid: {', '.join(names)}"


WHY_LOST = "for one by the kernel when memory runs out: then data.num_workers has to be smaller"


def is_lost_loader(error: BaseException) -> bool:
    """Whether a loader process was killed: torch raises this wherever the main thread happens to be."""
    return isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker")


def attempt_folder() -> Path | None:
    """Return torchelastic's folder that the ranks of this host share until they restart; None without
    torchelastic.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # <attempt>/<local rank>/error.json
    return Path(error_file).parents[1] if error_file else None


def is_first_to_say() -> bool:
    """Return True on the rank of its host that reports what others may have found too."""
    folder = attempt_folder()
    if folder is None:
        return os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        (folder / "reported").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def tell(text: str) -> None:
    """A line on stderr: on a terminal in the place of a progress bar that may stand where the cursor is."""
    erased = "\r\x1b[K" if sys.stderr.isatty() else ""
    print(f"{erased}rossby: {text}", file=sys.stderr, flush=True)


def end_when_interrupted() -> None:
    """Ctrl-C ends this process in one line, until somebody listens who has something to save."""

    def end(*_: object) -> None:
        tell("interrupted")
        os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, end)


def end_process(code: int) -> NoReturn:
    """End a single process as Python ends, and a rank at once: a thread that exchanges with other ranks while
    Python shuts down adds "terminate called without an active exception" to what was reported.
    """
    if "RANK" not in os.environ:
        sys.exit(code)
    end_rank(code)


def end_rank(code: int) -> NoReturn:
    """End this process at once. Torchelastic takes every code but 0 for a failure, and would start the ranks
    again: one that has saved ends with 0 there, and leaves a mark from which jobs/torchrun.py gives 75.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    folder = attempt_folder()
    if code == EXIT_SAVED and folder:
        (folder / SAVED).touch()
        code = 0
    os._exit(code)


def one_line(error: BaseException) -> str | None:
    """Return the line for a user's mistake or a run that cannot go on; None for an error of ours."""
    text = " ".join(str(error).splitlines())
    if isinstance(error, UserError | RunFailed):
        return without_secrets(text)
    return f"{text} ({WHY_LOST})" if is_lost_loader(error) else None


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Guard a program: a user's mistake ends it after one line, which one rank of a host reports."""
    try:
        yield
    except BrokenPipeError:  # the reader of this output has closed it
        os._exit(0)
    except Exception as error:
        text = one_line(error)
        if text is None:
            raise
        if is_first_to_say():
            tell(text)
        end_process(BAD_INPUT if isinstance(error, UserError) else FAILED)
