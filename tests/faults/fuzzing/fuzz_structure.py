"""Changes to the fields of binary formats: a number in a header becomes another one, and all around it stays well-formed.

Flipped bits rarely pass a format's own checks. These changes do: each file is taken apart by its format's rules, one or
two of its fields are changed, and the file is put together again, with sizes and checksums that fit.

Sources: Thrift's compact protocol and parquet.thrift; POSIX ustar and pax; NumPy's format 1.0; the layouts at the top of
`panax.data.formats.mds` and `panax.data.formats.riegeli_sizes`.
"""

import io
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fuzz_base import Change

NUMBERS = (0, 1, -1, 2, 7, 15, 127, 2**15, 2**16, 2**24, 2**31 - 1, -(2**31), 2**32, 2**40, 2**62, 2**63 - 1, -(2**63))


def another_number(value: int, rng: random.Random) -> int:
    """A number near another one, or an extreme one."""
    return rng.choice((value + 1, value - 1, -value, value * 2, value // 2, value * 1000, *NUMBERS))


# Thrift's compact protocol. A struct is a list of [number, kind, value]; a list is [kind, values].

_BYTE, _BINARY, _LIST, _SET, _STRUCT = 3, 8, 9, 10, 12


class Thrift:
    """Reads a struct from bytes."""

    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data, self.at = data, at

    def _next(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def _varint(self) -> int:
        value, shift = 0, 0
        while True:
            byte = self._next()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def _signed(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def struct(self) -> list[list[Any]]:
        fields, number = [], 0
        while head := self._next():
            number = number + (head >> 4) if head >> 4 else self._signed()
            fields.append([number, head & 15, self._value(head & 15)])
        return fields

    def _value(self, kind: int) -> Any:
        if kind in (1, 2):
            return kind == 1
        if kind == _BYTE:
            return self._next()
        if kind in (4, 5, 6):
            return self._signed()
        if kind == 7:
            self.at += 8
            return self.data[self.at - 8 : self.at]
        if kind == _BINARY:
            size = self._varint()
            self.at += size
            return self.data[self.at - size : self.at]
        if kind in (_LIST, _SET):
            head = self._next()
            count = self._varint() if head >> 4 == 15 else head >> 4
            inner = head & 15
            return [inner, [self._next() == 1 if inner in (1, 2) else self._value(inner) for _ in range(count)], None]
        assert kind == _STRUCT, kind
        return self.struct()


def varint(value: int) -> bytes:
    out, value = b"", value & (2**64 - 1)
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def _zigzag(value: int) -> bytes:
    return varint((value << 1) ^ (value >> 63))


def thrift_bytes(fields: list[list[Any]]) -> bytes:
    out, last = b"", 0
    for number, kind, value in fields:
        if kind in (1, 2):
            kind = 1 if value else 2
        step = number - last
        out += bytes([step << 4 | kind]) if 0 < step < 16 else bytes([kind]) + _zigzag(number)
        out += _value_bytes(kind, value)
        last = number
    return out + b"\0"


def _value_bytes(kind: int, value: Any) -> bytes:
    match kind:
        case 1 | 2:
            return b""
        case 3:
            return bytes([value & 255])
        case 4 | 5 | 6:
            return _zigzag(value)
        case 7:
            return value
        case 8:
            return varint(len(value)) + value
        case 9 | 10:
            inner, values, claims = value
            count = len(values) if claims is None else claims
            head = bytes([min(count, 15) << 4 | inner]) if 0 <= count < 15 else bytes([15 << 4 | inner]) + varint(count)
            return head + b"".join(
                (b"\x01" if one else b"\x02") if inner in (1, 2) else _value_bytes(inner, one) for one in values
            )
        case _:
            return thrift_bytes(value)


def _thrift_places(fields: list[list[Any]]) -> list[list[Any]]:
    """Every field of a struct and of its parts; lists as fields of their own."""
    nested, waiting = [], [fields]
    while waiting:
        for field in waiting.pop():
            nested.append(field)
            if field[1] == _STRUCT:
                waiting.append(field[2])
            elif field[1] in (_LIST, _SET):
                inner, values, _ = field[2]
                if inner == _STRUCT:
                    waiting.extend(values)
                else:
                    # Each value becomes a field that writes itself back when it is changed.
                    nested.extend(_Item(values, i, inner) for i in range(len(values)))
    return nested


class _Item(list):
    """A value of a list, as a field."""

    def __init__(self, values: list, index: int, kind: int) -> None:
        super().__init__([0, kind, values[index]])
        self.values, self.index = values, index

    def __setitem__(self, place, value) -> None:
        super().__setitem__(place, value)
        if place == 2:
            self.values[self.index] = value


def change_thrift(fields: list[list[Any]], rng: random.Random) -> None:
    """Change one or two fields of a struct."""
    for _ in range(rng.choice((1, 1, 2))):
        field = rng.choice(_thrift_places(fields))
        _, kind, value = field
        if not isinstance(field, _Item) and rng.random() < 0.05:
            field[0] = rng.choice((field[0] + 1, 1, 40, 2**15 - 1))
        elif kind in (1, 2):
            field[2] = not value
        elif kind in (_BYTE, 4, 5, 6):
            field[2] = another_number(value, rng)
        elif kind == 7:
            field[2] = struct.pack("<d", rng.choice((0.0, -1.0, 1e308, float("nan"))))
        elif kind == _BINARY:
            field[2] = rng.choice((b"", value[:-1], value + value, b"\xff\xfe", b"x" * 5000, value[::-1]))
        elif kind in (_LIST, _SET):
            values = value[1]
            how = rng.randrange(5)
            if how == 0:
                value[2] = max(0, another_number(len(values), rng))
            elif how == 1:
                del values[: rng.choice((1, len(values)))]
            elif how == 2 and values:
                values.extend([rng.choice(values)] * rng.choice((1, 3, 1000)))
            elif how == 3:
                values.reverse()
            else:
                value[0] = rng.choice((3, 6, 8, 9, 12))
                value[1] = []
                value[2] = rng.choice((0, len(values), 2**40))
        elif value:
            del value[rng.randrange(len(value))]


def change_parquet(folder: Path, rng: random.Random, inner: bool) -> None:
    """Change a footer's fields, or a page header's."""
    path = rng.choice(sorted(folder.glob("*.parquet")))
    data = path.read_bytes()
    size = int.from_bytes(data[-8:-4], "little")
    begin = len(data) - 8 - size
    footer = Thrift(data, begin).struct()
    body = data[:begin]
    if rng.random() < 0.5:
        change_thrift(footer, rng)
    else:
        # A page's header becomes longer or shorter: what is behind it moves, and the footer says so.
        metas = [next(value for number, _, value in column if number == 3) for column in _columns(footer)]
        places = sorted({field[2] for meta in metas for field in meta if field[0] in (9, 11) and field[2]})
        at = rng.choice(places)
        reader = Thrift(body, at)
        header = reader.struct()
        change_thrift(header, rng)
        changed = thrift_bytes(header)
        moved = len(changed) - (reader.at - at)
        body = body[:at] + changed + body[reader.at :]
        for meta in metas:
            first = min(field[2] for field in meta if field[0] in (9, 11) and field[2])
            length = next(field for field in meta if field[0] == 7)
            if first <= at < first + length[2]:
                length[2] += moved
            for field in meta:
                if field[0] in (9, 11) and field[2] > at:
                    field[2] += moved
    written = thrift_bytes(footer)
    path.write_bytes(body + written + len(written).to_bytes(4, "little") + b"PAR1")


def _columns(footer: list[list[Any]]) -> list[list[list[Any]]]:
    groups = next(value for number, _, value in footer if number == 4)[1]
    return [column for group in groups for column in next(value for number, _, value in group if number == 1)[1]]


# Shards


_TAR_FIELDS = {"name": (0, 100), "mode": (100, 8), "size": (124, 12), "time": (136, 12), "type": (156, 1),
               "link": (157, 100), "magic": (257, 8), "prefix": (345, 155)}  # fmt: skip


def change_tar(data: bytearray, rng: random.Random) -> None:
    """Change a field of one of a tar file's headers, and make the header's checksum again."""
    heads = [at for at in range(0, len(data), 512) if data[at + 257 : at + 262] == b"ustar"]
    at = rng.choice(heads)
    field = rng.choice(("size", "size", "type", *_TAR_FIELDS))
    begin, width = _TAR_FIELDS[field]
    if field == "type":
        value = rng.choice(b"01234567LKxgSVMDX\0").to_bytes(1, "little")
    elif field in ("size", "mode", "time"):
        number = rng.choice((0, 1, 511, 513, 2**20, 8**10, 8 ** (width - 1) - 1))
        value = rng.choice((
            b"%0*o\0" % (width - 1, min(number, 8 ** (width - 1) - 1)), b"-0000000001", b"9" * width, b" " * width,
            b"\x80" + number.to_bytes(width - 1, "big"), b"\xff" * width,
        ))  # fmt: skip
    else:
        value = rng.choice((b"", b"../../x.txt", b"/x.txt", b"\xff.txt", b"a" * width, b"s0.txt", b"s1.json", b".txt"))
    data[at + begin : at + begin + width] = value[:width].ljust(width, b"\0")
    total = sum(data[at : at + 148]) + 8 * 32 + sum(data[at + 156 : at + 512])
    data[at + 148 : at + 156] = b"%06o\0 " % total


def change_offsets(data: bytearray, rng: random.Random) -> None:
    """Change one of the numbers at an MDS shard's beginning, or of those before a sample's values."""
    count = int.from_bytes(data[:4], "little")
    offsets = [4 * i for i in range(min(count + 2, len(data) // 4))]
    samples = [int.from_bytes(data[at : at + 4], "little") for at in offsets[1:-1]]
    at = rng.choice((*offsets, *samples))
    value = int.from_bytes(data[at : at + 4], "little")
    data[at : at + 4] = (another_number(value, rng) % 2**32).to_bytes(4, "little")


def change_chunk(data: bytearray, rng: random.Random) -> None:
    """Change a field of a Riegeli chunk's header, or of a block's."""
    at, heads = 0, []
    while at + 40 <= len(data):
        heads.append(at)
        size = int.from_bytes(data[at + 8 : at + 16], "little")
        at += 40 + size
        if at % 2**16 < 24 or size > len(data):
            break
    place = rng.choice(heads)
    field = place + rng.choice((8, 24, 32))
    value = int.from_bytes(data[field : field + 8], "little")
    data[field : field + 8] = (another_number(value, rng) % 2**64).to_bytes(8, "little")


# NumPy


def change_array(member: bytes, rng: random.Random) -> bytes:
    """Change the header of an .npy file."""
    size = int.from_bytes(member[8:10], "little")
    descr, order, shape, version = "<f8", "False", "(50,)", b"\x01\x00"
    match rng.randrange(5):
        case 0:
            descr = rng.choice(("<f4", "|O", "<U9999999", "<c16", "|V8", "<M8[D]", "x", "<i99", "|S0", "<f8,<f8", ""))
        case 1:
            size_of = another_number(50, rng)
            shape = rng.choice(
                (f"({size_of},)", f"({size_of}, {size_of})", "()", "[50]", "(50.0,)", "(None,)", "5" * 5000)
            )
        case 2:
            order = rng.choice(("True", "None", "1", "[]"))
        case 3:
            version = bytes([rng.choice((0, 2, 3, 4, 255)), rng.choice((0, 1))])
        case _:
            return (
                member[:10]
                + rng.choice((b"(" * 5000, b"{" * 100, b"__import__('os')", b"1" * 9999))
                + member[10 + size :]
            )
    text = f"{{'descr': {descr!r}, 'fortran_order': {order}, 'shape': {shape}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    length = len(text).to_bytes(2 if version[0] < 2 else 4, "little")
    return member[:6] + version + length + text + member[10 + size :]


def change_archive(data: bytes, rng: random.Random) -> bytes:
    """Change a number in a zip archive's directory, or in its end."""
    changed = bytearray(data)
    end = data.rfind(b"PK\x05\x06")
    at = int.from_bytes(data[end + 16 : end + 20], "little")
    fields = [(end + 8, 2), (end + 10, 2), (end + 12, 4), (end + 16, 4)]
    while data[at : at + 4] == b"PK\x01\x02":
        fields += [(at + 8, 2), (at + 10, 2), (at + 20, 4), (at + 24, 4), (at + 28, 2), (at + 30, 2), (at + 42, 4)]
        at += 46 + sum(int.from_bytes(data[at + i : at + i + 2], "little") for i in (28, 30, 32))
    place, width = rng.choice(fields)
    value = int.from_bytes(data[place : place + width], "little")
    changed[place : place + width] = (another_number(value, rng) % 2 ** (8 * width)).to_bytes(width, "little")
    return bytes(changed)


def change_npz_fields(folder: Path, rng: random.Random, inner: bool) -> None:
    """Change the header of an array, alone or in an archive, or an archive's directory."""
    path = rng.choice(sorted(folder.glob("*.np[yz]")))
    data = path.read_bytes()
    if path.suffix == ".npy":
        path.write_bytes(change_array(data, rng))
        return
    if rng.random() < 0.4:
        path.write_bytes(change_archive(data, rng))
        return
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
        kind = archive.infolist()[0].compress_type
    name = rng.choice(sorted(members))
    members[name] = change_array(members[name], rng)
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, member in members.items():
            archive.writestr(name, member)


def in_file(name: str, how: Callable[[bytearray, random.Random], None]) -> Change:
    """The change of a whole folder that changes one file's bytes in place."""

    def change(folder: Path, rng: random.Random, inner: bool) -> None:
        path = rng.choice(sorted(folder.glob(name)))
        data = bytearray(path.read_bytes())
        for _ in range(rng.choice((1, 1, 2))):
            how(data, rng)
        path.write_bytes(data)

    return change
