"""The files of an incomplete save are never selected; what was committed and then lost a file is never loaded."""

import dataclasses
import re
import shutil
from pathlib import Path

import late_worker
import numpy as np
import pytest
from launching import run_job
from store_faults import CONFIG, go_on, same, save, state

from panax.checkpoint import CheckpointConfig, Checkpointer, Manifest
from panax.checkpoint.commit import SaveAttempt, commit, publish_part, write_part
from panax.checkpoint.snapshot import Snapshot, plan_save
from panax.core import CheckpointError, DamagedError, StoreError
from panax.stores import LocalStore

FILES = 5


@pytest.fixture
def many_files(monkeypatch):
    monkeypatch.setattr("panax.checkpoint.snapshot.CHUNK_BYTES", 1000)
    monkeypatch.setattr("panax.checkpoint.snapshot.FILE_BYTES", 3000)


@pytest.fixture
def saved(tmp_path, many_files) -> Checkpointer:
    """Checkpoints of steps 1 and 2, of several files and an attachment each."""
    checkpointer = Checkpointer(tmp_path / "run", CONFIG, {"experiment.json": '{"a": 1}'})
    for step in (1, 2):
        assert save(checkpointer, step) is None
    assert len(checkpointer.open(2).manifest.files) >= FILES
    return checkpointer


@pytest.mark.parametrize("whole", range(FILES + 1))
def test_files_without_a_manifest_are_no_checkpoint(saved, whole):
    """So many whole files, and half of the next: whatever a kill has left."""
    folder = Path(saved.url(2))
    (folder / "manifest.json").unlink()
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for number, path in enumerate(files):
        if number == whole:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        elif number > whole:
            path.unlink()
    said: list[str] = []
    again = Checkpointer(saved.store, CONFIG, say=said.append)
    step, restored = go_on(again)
    assert step == 1 and same(restored, 1) and again.steps() == [1] and not said
    again.sweep()
    assert not folder.exists()
    assert save(again, 2) is None and go_on(Checkpointer(saved.store))[0] == 2


@pytest.mark.parametrize("how", ["missing", "empty", "cut", "longer"])
@pytest.mark.parametrize("kind", ["0000.bin", "0001.bin"])
def test_a_checkpoint_that_lost_a_file_is_passed_over_naming_it(saved, how, kind):
    [path] = Path(saved.url(2)).rglob(f"*-{kind}")
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "cut": data[:-1], "longer": data + b"x"}[how])
    said: list[str] = []
    step, restored = go_on(Checkpointer(saved.store, CONFIG, say=said.append))
    assert step == 1 and same(restored, 1)
    assert re.search(rf"step 2 is not used: {path} (is missing|has \d+ bytes); expected", said[0]), said
    assert any(path.name in line for line in saved.open(2).verify())


@pytest.mark.parametrize("how", ["missing", "empty", "cut", "flipped"])
def test_a_damaged_attachment_is_damage(saved, how):
    """Of which a run goes back to the checkpoint before; not a store that can't be reached, which ends it."""
    [path] = Path(saved.url(2)).rglob("experiment.json")
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "cut": data[:-1], "flipped": b"[" + data[1:]}[how])
    with pytest.raises(DamagedError, match=r"experiment.json (is missing|has \d bytes|is damaged: bytes 0 to 8)"):
        Checkpointer(saved.store).open(2).attachment("experiment.json")


def test_a_manifest_of_another_step_is_not_taken_for_this_one(saved):
    """A folder that was copied by hand over another."""
    shutil.copy(Path(saved.url(1), "manifest.json"), Path(saved.url(2), "manifest.json"))
    said: list[str] = []
    step, found = go_on(Checkpointer(saved.store, CONFIG, say=said.append))
    assert (
        step == 1
        and same(found, 1)
        and f"step 2 is not used: {saved.url(2)}/manifest.json is that of step 1" in said[0]
    )


