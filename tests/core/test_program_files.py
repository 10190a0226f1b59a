"""The folder of compiled programs: whole or missing, bounded, and this user's alone."""

import os

import pytest

from panax.compiling.program_files import ProgramFiles

LARGE = 1 << 30


@pytest.fixture
def files(tmp_path):
    return ProgramFiles(tmp_path / "programs", "kind", LARGE)


def only(files):
    [path] = files.folder.glob("*.program")
    return path


def test_what_is_kept_is_read_by_others_of_the_kind_alone(files, tmp_path):
    files.put("jit_step-1", b"program")
    assert files.get("jit_step-1") == b"program"
    assert files.get("jit_step-2") is None
    assert ProgramFiles(tmp_path / "programs", "kind", LARGE).get("jit_step-1") == b"program"
    assert ProgramFiles(tmp_path / "programs", "another processor", LARGE).get("jit_step-1") is None
    assert files.damaged == 0 and not list(files.folder.glob("*.part"))


@pytest.mark.parametrize("place", [0, 20, 60, -1])
def test_a_flipped_bit_is_a_program_that_is_missing(files, place):
    files.put("a", b"program" * 100)
    data = bytearray(only(files).read_bytes())
    data[place] ^= 1
    only(files).write_bytes(data)
    assert files.get("a") is None and files.damaged == 1
    assert not list(files.folder.glob("*.program"))
    files.put("a", b"again")
    assert files.get("a") == b"again"


@pytest.mark.parametrize("length", [0, 10, 48, 100])
def test_a_file_that_is_cut_short_is_missing(files, length):
    files.put("a", b"program" * 100)
    os.truncate(only(files), length)
    assert files.get("a") is None


def test_a_file_in_the_place_of_another_is_missing(files):
    files.put("a", b"program")
    first = only(files)
    files.put("b", b"another")
    os.replace(first, files._path("b"))
    assert files.get("b") is None


def test_the_bound_holds_for_all_kinds_and_the_oldest_go_first(tmp_path):
    old = ProgramFiles(tmp_path / "programs", "of an older version", 10_000)
    new = ProgramFiles(tmp_path / "programs", "kind", 10_000)
    old.put("0", bytes(4000))
    os.utime(only(old), (1, 1))
    new.put("1", bytes(4000))
    new.put("2", bytes(4000))
    assert old.get("0") is None and new.get("1") is not None and new.get("2") is not None
    os.utime(new._path("2"), (1, 1))
    new.put("3", bytes(4000))
    assert new.get("1") is not None and new.get("2") is None
    new.put("4", bytes(10_000))
    assert new.get("4") is None
    size = sum(path.stat().st_size for path in (tmp_path / "programs").rglob("*.program"))
    assert 0 < size <= 10_000


def test_a_folder_that_others_write_to_is_refused(tmp_path):
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs").chmod(0o777)
    with pytest.raises(PermissionError, match="others may write to"):
        ProgramFiles(tmp_path / "programs", "kind", LARGE)
