"""A run's report: what is on the page, and that a browser opens the page without complaint."""

import json
import re
import shutil
import subprocess
from base64 import b64encode
from pathlib import Path

import pytest

from command_line import to_toml
from errors import DataError
from tests.started_jobs import ROOT
from training.config_checks import load_checked
from verification.report_page import main, write_page

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def write_run(folder: Path, *words: str) -> Path:
    """Twelve steps of 2 s, logged every third; stopped after 9, of which 3 were done again; by two ranks."""
    folder.mkdir()
    config = load_checked(["--job.config_file", str(ROOT / "train_configs/demo.toml"), *words])
    (folder / "config.toml").write_text(to_toml(config))
    start = {"time": "2026-01-01T00:00:00+00:00", "ranks": 2, "layout": {"dp_shard": 2, "tp": 1}}
    start |= {"device": "cpu", "torch": "2.13.0", "python": "3.11.7"}
    starts = [start | {"step": 0, "reached": 0}, start | {"step": 6, "reached": 9}]
    (folder / "starts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in starts))
    step = {"loss": 0.5, "grad_norm": 1.0, "lr": 1e-3, "samples_per_second": 8.0, "step_seconds": 2.0}
    step |= {"memory_gib": 1.0, "epoch": 0.1}
    records = [step | {"step": n, "skipped_steps": s} for n, s in ((3, 0), (6, 2), (9, 1), (12, 1))]
    scores = {"step": 12, "val/loss": 0.4, "val/dates": 7, "val/dates@24h": 5}
    for number, key in enumerate(("rmse", "rmse_damped_persistence")):
        scores |= {f"val/{key}/geopotential:300": 71.0 + number, f"val/{key}/geopotential:300@24h": 293.0}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in [*records, scores]))
    return folder


def test_a_page_has_scores_then_pictures_with_captions_and_its_command(tmp_path: Path, capsys) -> None:
    """It had no score, and two pictures of one name."""
    folder = write_run(tmp_path / "run")
    for name in ("plots", "evaluation"):
        (folder / name).mkdir()
        (folder / name / "rmse.png").write_bytes(name.encode())
    main([str(folder)])
    page = (folder / "report.html").read_text()
    assert capsys.readouterr().out == f"written: {folder / 'report.html'}\n"
    assert not re.findall(r'(?:src|href)="(?!data:|#)[^"]*', page)  # it needs nothing else
    for text in ("12 steps", "2.13.0", "demo", f"verification.report_page {folder}"):
        assert text in page
    assert "validation of step 12" in page and page.index("<table") < page.index("<figure")
    pictures = dict(re.findall(r'base64,([^"]*)" alt="[^"]*"><figcaption>(.*?)</figcaption>', page))
    captions = [pictures[b64encode(name).decode()] for name in (b"evaluation", b"plots")]
    assert "of the evaluation" in captions[0] and "of the last validation" in captions[1]


def test_bad_input_is_one_line(tmp_path: Path, capsys) -> None:
    folder = write_run(tmp_path / "run")
    with pytest.raises(DataError, match="cannot be written"):
        write_page(folder, tmp_path)
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path)])
    assert ended.value.code == 2 and capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason="no Chromium is installed")
def test_a_browser_opens_it_without_errors(tmp_path: Path) -> None:
    write_page(write_run(tmp_path / "a"), tmp_path / "page.html")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", f"file://{tmp_path / 'page.html'}"]
    done = subprocess.run([str(BROWSER), *options], capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr and "Configuration" in done.stdout
