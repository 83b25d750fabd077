"""A run's report: what is on the page, and that a browser opens the page without complaint."""

import re
import shutil
import subprocess
from base64 import b64encode
from pathlib import Path

import pytest
import torch

from errors import DataError
from tests.planned import run_train
from tests.started_jobs import run_options, write_config
from verification.report_page import main, write_page

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run of two steps with a validation."""
    place = tmp_path_factory.mktemp("report")
    periods = {
        "train_period": ["2020-01-01", "2020-01-08"],
        "validation_period": ["2020-01-09", "2020-01-10"],
    }
    validation = {"enable": True, "plots": False, "lead_hours": [6]}
    config = write_config(place, data=periods, training={"steps": 2}, validation=validation)
    run_train(*run_options(config, place / "run"))
    return place / "run"


def test_a_page_has_scores_then_pictures_with_captions_and_its_command(folder: Path, capsys) -> None:
    """It had no score, and two pictures of one name."""
    for name in ("plots", "evaluation"):
        (folder / name).mkdir()
        (folder / name / "rmse.png").write_bytes(name.encode())
    main([str(folder)])
    page = (folder / "report.html").read_text()
    assert capsys.readouterr().out == f"written: {folder / 'report.html'}\n"
    assert not re.findall(r'(?:src|href)="(?!data:|#)[^"]*', page)  # it needs nothing else
    variable = "10m_u_component_of_wind"
    for text in ("2 steps", torch.__version__, variable, f"verification.report_page {folder}"):
        assert text in page
    assert "validation of step 2" in page and page.index("<table") < page.index("<figure")
    pictures = dict(re.findall(r'base64,([^"]*)" alt="[^"]*"><figcaption>(.*?)</figcaption>', page))
    captions = [pictures[b64encode(name).decode()] for name in (b"evaluation", b"plots")]
    assert "of the evaluation" in captions[0] and "of the last validation" in captions[1]


def test_bad_input_is_one_line(folder: Path, tmp_path: Path, capsys) -> None:
    with pytest.raises(DataError, match="cannot be written"):
        write_page(folder, tmp_path)
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path)])
    assert ended.value.code == 2 and capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason="no Chromium is installed")
def test_a_browser_opens_it_without_errors(folder: Path, tmp_path: Path) -> None:
    write_page(folder, tmp_path / "page.html")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", f"file://{tmp_path / 'page.html'}"]
    done = subprocess.run([str(BROWSER), *options], capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr and "Configuration" in done.stdout
