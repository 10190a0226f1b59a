"""The PyTorch script before and after: the lines that differ are those that the page shows, and both learn the same."""

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPTS = ROOT / "examples" / "pytorch_script"


def test_the_page_shows_the_difference():
    before, after = ((SCRIPTS / name).read_text().splitlines() for name in ("original.py", "with_panax.py"))
    found = [line for line in difflib.unified_diff(before, after, n=0, lineterm="") if re.match(r"[+-](?![+-])", line)]
    changed = [line for line in found if '"""' not in line and len(line) > 1]
    shown = re.search(r"```diff\n(.*?)```", (ROOT / "docs/models/adapters.md").read_text(), re.DOTALL)
    assert shown is not None and shown.group(1).splitlines() == changed


@pytest.mark.slow
@pytest.mark.parametrize("script", ["original.py", "with_panax.py"])
def test_both_reach_the_accuracy(script, tmp_path):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    accuracy = re.search(r"accuracy ([\d.]+)", done.stdout)
    assert accuracy is not None and float(accuracy.group(1)) >= 0.97
    assert (tmp_path / "digits.pt").exists()