@pytest.mark.parametrize("later", [False, True], ids=["same run", "later run"])
def test_another_attempt_at_a_step_touches_nothing_of_the_first(saved, later, monkeypatch):
    """All its files are written, and no manifest: those of the checkpoint that is there have other names."""

    def refused(*_: object) -> None:
        raise StoreError("refused")

    checkpointer = Checkpointer(saved.store, CONFIG, say=lambda line: None) if later else saved
    monkeypatch.setattr("panax.checkpoint.checkpointer.commit", refused)
    monkeypatch.setattr("panax.checkpoint.checkpointer.discard", lambda *_: True)  # It was killed.
    checkpointer.save(state(9), 2, {})
    with pytest.raises(CheckpointError, match="refused"):
        checkpointer.finish()
    assert len(list(Path(saved.url(2)).iterdir())) == 3, "two attempts and a manifest"
    step, restored = go_on(Checkpointer(saved.store))
    assert step == 2 and same(restored, 2)


def test_a_damaged_checkpoint_takes_no_place_among_those_that_are_kept(tmp_path):
    for step in (10, 20, 30):
        assert save(Checkpointer(tmp_path, CheckpointConfig(keep_last=3)), step) is None
    said: list[str] = []
    checkpointer = Checkpointer(tmp_path, CONFIG, say=said.append)
    [path] = Path(checkpointer.url(30)).rglob("*.bin")
    path.write_bytes(b"")
    assert go_on(checkpointer)[0] == 20 and "step 30 is not used" in said[0]
    assert save(checkpointer, 21) is None
    assert checkpointer.steps() == [20, 21, 30], "the last two that are whole"
    assert save(checkpointer, 31) is None
    assert checkpointer.steps() == [21, 31] == Checkpointer(tmp_path).steps()


def test_a_removal_that_stops_half_way_leaves_no_manifest(saved, monkeypatch):
    """The manifest goes first: what is left without its files must not look like a checkpoint."""
    real, deleted = LocalStore.delete, []

    def once(self, paths) -> None:
        paths = list(paths)
        if paths and deleted:
            raise StoreError("killed here")
        deleted.extend(paths)
        real(self, paths)

    said: list[str] = []
    saved._say = said.append
    monkeypatch.setattr(LocalStore, "delete", once)
    assert save(saved, 3) is None and deleted
    assert "could not be removed; this is retried after each save: killed here" in said[0]
    monkeypatch.undo()
    again = Checkpointer(saved.store, CONFIG, say=said.append)
    assert again.steps() == [2, 3] and all(again.open(step).verify() == [] for step in (2, 3))
    again.sweep()
    assert sorted(path.name for path in Path(saved.store.url).iterdir()) == ["step_00000002", "step_00000003"]


@pytest.fixture
def parts(tmp_path):
    """A store, and what two processes would write of one state: the first all but one chunk, the second that."""
    store = LocalStore(tmp_path / "parts")
    snapshot = Snapshot(plan_save(state(0)))
    snapshot.take(state(0))

    def part(attempt: SaveAttempt) -> tuple[Manifest, Manifest]:
        every = write_part(store, attempt, snapshot, step=7, attachments={}, host={}, metric=None)
        first, *rest = every.arrays["w"].chunks

        def of(w, others):
            arrays = {
                n: dataclasses.replace(e, chunks=w if n == "w" else e.chunks if others else ())
                for n, e in every.arrays.items()
            }
            return dataclasses.replace(every, arrays=arrays)

        return of(tuple(rest), True), of((first,), False)

    return store, part


def test_a_part_of_another_attempt_is_not_taken(parts):
    store, part = parts
    old, new = (SaveAttempt("step_00000007", name, 0, 2) for name in ("old", "new"))
    _, theirs = part(old)
    publish_part(store, dataclasses.replace(old, process=1), theirs)
    mine, theirs = part(new)
    with pytest.raises(CheckpointError, match=r"1 of 2 processes \(1\) wrote no part within 0 s; not committed"):
        commit(store, new, mine, 0.2)
    assert Checkpointer(store).steps() == []
    publish_part(store, dataclasses.replace(new, process=1), theirs)
    commit(store, new, mine, 0.2)
    assert all(file.startswith("new/") for file in Checkpointer(store).open(7).manifest.files)
    assert same(go_on(Checkpointer(store))[1], 0)


