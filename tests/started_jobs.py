"""Jobs of a tiny model through run_train.sh, as a user starts them, for tests that kill them."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import xarray as xr

from tests.sample_archives import training_store, weatherbench

ROOT = Path(__file__).parent.parent
ENDLESS = 100_000  # steps
LATITUDE, LONGITUDE = np.arange(75.0, -76, -30.0), np.arange(0, 360, 45.0)
SMALL_RUN: dict[str, dict[str, Any]] = {
    "model": {"attention_backend": "sdpa", "patch_size": [3, 4], "dim": 16, "num_layers": 2, "num_heads": 2},
    "lr_scheduler": {"warmup_steps": 5, "decay_type": "constant"},
    "training": {"steps": ENDLESS, "local_batch_size": 2},
    "metrics": {"log_freq": 1, "loggers": []},
    "checkpoint": {"enable": True, "interval": ENDLESS},
    "validation": {"enable": False},
}


VALIDATION = ["--validation.enable", "--validation.lead_hours=[6]", "--validation.plots=false"]
VALIDATION += ['--data.validation_period=["2020-01-10","2020-01-11"]']  # of the waves of `write_config`


def small_wave(num_dates: int, number: int = 2, size: float = 10.0) -> np.ndarray:
    """A wave (T, 6, 8) of so many crests that travels east."""
    phase = np.deg2rad(LONGITUDE) + 0.4 * np.arange(num_dates)[:, None, None]
    return size * np.cos(np.deg2rad(LATITUDE))[:, None] * np.sin(number * phase)


def small_dataset(fields: dict[str, np.ndarray]) -> xr.Dataset:
    """Analyses of winds (T, 6, 8), every six hours from 2020 on."""
    number = len(next(iter(fields.values())))
    time = np.datetime64("2020-01-01", "ns") + np.arange(number) * np.timedelta64(6, "h")
    coords = {"time": time, "latitude": LATITUDE, "longitude": LONGITUDE}
    about = {"units": "m s-1"}
    return xr.Dataset({n: (tuple(coords), each.astype("f4"), about) for n, each in fields.items()}, coords)


def write_config(
    folder: Path, ds: xr.Dataset | None = None, *, path: str = "", **sections: dict[str, Any]
) -> Path:
    """A configuration of a tiny model, trained on until it is ended, and the archive it names: of waves on a
    small grid, of these analyses, or one at `path`. Keys of `sections` come before those of SMALL_RUN.
    """
    data: dict[str, Any] = {"train_period": ["2020-01-01", "2020-01-09"]} if ds is None and not path else {}
    if not path:
        ds = small_dataset({"10m_u_component_of_wind": small_wave(40)}) if ds is None else ds
        with redirect_stdout(io.StringIO()):
            store = training_store(weatherbench(folder, ds), folder / "store.zarr")
        data |= {"path": store.path, "variables": list(map(str, ds.data_vars))}
    whole = {"data": data | ({"path": path} if path else {})} | SMALL_RUN
    whole |= {name: whole.get(name, {}) | keys for name, keys in sections.items()}
    file = folder / "tiny.toml"
    file.write_text(tomli_w.dumps(whole))
    return file


def run_options(config_file: Path, folder: Path, *more: str) -> list[str]:
    return ["--job.config_file", str(config_file), "--job.dump_folder", str(folder), *more]


def started_by(program: str, ranks: int = 1) -> list[str]:
    """A command that runs a program of the project on so many ranks."""
    launcher = ["-m", "jobs.torchrun", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return [sys.executable, *launcher, str(ROOT / program)]


def run_program(
    *command: str | Path, cwd: str | Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with these variables of the environment too."""
    variables = os.environ | {"ROSSBY_PYTHON": sys.executable} | environment
    return subprocess.run(command, cwd=cwd, env=variables, timeout=250, capture_output=True, text=True)


def wait_until(condition: Callable[[], object], seconds: float = 60, what: Callable[[], str] = str) -> None:
    """AssertionError: it does not come true in so many seconds; `what` says what there is instead."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s in vain\n{what()}"
        time.sleep(0.01)


class Job:
    """A launcher with its ranks. Its output goes to a file, so that nothing waits for a reader."""

    def __init__(
        self,
        config_file: Path,
        folder: Path,
        *options: str,
        host: Sequence[str] = (),
        command: Sequence[str] | None = None,
        **environment: str,
    ) -> None:
        """host: words before a command that run it elsewhere. command: in the place of run_train.sh."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.log = folder, folder / f"log-{time.monotonic_ns()}.txt"
        self.started = time.time()
        words = command or [str(ROOT / "run_train.sh")]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*host, *words, *run_options(config_file, folder, *options)],
                env=os.environ | {"ROSSBY_PYTHON": sys.executable} | environment,
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self.log.read_text()

    def ranks(self) -> dict[int, int]:
        """Global rank -> process."""
        found = {}
        for pid in _children(self.process.pid):
            try:
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:  # it ends
                continue
            if rank := [v[5:] for v in variables if v.startswith(b"RANK=")]:
                found[int(rank[0])] = pid
        return found

    def wait_for_step(self, step: int, timeout: float = 120) -> None:
        path = self.folder / "metrics.jsonl"  # of a run before this one until this one has written

        def is_there() -> bool:
            is_new = path.exists() and path.stat().st_mtime >= self.started
            assert self.process.poll() is None, self.output
            return is_new and last_step(self.folder) >= step

        wait_until(is_there, timeout, lambda: self.output)

    def kill_rank(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.ranks()[rank], number)

    def kill_all(self) -> None:
        """The launcher and all that it started die at once, as when the power fails."""
        self.signal_all(signal.SIGKILL)
        self.process.wait()

    def signal_all(self, number: signal.Signals) -> None:
        """To the launcher and all that it started."""
        for pid in [self.process.pid, *_children(self.process.pid)] if self.process.poll() is None else []:
            os.kill(pid, number)

    def end(self, timeout: float = 120) -> int:
        """The exit code, once it has ended."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill_all()
            raise AssertionError(f"still running after {timeout} s:\n{self.output}") from None


def _children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in listed.read_text().split()] if listed.exists() else []


def records(folder: Path) -> list[dict]:
    """The complete lines of metrics.jsonl."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def last_step(folder: Path) -> int:
    return max((record["step"] for record in records(folder)), default=0)


def losses(folder: Path) -> dict[int, float]:
    """Step -> loss."""
    return {record["step"]: record["loss"] for record in records(folder) if "loss" in record}
