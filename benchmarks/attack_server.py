"""Runs verbs in processes that have imported torch already: a case takes tenths of a second, not seconds.

Reads orders, one JSON object a line (verb, arguments, environment, limit, files for the output), forks, and
answers how the process ended. The process is a new session: what it leaves behind is counted, then killed.
"""

import gc
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
MOST_BYTES = (
    8 * 2**30
)  # of memory a case may ask for: who wants more meets a MemoryError, not the machine's end
LEAVE_SECONDS = 3.0  # that processes of a case have to end after it


def verbs() -> dict[str, Any]:
    import evaluate
    import forecast
    import plan
    import planning.start_checks
    import train

    return {
        "train": train,
        "forecast": forecast,
        "evaluate": evaluate,
        "plan": plan,
        "checks": planning.start_checks,
    }


def become(order: dict[str, Any], modules: dict[str, Any]) -> None:
    """This process is the verb from here on, as `python train.py ...` is."""
    from command_line import answer_early
    from training.config_checks import check

    os.setsid()
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(order[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.environ.clear()
    os.environ.update(order["environment"])
    verb, arguments = order["verb"], order["arguments"]
    sys.argv = [f"{verb}.py", *arguments]
    module = modules[verb]
    answer_early(module.__doc__, check if verb != "plan" else None, getattr(module, "OPTIONS", None))
    module.main(arguments) if verb == "checks" else module.main()


def watch(pid: int, limit: float) -> dict[str, Any]:
    """Waits for a session; its leader's exit code (None: it ran past the limit), and what it left behind."""
    began, code = time.monotonic(), None
    while code is None and time.monotonic() < began + limit:
        ended, status = os.waitpid(pid, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if ended else None
        time.sleep(0 if ended else 0.01)
    seconds, left = time.monotonic() - began, alive(pid)
    while code is not None and left and time.monotonic() < began + seconds + LEAVE_SECONDS:
        time.sleep(0.02)
        left = alive(pid)
    if alive(pid):
        os.killpg(pid, signal.SIGKILL)
    if code is None:
        os.waitpid(pid, 0)
    return {"code": code, "seconds": seconds, "left": left and code is not None}


def alive(session: int) -> bool:
    try:
        os.killpg(session, 0)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    import zarr.core.sync  # noqa: F401  # its threads begin with the first store, in the process of a case

    modules = verbs()
    gc.freeze()  # or every process collects, and so copies, what all of them share
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if not pid:
            return become(order, modules)
        print(json.dumps(watch(pid, order["limit"])), flush=True)


if __name__ == "__main__":
    main()