def test_a_part_that_a_late_list_lacks_is_asked_for_by_name(parts, monkeypatch):
    store, part = parts
    attempt = SaveAttempt("step_00000007", "new", 0, 2)
    mine, theirs = part(attempt)
    publish_part(store, dataclasses.replace(attempt, process=1), theirs)
    with monkeypatch.context() as late:
        late.setattr(type(store), "list", lambda self, prefix="": [])
        commit(store, attempt, mine, 4.0)
    assert same(go_on(Checkpointer(store))[1], 0)


def test_a_failure_that_a_late_list_lacks_is_reported(parts, monkeypatch):
    store, part = parts
    attempt = SaveAttempt("step_00000007", "new", 0, 2)
    mine, _ = part(attempt)
    store.write(attempt.failure(1), [b"its disk is full"])
    monkeypatch.setattr(type(store), "list", lambda self, prefix="": [])
    with pytest.raises(CheckpointError, match="process 1 could not write its part: its disk is full"):
        commit(store, attempt, mine, 4.0)


def test_parts_that_do_not_fit_are_not_committed(parts):
    store, part = parts
    attempt = SaveAttempt("step_00000007", "new", 0, 2)
    second = dataclasses.replace(attempt, process=1)
    mine, theirs = part(attempt)
    publish_part(store, second, mine)
    with pytest.raises(CheckpointError, match="its chunks hold"):
        commit(store, attempt, mine, 0.2)
    publish_part(store, second, dataclasses.replace(theirs, files=theirs.files | {"new/00001-0000.bin": 5}))
    with pytest.raises(CheckpointError, match=r"new/00001-0000.bin has None bytes; 5 were written: not committed"):
        commit(store, attempt, mine, 0.2)
    store.write(attempt.part(1), [theirs.to_json().encode()[:-5]])
    with pytest.raises(DamagedError, match=r"part-00001-of-00002.json is damaged"):
        commit(store, attempt, mine, 0.2)
    assert Checkpointer(store).steps() == []


def test_a_failure_of_the_program_itself_is_no_success(tmp_path, monkeypatch):
    """The thread that writes must not die without a word."""

    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("panax.checkpoint.checkpointer.commit", broken)
    monkeypatch.setattr("threading.excepthook", lambda _: None)
    assert "RuntimeError('a bug')" in str(save(Checkpointer(tmp_path, CONFIG), 1))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two processes, of which the second one writes no part of step 2, and can't write that of step 4 once."""
    folder = tmp_path_factory.mktemp("two")
    found = run_job(folder / "job", late_worker.__file__, [str(folder / "run")], processes=2, devices=1)
    return folder / "run", found


def test_a_process_without_a_part_holds_up_one_checkpoint_alone(two):
    """The run continues, the next ones are whole."""
    folder, (first, _) = two
    without, failed, *more = first["said"]
    assert re.search(
        r"saving step 2 .* failed: 1 of 2 processes \(1\) wrote no part within 2 s.*step 1 is undamaged", without
    )
    assert re.search(r"saving step 4 .* process 1 could not write its part: the disk of process 1 is full", failed)
    assert all("is not used" in line for line in more), more
    checkpointer = Checkpointer(folder)
    assert checkpointer.steps() == [1, 3, 4, 5]
    for step in checkpointer.steps():
        checkpoint = checkpointer.open(step)
        assert checkpoint.verify() == []
        np.testing.assert_array_equal(checkpoint.read("w"), np.arange(64, dtype=np.float32) + np.float32(step))
    assert not list(folder.rglob("failed-*")), "a mark that another attempt at the step has failed"
    checkpointer.sweep()
    assert sorted(path.name for path in folder.iterdir()) == [f"step_0000000{n}" for n in (1, 3, 4, 5)]


def test_what_one_process_meets_alone_is_met_by_all(two):
    """Otherwise one would continue from another step than the others."""
    _, found = two
    for each in found:
        passed_over, behind, unread, other, remembered = each["alone"]
        assert remembered == 10, "the copies before are kept until all processes have the new one"
        assert passed_over == 4 and behind == 5
        assert "process 1" in unread and "disk of process 1 is full" in unread
        assert "the processes would restore different checkpoints: step 5 of files" in other
