"""The tool that makes pictures: each picture of the pages has a source, and a failure writes nothing."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.pictures import __main__ as tool  # noqa: E402
from tools.pictures.commands import PictureError, run, screenshot  # noqa: E402


def test_every_picture_is_made_by_a_command():
    """Those of tutorials are outputs of their code."""
    made = {file for subject in tool.SUBJECTS.values() for file in subject.files}
    shown = {path.name for path in (ROOT / "docs/images").iterdir() if not path.name.startswith("tutorial-")}
    assert shown == made


def test_pictures_are_written_when_all_of_a_subject_are_there(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tool, "IMAGES", tmp_path)
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    folders = []

    def draw(folder: Path) -> dict[str, bytes]:
        folders.append(folder)
        assert list(folder.iterdir()) == []
        return {"a.svg": b"<svg/>"}

    def fail(folder: Path) -> dict[str, bytes]:
        raise PictureError("no browser is installed")

    monkeypatch.setattr(
        tool, "SUBJECTS", {"good": tool.Subject(draw, ("a.svg",)), "bad": tool.Subject(fail, ("b.svg",))}
    )
    assert tool.main(["good"]) == 0
    assert (tmp_path / "a.svg").read_bytes() == b"<svg/>"
    assert not folders[0].exists()
    assert tool.main([]) == 1
    assert not (tmp_path / "b.svg").exists()
    assert "bad: no browser is installed" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        tool.main(["goood"])
    assert "no picture is named goood; expected good, bad" in capsys.readouterr().err


def test_a_command_that_fails_shows_its_output():
    with pytest.raises(PictureError, match="exit code 3:\nthe reason"):
        run(["-c", "import sys; print('the reason'); sys.exit(3)"])


def test_a_machine_without_a_browser(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PictureError, match="no browser is installed; expected one of chromium"):
        screenshot(tmp_path / "page.html", tmp_path / "page.png", width=100, height=100)
