"""A run's report: what is counted from its files, and that a browser opens the page without complaint."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from command_line import to_toml
from errors import DataError
from tests.started_jobs import ROOT
from training.config_checks import load_checked
from verification.report_page import describe, gather_scores, main, open_run, tabulate, write_page

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


def test_time_and_starts_of_a_run(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "run", "--training.steps=4000"))
    found = describe(run)
    assert found["steps"] == "12 of 4,000" and found["time of the steps"] == "0:00:24"
    assert found["starts"] == "2" and found["device hours"] == "0.01"
    assert found["ranks"] == "2 x cpu dp_shard 2"
    (run.folder / "starts.jsonl").write_text('{"step": 0, "reac')  # torn
    assert open_run(run.folder).starts == []


def test_scores_of_a_validation_and_of_evaluate(tmp_path: Path) -> None:
    """Leads that are not in order belong to the scores that the validation gives them."""
    run = open_run(write_run(tmp_path / "run", "--validation.lead_hours=[24,6]"))
    table = tabulate(gather_scores({"run": run})).reset_index()
    assert list(table.columns) == ["variable", "hours", "dates", "run", "damped persistence", "units"]
    assert table.values.tolist()[0] == ["geopotential:300", 6, "7", 71, 72, "m2 s-2"]
    assert table.values.tolist()[1] == ["geopotential:300", 24, "5", 293, 293, "m2 s-2"]
    (run.folder / "evaluation").mkdir()
    line = {"metric": "rmse", "region": "global", "level": 300.0, "units": "m2 s-2", "num_dates": 23}
    line |= {"variable": "geopotential", "lead_hours": 24}
    scores = [line | {"forecast": "model", "value": 9.0}, line | {"forecast": "climatology", "value": 10.0}]
    pd.DataFrame([*scores, scores[0] | {"metric": "mae"}]).to_csv(run.folder / "evaluation/scores.csv")
    rows = tabulate(gather_scores({"run": run})).reset_index().values.tolist()
    assert rows == [["geopotential:300", 24, "23", 9, 10, "m2 s-2"]]


def test_two_runs_side_by_side(tmp_path: Path, capsys) -> None:
    """Also runs of the same name."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = write_run(tmp_path / "a/run"), write_run(tmp_path / "b/run", "--optimizer.lr=1e-3")
    main([str(first), str(second)])
    page = (first / "report.html").read_text()
    assert capsys.readouterr().out == f"written: {first / 'report.html'}\n"
    assert not re.findall(r'(?:src|href)="(?!data:|#)[^"]*', page)  # it needs nothing else
    assert str(first) in page and str(second) in page
    assert re.search(r"<th>optimizer.lr</th>\s*<td>0.002</td>\s*<td>0.001</td>", page)


def test_bad_input_is_one_line(tmp_path: Path, capsys) -> None:
    folder = write_run(tmp_path / "run")
    for text in ("[data]\npath = 1\n", "validation = 3\n", "[data"):
        (tmp_path / "broken").mkdir(exist_ok=True)
        (tmp_path / "broken/config.toml").write_text(text)
        shutil.copy(folder / "metrics.jsonl", tmp_path / "broken")
        with pytest.raises(DataError, match="broken/config.toml"):
            open_run(tmp_path / "broken")
    with pytest.raises(DataError, match="--output"):
        write_page([folder], tmp_path)
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path)])
    assert ended.value.code == 2 and capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason="no Chromium is installed")
def test_a_browser_opens_it_without_errors(tmp_path: Path) -> None:
    write_page([write_run(tmp_path / "a"), write_run(tmp_path / "b")], tmp_path / "page.html")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", f"file://{tmp_path / 'page.html'}"]
    done = subprocess.run([str(BROWSER), *options], capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr and "Scores" in done.stdout
