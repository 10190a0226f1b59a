"""A file is replaced whole or not at all, and nothing is left beside it."""

import os
import stat

import pytest

from panax.system.replacement import replace_file, replace_json, replacement


def test_the_new_content_is_there_and_nothing_else(tmp_path):
    target = tmp_path / "a.json"
    replace_json(target, {"a": 1})
    replace_file(target, "an é\n")
    assert target.read_bytes() == "an é\n".encode() and os.listdir(tmp_path) == ["a.json"]


def test_an_error_leaves_the_old_content(tmp_path):
    target = tmp_path / "a"
    target.write_text("old")
    with pytest.raises(RuntimeError), replacement(target) as partial:
        partial.write_text("new")
        raise RuntimeError
    assert target.read_text() == "old" and os.listdir(tmp_path) == ["a"]


def test_what_could_not_be_flushed_replaces_nothing(tmp_path, monkeypatch):
    target, flushed = tmp_path / "a", os.fsync
    target.write_text("old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_file(target, "new")
    monkeypatch.setattr(os, "fsync", flushed)
    assert target.read_text() == "old" and os.listdir(tmp_path) == ["a"]


def test_content_and_name_are_both_flushed_in_this_order(tmp_path, monkeypatch):
    done, flushed, renamed = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda number: (done.append(_kind(number)), flushed(number)))
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("rename"), renamed(a, b)))
    replace_file(tmp_path / "a", b"x")
    assert done == ["file", "rename", "folder"]


def _kind(descriptor):
    return "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"


def test_a_link_is_replaced_and_its_target_stays(tmp_path):
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    replace_file(tmp_path / "link", "new")
    assert (tmp_path / "target").read_text() == "old" and (tmp_path / "link").read_text() == "new"
    assert not (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("private, mode", [(False, 0o664), (True, 0o600)])
def test_the_mode_is_the_umask_or_private(tmp_path, private, mode):
    before = os.umask(0o002)
    try:
        replace_file(tmp_path / "a", "x", private=private)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == mode
