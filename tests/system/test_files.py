"""A link is removed as a link, passed over by walks, and never written through."""

import os

import pytest

from panax.checkpoint.commit import remove, sweep
from panax.core.errors import StoreError
from panax.stores import LocalStore
from panax.system import files

PARTIAL = "." + "a" * 32 + ".tmp"


@pytest.fixture
def linked(tmp_path):
    """A store with a link to a folder of somebody else's, in which everything is named like Panax's own."""
    other, own = tmp_path / "other", tmp_path / "own"
    (other / "aaaaaaaa" / "empty").mkdir(parents=True)
    for name in ("manifest.json", "aaaaaaaa/00000-0000.bin", PARTIAL):
        (other / name).write_text("theirs")
    own.mkdir()
    (own / "step_00000005").symlink_to(other)
    return LocalStore(own), own, other


def all_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize(
    "act",
    [
        lambda store: remove(store, "step_00000005"),
        lambda store: sweep(store, ["step_00000005"]),
        lambda store: store.sweep(["step_00000005", ""]),
        lambda store: store.delete(["step_00000005/manifest.json", "step_00000005/aaaaaaaa/00000-0000.bin"]),
        lambda store: store.delete(["step_00000005"]),
    ],
)
def test_what_lies_behind_a_link_stays(act, linked):
    store, _, other = linked
    before = all_in(other)
    act(store)
    assert all_in(other) == before and len(before) == 5


def test_a_checkpoint_that_is_a_link_is_removed_as_one_and_sweeps_leave_it(linked):
    store, own, _ = linked
    store.sweep(["step_00000005"])
    sweep(store, ["step_00000005"])
    assert (own / "step_00000005").is_symlink()
    assert store.read("step_00000005/manifest.json") == b"theirs" and store.folders() == ["step_00000005"]
    remove(store, "step_00000005")
    assert not os.path.lexists(own / "step_00000005")


def test_nothing_is_written_through_a_link(linked):
    store, store_folder, _ = linked
    for write in (lambda: store.write("step_00000005/new", [b"x"]), lambda: store.create("step_00000005/new", b"x")):
        with pytest.raises(StoreError, match="is a link to"):
            write()
    victim = store_folder.parent / "victim"
    victim.write_text("theirs")
    (store_folder / "file").symlink_to(victim)
    store.write("file", [b"ours"])  # the link is replaced
    assert victim.read_text() == "theirs" and store.read("file") == b"ours" and not (store_folder / "file").is_symlink()


def test_the_stores_own_folder_may_be_a_link_and_stays_where_it_is(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    monkeypatch.chdir(tmp_path)
    store = LocalStore("link")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    store.write("a/b", [b"x"])
    assert (tmp_path / "disk" / "a" / "b").read_text() == "x"
    store.delete(["a/b"])
    assert all_in(tmp_path / "disk") == [] and (tmp_path / "link").is_symlink()


def test_a_folder_is_removed_without_what_its_links_lead_to(tmp_path):
    store_path, gone = tmp_path / "kept", tmp_path / "gone"
    (gone / "in" / "side").mkdir(parents=True)
    store_path.mkdir()
    (store_path / "file").write_text("x")
    (gone / "in" / "link").symlink_to(store_path)
    (gone / "dangling").symlink_to(tmp_path / "nothing")
    files.remove_folder(gone)
    assert not gone.exists() and all_in(store_path) == ["file"]
    gone.symlink_to(store_path)
    files.remove_folder(gone)
    assert not os.path.lexists(gone) and all_in(store_path) == ["file"]
    files.remove_folder(gone)


def test_what_can_not_be_removed_is_reported(tmp_path, monkeypatch):
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    usual = os.rmdir

    def refusing(path, **kwargs):
        if str(path).endswith("inner"):
            raise PermissionError(13, "not permitted", str(path))
        usual(path, **kwargs)

    monkeypatch.setattr(os, "rmdir", refusing)
    with pytest.raises(PermissionError):
        files.remove_folder(tmp_path / "folder")
