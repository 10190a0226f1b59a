"""The folder of copies in memory: what is not Panax's own is neither followed nor removed."""

import os
import time

import pytest

from panax.checkpoint.memory_folder import OWNER_MARKER, STALE_SECONDS, MemoryFolder
from panax.core import CheckpointError
from panax.system.secure_dir import make_private_folder

RUN, OTHER, USED = "0" * 16, "1" * 16, "2" * 16


def aged(path):
    old = time.time() - 2 * STALE_SECONDS
    for each in (path, *path.rglob("*")):
        os.utime(each, (old, old), follow_symlinks=False)


def test_only_marked_folders_of_runs_that_ended_a_day_ago_are_removed(tmp_path):
    """`PANAX_MEMORY` may name a folder that has other things in it."""
    strangers = ["project/.git/HEAD", "thesis/chapter.tex", f"{OTHER}/mine.txt", "panax-copies-of-mine/x", ".bashrc"]
    for name in strangers:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")
    MemoryFolder(tmp_path, OTHER).close()
    used = MemoryFolder(tmp_path, USED)
    copies = used.path.parent
    (copies / OTHER / "step_00000001").mkdir()
    (copies / OTHER / "step_00000001" / "x.bin").write_bytes(b"old")
    (copies / ("3" * 16)).mkdir(mode=0o700)
    (copies / ("3" * 16) / "unmarked").write_text("mine")
    (copies / ("4" * 16)).symlink_to(tmp_path / "thesis")
    (copies / "5-not-a-run").mkdir(mode=0o700)
    (copies / "5-not-a-run" / OWNER_MARKER).write_text((copies / OTHER / OWNER_MARKER).read_text())
    aged(tmp_path)
    MemoryFolder(tmp_path, RUN).close()
    assert sorted(path.name for path in copies.iterdir()) == [RUN, USED, "3" * 16, "4" * 16, "5-not-a-run"]
    assert [(tmp_path / name).read_text() for name in strangers] == ["mine"] * len(strangers)
    used.close()
    aged(copies / USED)
    MemoryFolder(tmp_path, RUN).close()
    assert not (copies / USED).exists(), "no job uses it any more"


def test_a_link_or_anothers_folder_is_refused(tmp_path, monkeypatch):
    target = tmp_path / "target"
    target.mkdir()
    (target / "mine.txt").write_text("mine")
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(CheckpointError, match=r"is a link to .*PANAX_MEMORY"):
        MemoryFolder(tmp_path / "link", RUN)
    # A link planted where the copies of the user or of the run are to be.
    for planted in (f"panax-copies-{os.geteuid()}", f"panax-copies-{os.geteuid()}/{RUN}"):
        base = tmp_path / f"base{len(planted)}"
        (base / planted).parent.mkdir(parents=True, mode=0o700)
        (base / planted).symlink_to(target)
        with pytest.raises(CheckpointError, match="is a link to"):
            MemoryFolder(base, RUN)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(CheckpointError, match="others may write to"):
        MemoryFolder(tmp_path / "open", RUN)
    (tmp_path / "open").chmod(0o1777)  # as /dev/shm
    MemoryFolder(tmp_path / "open", RUN).close()
    before = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: before + 1)
    with pytest.raises(PermissionError, match=f"belongs to user {before}"):
        make_private_folder(target)
    assert (target / "mine.txt").read_text() == "mine"


def test_a_folder_that_was_swapped_is_left_alone(tmp_path):
    folder = MemoryFolder(tmp_path, RUN)
    target = tmp_path / "target"
    target.mkdir()
    (target / "mine.txt").write_text("mine")
    folder.path.rename(tmp_path / "away")
    folder.path.symlink_to(target)
    with pytest.raises(CheckpointError, match="nothing in it is removed"):
        folder.check()
    folder.remove()
    folder.close()
    assert (target / "mine.txt").read_text() == "mine"
