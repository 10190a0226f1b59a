"""The checks that need no type checker: the layers, the linter, the formatter, and the tree as the page shows it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT, table_rows

SCRIPTS = Path(sys.executable).parent


@pytest.mark.parametrize(
    "command",
    [("lint-imports",), ("ruff", "check"), ("ruff", "format", "--check")],
    ids=lambda command: "-".join(command),
)
def test_passes(command):
    name, *arguments = command
    run = subprocess.run([SCRIPTS / name, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_room_is_on_the_page():
    rooms = {path.parent.name for path in (ROOT / "src/panax").glob("*/__init__.py")}
    listed = [cells[0].strip("`") for cells in table_rows(ROOT / "docs/extending/architecture.md", "room")]
    assert sorted(listed) == sorted(rooms)


def test_every_room_is_in_the_layers():
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    layers = settings[settings.index("layers = [") : settings.index("containers")]
    listed = re.findall(r"\w+", " ".join(re.findall(r'"(.+?)"', layers)))
    rooms = {path.parent.name for path in (ROOT / "src/panax").glob("*/__init__.py")}
    assert sorted(listed) == sorted(rooms)
