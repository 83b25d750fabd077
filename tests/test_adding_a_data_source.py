"""docs/data.md: its file is made and described as it says."""

import re
import subprocess
import sys
from pathlib import Path

from tests.started_jobs import ROOT


def test_the_file_of_the_page_is_described_as_it_shows(tmp_path: Path) -> None:
    text = (ROOT / "docs/data.md").read_text().partition("## A source of your own")[2]
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    shown = re.search(r"datasets\.describe winds\.nc.*?\n(.*?)```", text, re.DOTALL)
    assert shown
    command = [sys.executable, "-m", "datasets.describe", str(tmp_path / "winds.nc")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    missing = [line for line in shown[1].splitlines() if line not in done.stdout.splitlines()]
    assert not missing, done.stdout
