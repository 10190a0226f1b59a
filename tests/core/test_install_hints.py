"""Hints on how to install more are those of this very copy, and name extras that there are."""

import importlib.metadata
import re
import shlex
import sys
import tomllib
from pathlib import Path

from panax.core import install_hints

ROOT = Path(__file__).parents[2]
SOURCES = [*(ROOT / "src" / "panax").rglob("*.py")]


class Distribution:
    def __init__(self, text):
        self._text = text

    def read_text(self, name):
        assert name == "direct_url.json"
        return self._text


def command(monkeypatch, text, extra="torch"):
    install_hints._origin.cache_clear()
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Distribution(text))
    try:
        return install_hints.install_command(extra)
    finally:
        install_hints._origin.cache_clear()


def test_a_copy_from_an_index_a_clone_a_wheel_and_a_repository(monkeypatch, tmp_path):
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    assert command(monkeypatch, None) == "python -m pip install 'panax-jax[torch]'"
    assert "--extra torch" in command(monkeypatch, "not JSON")  # run from this clone, for all that is known
    assert (
        command(monkeypatch, '{"url": "git+ssh://host/panax"}')
        == "python -m pip install 'panax-jax[torch] @ git+ssh://host/panax'"
    )
    clone = tmp_path / "a clone"
    clone.mkdir()
    text = f'{{"url": "{clone.as_uri()}", "dir_info": {{"editable": true}}}}'
    assert shlex.split(command(monkeypatch, text))[-2:] == ["-e", f"{clone}[torch]"]
    (clone / "install.py").write_text("")
    words = ["python3", str(clone / "install.py"), "--extra", "torch", "--venv", sys.prefix]
    assert shlex.split(command(monkeypatch, text)) == words
    monkeypatch.setattr(sys, "prefix", str(clone / ".venv"))
    assert shlex.split(command(monkeypatch, text)) == words[:4]
    monkeypatch.delenv("VIRTUAL_ENV")
    monkeypatch.setattr(sys, "executable", "/an interpreter/python")
    assert install_hints.package_install_command("a", "b[c]") == "'/an interpreter/python' -m pip install a 'b[c]'"


def test_hints_name_extras_that_there_are_and_come_from_one_function():
    extras = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    )
    named, by_hand = set(), []
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        named |= set(re.findall(r"(?<!package_)install_command\(['\"]([\w-]+)['\"]\)", text))
        named |= set(re.findall(r"missing_library_error\([^()]*,\s*\"([\w-]+)\"\)", text))
        named |= set(re.findall(r"pip install 'panax-jax\[([\w-]+)\]", text))
        by_hand += [
            f"{path.name}: {line}" for line in text.splitlines() if re.search(r"pip install 'panax-jax\[\{", line)
        ]
    assert len(named) >= 5 and named <= extras, named - extras
    assert not by_hand


def test_no_message_installs_panax_by_hand():
    """In a message; a docstring may say how a published Panax is installed."""
    for path in SOURCES:
        code = re.sub(r'"""[\s\S]*?"""', "", path.read_text(encoding="utf-8"))
        assert "pip install 'panax" not in code and "pip install panax" not in code, path
