"""train_configs/era5_64x32.toml unchanged, on a store of the same metadata behind a real S3 server."""

import math
import tomllib
from pathlib import Path

import pytest

from datasets.selection import open_selection
from tests.era5_like import write_era5_like
from tests.planned import run_train
from tests.s3_server import S3Server
from tests.started_jobs import ROOT
from training.config_checks import load_checked

CONFIG = ROOT / "train_configs/era5_64x32.toml"


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    """The last three weeks of 2017 and the first of 2018: the configuration's periods are there."""
    path = tmp_path_factory.mktemp("era5") / "64x32.zarr"
    return Path(write_era5_like(path, "2017-12-11", 112))


def test_the_configuration_trains_and_validates(store, tmp_path):
    with S3Server({"weatherbench2/64x32.zarr": store}, latency=0.01, error_rate=0.02) as server:
        source = ["--data.path", "s3://weatherbench2/64x32.zarr", *server.arguments]
        run = ["--job.config_file", str(CONFIG), "--job.dump_folder", str(tmp_path), "--training.steps", "2"]
        few = ["--validation.plots", "false", "--metrics.loggers=[]", "--metrics.log_freq", "1"]
        records = run_train(*run, *source, *few)
    assert [record["step"] for record in records if "loss" in record] == [1, 2]
    scores = {key: value for record in records for key, value in record.items() if key.startswith("val/")}
    assert math.isfinite(scores["val/rmse/geopotential:500@72h"]) and "val/rmse/2m_temperature" in scores


def test_its_data_are_those_of_the_store(store):
    """Grid, order of dims and levels are found out; north stands first."""
    config = load_checked(["--job.config_file", str(CONFIG), "--data.path", str(store)])
    selection = open_selection(config.data, config.model.patch_size, config.validation.lead_hours)
    assert selection.archive.grid.shape == (32, 64) and selection.archive.grid.latitude[0] > 87
    assert len(selection.variables) == 16 and len(selection.train) == 84 and len(selection.validation) == 28


def test_its_header_says_how_much_is_read():
    config, opening = tomllib.loads(CONFIG.read_text()), CONFIG.read_text().partition("\n\n")[0]
    dates = 4 * (3 * 365 + 1 + 365)
    read, kept = (4 * 32 * 64 * fields * dates for fields in (4 * 13 + 4, 16))  # bytes of float32
    assert dates == 5844 and f"{dates:,}" in opening
    assert f"{read / 1e9:.1f} GB, before" in opening and f"{kept / 1e9:.2f} GB" in opening
    assert config["data"]["path"].startswith("gs://weatherbench2/")
