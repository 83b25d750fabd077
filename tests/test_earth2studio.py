"""scripts/earth2studio_model.py with the real package: its deterministic workflow equals forecast.py.

ROSSBY_EARTH2STUDIO names the Python of an environment with earth2studio==0.19.0, which has other pins.
"""

import os
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from tests.planned import run_export, run_forecast
from tests.started_jobs import ROOT, run_program
from tests.test_roles import RAIN, WIND, folder, options, run  # noqa: F401

PYTHON = os.environ.get("ROSSBY_EARTH2STUDIO", "")
NEEDS_PACKAGE = pytest.mark.skipif(not PYTHON, reason="ROSSBY_EARTH2STUDIO names no Python with earth2studio")
DATE = "2020-01-20"
PROGRAM = """
import sys
import numpy as np
import xarray as xr
from earth2studio import run
from earth2studio.io import XarrayBackend
from earth2studio.models.px import PrognosticModel
from earth2studio.perturbation import Zero
from earth2studio_model import NAMES, RossbyModel

folder, archive, date, target = sys.argv[1:]
names, data = {short: name for name, short in NAMES.items()}, xr.open_zarr(archive)

def source(time, variable):
    fields = [data[names[each]].sel(time=np.asarray(time)) for each in np.atleast_1d(variable)]
    found = xr.concat(fields, xr.DataArray(np.atleast_1d(variable), dims="variable"))
    found = found.rename(latitude="lat", longitude="lon").sortby("lat", ascending=False)
    return found.transpose("time", "variable", "lat", "lon").load()

model = RossbyModel.from_pretrained(folder)
assert isinstance(model, PrognosticModel)
found = run.deterministic([date], 3, model, source, XarrayBackend({}), verbose=False)
found.root.to_netcdf(target)
members = run.ensemble([date], 2, 3, model, source, XarrayBackend({}), Zero(), batch_size=2, verbose=False)
assert members.root.sizes["ensemble"] == 3
"""


@pytest.mark.slow
@NEEDS_PACKAGE
@pytest.mark.parametrize("changes", [[], ["--data.history", "2"]], ids=["roles", "history"])
def test_its_workflow_equals_forecast_py(folder: Path, tmp_path: Path, changes) -> None:  # noqa: F811
    words = [*options(folder)[:2], "--job.dump_folder", str(tmp_path / "run"), *changes]
    run(words)
    run_export(words, tmp_path / "model")
    start = ["--forecast.period", f'["{DATE}", "{DATE}T00"]', "--forecast.num_steps", "3"]
    own = run_forecast([*words, *start], tmp_path / "own.zarr", "--forecast.persist_forcings")

    (tmp_path / "workflow.py").write_text(PROGRAM)
    arguments = [str(tmp_path / "model"), str(folder / "wb.zarr"), DATE, str(tmp_path / "theirs.nc")]
    environment = {"PYTHONPATH": str(ROOT / "scripts")}
    done = run_program(PYTHON, tmp_path / "workflow.py", *arguments, cwd=tmp_path, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = xr.open_dataset(tmp_path / "theirs.nc")
    assert set(theirs.data_vars) == {"u10m", "tp06"}  # the forcing is no output
    for short, name in (("u10m", WIND), ("tp06", RAIN)):
        expected, found = own[name].values[0], theirs[short].values[0, 1:]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * expected.std())
    assert np.isnan(theirs["tp06"].values[0, 0]).all() and np.isfinite(theirs["u10m"].values[0, 0]).all()
