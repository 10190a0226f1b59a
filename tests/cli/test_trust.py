"""Commands with unforeseen input: brackets in a path, a recipe named like a module, any exception."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from panax.cli import main as command
from panax.cli.main import main
from panax.cli.recipes import find_recipe
from panax.core import RecipeError
from panax.metrics.console import plain_console

RECIPE = """
import json
from panax import Experiment
from panax.models import DecoderConfig, DecoderTask

def mine() -> Experiment:
    assert json.dumps({}) == "{}" and json.__file__ != __file__
    return Experiment(task=DecoderTask(model=DecoderConfig()))
"""


def test_a_recipe_file_named_like_a_module_replaces_none(tmp_path):
    before = sys.modules["json"]
    (tmp_path / "json.py").write_text(RECIPE)
    (tmp_path / "colorsys.py").write_text("raise RuntimeError('taken for the standard library')")
    try:
        assert find_recipe(str(tmp_path / "json.py"))().name == "decodertask"
        assert sys.modules["json"] is before
        sys.modules.pop("colorsys", None)
        import colorsys

        assert "rgb_to_hsv" in vars(colorsys)
    finally:
        sys.path.remove(str(tmp_path))


def test_text_of_a_user_is_not_markup(capsys):
    console = plain_console()
    for text in ("runs/[/x]/[bold]a", "[red]", ":smile: [link=file:///etc]x[/link]"):
        console.print(text)
        assert capsys.readouterr().out == text + "\n"


def test_a_path_with_brackets_can_be_listed(tmp_path, capsys):
    folder = tmp_path / "runs [/x]"
    folder.mkdir(parents=True)
    assert main(["checkpoint", "ls", str(folder)]) == 4
    assert f"{folder} holds no checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error, code, said",
    [
        (RuntimeError("it broke\nsecond line"), 1, "RuntimeError: it broke. It comes from "),
        (
            OSError(28, "No space left on device", "/tmp/x"),
            1,
            "No space left on device: '/tmp/x'; check that the path exists",
        ),
        (KeyError("x"), 1, "KeyError: 'x'. It comes from "),
        (RecursionError(), 1, "RecursionError. It comes from "),
        (MemoryError(), 1, "out of memory; use more --step.micro-batches"),
        (RuntimeError("RESOURCE_EXHAUSTED: 9 GiB"), 1, "out of device memory: RESOURCE_EXHAUSTED: 9 GiB"),
        (RecipeError("peak=-1; expected more"), 2, "peak=-1; expected more"),
    ],
)
def test_any_exception_is_one_message_and_a_code(monkeypatch, capsys, error, code, said):
    def failing(arguments):
        raise error

    monkeypatch.setattr(command, "_command", lambda name: failing)
    assert main(["recipes"]) == code
    out = capsys.readouterr().err
    assert out.startswith(f"panax: error: {said}") and "Traceback" not in out and len(out.splitlines()) == 1
    assert main(["recipes", "--traceback"]) == code
    out = capsys.readouterr().err
    assert "Traceback (most recent call last)" in out and f"panax: error: {said}" in out


def test_a_reader_that_has_gone_is_no_error(tmp_path):
    program = [sys.executable, "-m", "panax.cli.main", "train", "quickstart", "--help"]
    reader = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path)
    assert reader.stdout is not None and reader.stderr is not None
    reader.stdout.close()
    said = reader.stderr.read().decode()
    reader.stderr.close()
    reader.wait(60)
    assert "Traceback" not in said and reader.returncode != -signal.SIGPIPE


def test_no_hint_names_another_projects_package():
    """The name `panax` on the public index is somebody else's."""
    root = Path(__file__).parents[2]
    pages = (*root.glob("docs/**/*.md"), root / "README.md")
    for file in (*root.glob("src/**/*.py"), *root.glob("examples/*.py"), *pages):
        text = file.read_text()
        for hint in (
            "install panax ",
            "install panax\n",
            "install panax`",
            "'panax[",
            '"panax[',
            "`panax[",
            'install panax"',
        ):
            assert hint not in text, f"{file}: {hint!r}; the distribution is panax-jax"
    assert 'name = "panax-jax"' in (root / "pyproject.toml").read_text()
