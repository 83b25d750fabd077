"""What is attacked: a small archive of waves, and a run that was trained on it, forecast and scored."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.attack_case import Runner, contents
from tests.sample_archives import weatherbench
from tests.started_jobs import losses
from tests.test_identity import waves

STEPS, MORE = 8, 12  # of the run that is there, and of the one that goes on
CONFIG = """
[data]
path = "{path}"
variables = ["10m_u_component_of_wind", "10m_v_component_of_wind"]
train_period = ["2020-01-01", "2020-01-12"]
validation_period = ["2020-01-14", "2020-01-16"]
[model]
patch_size = [3, 4]
dim = 16
num_layers = 2
num_heads = 2
[lr_scheduler]
warmup_steps = 2
decay_type = "constant"
[training]
steps = 8
local_batch_size = 2
[metrics]
log_freq = 1
enable_tensorboard = false
[checkpoint]
enable = true
interval = 4
keep_latest_k = 2
keep_best = "val/loss"
async_mode = "disabled"
[validation]
interval = 4
lead_hours = [6]
local_batch_size = 4
plots = false
[forecast]
num_steps = 2
"""


@dataclass
class Stage:
    """Paths below one scratch folder; `losses` are of the run that goes on undisturbed to MORE steps."""

    scratch: Path
    data: Path
    config: Path
    run: Path
    losses: dict[int, float]

    def options(self, folder: Path | str, *more: str) -> list[str]:
        return ["--job.config_file", str(self.config), "--job.dump_folder", str(folder), *more]

    def fresh(self, name: str) -> Path:
        """A folder that is not there yet."""
        return self.scratch / "cases" / name.replace("/", "-").replace(" ", "-")

    def copying(self, target: Path, then: Callable[[Path], object] = lambda _: None) -> Callable[[], None]:
        """Prepares a case: a copy of the trained run, and what is done to it."""

        def prepare() -> None:
            shutil.copytree(self.run, target)
            then(target)

        return prepare

    def differs(self, folder: Path) -> str:
        """What is not as in the trained run, but for what forecasts and scores write."""
        theirs, ours = (contents(each, ("forecast.zarr", "evaluation")) for each in (self.run, folder))
        return ", ".join(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))

    def by_processes(self, count: int) -> list[str]:
        """Options of a run whose loader has processes: HDF5 holds a lock, so that threads do not serve."""
        path = self.scratch / "waves.nc"
        if not path.exists():
            waves().to_netcdf(path, engine="h5netcdf")
        return ["--data.path", str(path), "--data.cache_gib", "0", "--data.num_workers", str(count)]

    def goes_on(self, folder: Path) -> Callable[[], str]:
        """What is wrong with a run that was resumed: its losses after the step that it resumed from."""

        def check() -> str:
            found = losses(folder)
            wrong = [step for step in range(STEPS + 1, MORE + 1) if found.get(step) != self.losses[step]]
            return f"loss of step {wrong[0]} is {found.get(wrong[0])}" if wrong else ""

        return check


def build(scratch: Path, runner: Runner) -> Stage:
    """Trains, forecasts and scores; AssertionError where that does not work."""
    data = Path(weatherbench(scratch, waves()))
    config = scratch / "tiny.toml"
    config.write_text(CONFIG.format(path=data))
    stage = Stage(scratch, data, config, scratch / "run", {})
    for verb in ("train", "forecast", "evaluate"):
        ended = runner.run([verb, *stage.options(stage.run)], {}, 300)
        assert ended.code == 0, ended.stderr
    shutil.copytree(stage.run, scratch / "on")
    ended = runner.run(["train", *stage.options(scratch / "on", "--training.steps", str(MORE))], {}, 300)
    assert ended.code == 0, ended.stderr
    stage.losses = losses(scratch / "on")
    assert set(stage.losses) == set(range(1, MORE + 1)), json.dumps(stage.losses)
    return stage
