"""Numbers in binary headers: what reaches beyond the bytes that are there, or has no end, is an error of the reader's own."""

import mmap
import struct

import pytest

from panax.system.binary_reader import BinaryError, BinaryReader, TruncatedError, check_count, read_bytes, read_number

DATA = bytes(range(16))


@pytest.mark.parametrize("kind", ["<B", "<b", "<H", ">H", "<i", "<I", "<q", "<Q", ">Q"])
def test_numbers_are_those_of_struct(kind):
    assert read_number(DATA, 3, kind) == struct.unpack_from(kind, DATA, 3)[0]
    assert BinaryReader(DATA, 3).number(kind) == read_number(memoryview(DATA), 3, kind)


@pytest.mark.parametrize(
    ("at", "kind", "error"), [(-1, "<B", BinaryError), (13, "<I", TruncatedError), (2**70, "<Q", TruncatedError)]
)
def test_a_number_outside_of_the_bytes_is_refused(at, kind, error):
    with pytest.raises(error):
        read_number(DATA, at, kind)


def test_mapped_files_are_read_in_the_same_way(tmp_path):
    (tmp_path / "a").write_bytes(DATA)
    with (tmp_path / "a").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert read_number(mapped, 8, "<Q") == struct.unpack_from("<Q", DATA, 8)[0]
        assert BinaryReader(mapped, 1).byte() == 1
        with pytest.raises(TruncatedError):
            read_number(mapped, 9, "<Q")


def test_what_is_taken_is_there():
    reader = BinaryReader(DATA)
    assert reader.take(4) == DATA[:4] and reader.at == 4
    for count, error in ((13, TruncatedError), (2**62, TruncatedError), (-1, BinaryError)):
        with pytest.raises(error):
            reader.take(count)
        assert reader.at == 4
    with pytest.raises(TruncatedError):
        read_bytes(DATA, 17, 0)


def test_counts_are_compared_with_what_is_left():
    check_count(DATA, 8, 2, 4)
    for count in (3, 2**62):
        with pytest.raises(TruncatedError):
            check_count(DATA, 8, count, 4)
    with pytest.raises(BinaryError, match="-1 items"):
        check_count(DATA, 8, -1)


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, 2**31, 2**63, 2**64 - 1])
def test_varints_return_what_was_written(value):
    out, rest = b"", value
    while rest > 127:
        out, rest = out + bytes([rest & 127 | 128]), rest >> 7
    out += bytes([rest])
    assert BinaryReader(out).varint() == value
    assert BinaryReader(out).zigzag() == (value >> 1 if value % 2 == 0 else -(value + 1 >> 1))


def test_a_varint_without_end_is_damage_and_one_cut_short_is_reported_to_be():
    with pytest.raises(BinaryError, match="more than 64 bits"):
        BinaryReader(b"\xff" * 300).varint()
    with pytest.raises(TruncatedError):
        BinaryReader(b"\xff\xff").varint()
