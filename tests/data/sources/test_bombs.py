"""Files that announce more than they hold are refused at once: nothing is taken for granted that a header says."""

import json
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from panax.core.errors import DataError
from panax.data import Parquet
from panax.data.formats.mds import Mds
from panax.data.formats.webdataset import read_samples


def varint(number):
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


HEADERS = {
    "2**62 doubles": b"\x19\xf7" + varint(2**62),
    "2**40 numbers": b"\x19\xf5" + varint(2**40),
    "2**62 truths": b"\x19\xf1" + varint(2**62),
    "2**62 structs": b"\x19\xfc" + varint(2**62),
    "lists in lists": b"\x19" * 600,
    "structs in structs": b"\x1c" * 600,
    "text of 2**60 bytes": b"\x18" + varint(2**60),
    "a number without end": b"\x15" + b"\xff" * 300,
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_page_header_that_announces_what_is_not_there_is_damage(case, tmp_path):
    path = tmp_path / "bomb.parquet"
    pq.write_table(pa.table({"text": ["a" * 400, "b" * 400]}), path, use_dictionary=False, compression="none")
    at = pq.read_metadata(path).row_group(0).column(0).data_page_offset
    data = bytearray(path.read_bytes())
    data[at : at + len(HEADERS[case])] = HEADERS[case]
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"bomb\.parquet.* is damaged"):
        list(Parquet(paths=(str(path),)).documents())


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE])
def test_headers_before_headers_without_end_are_damage(kind, tmp_path):
    def header(name, kind, content):
        member = tarfile.TarInfo(name)
        member.type, member.size = kind, len(content)
        return member.tobuf(tarfile.GNU_FORMAT) + content.ljust(512, b"\0")

    content = b"20 comment=aaaaaaaa\n" if kind in (tarfile.XHDTYPE, tarfile.XGLTYPE) else b"name.txt\0"
    path = tmp_path / "shard.tar"
    path.write_bytes(header("x", kind, content) * 3000 + header("a.txt", tarfile.REGTYPE, b"text") + bytes(1024))
    with pytest.raises(DataError, match=r"shard\.tar.*more than 8 headers"):
        list(read_samples(path, "shard.tar", 1000))
    path.write_bytes(header("x", kind, content) + header("a.txt", tarfile.REGTYPE, b"text") + bytes(1024))
    assert len(list(read_samples(path, "shard.tar", 1000))) == 1


def shard(texts):
    """An MDS shard of one column of text."""
    samples = [np.uint32(len(text)).tobytes() + text for text in texts]
    begin = 4 * (len(samples) + 2)
    offsets = np.cumsum([begin, *map(len, samples)]).astype("<u4").tobytes()
    return np.uint32(len(samples)).tobytes() + offsets + b"".join(samples)


@pytest.mark.parametrize("compression", ["snappy", "br", "zstd"])
@pytest.mark.parametrize("claims", [200_021, 20, -3])
def test_a_shard_that_becomes_another_size_than_its_index_states_is_damage(compression, claims, tmp_path):
    raw = shard([b"one", b"two"])
    codec = {"br": "brotli"}.get(compression, compression)
    stored = pa.compress(raw, codec, asbytes=True)
    claimed = claims if claims > 0 else len(raw) + claims
    name = f"shard.00000.mds.{compression}"
    (tmp_path / name).write_bytes(stored)
    entry = {
        "version": 2, "format": "mds", "compression": compression, "hashes": [], "samples": 2, "size_limit": 1 << 26,
        "column_names": ["text"], "column_encodings": ["str"], "column_sizes": [None],
        "raw_data": {"basename": "shard.00000.mds", "bytes": claimed, "hashes": {}},
        "zip_data": {"basename": name, "bytes": len(stored), "hashes": {}},
    }  # fmt: skip
    index = {"version": 2, "shards": [entry]}
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"shard\.00000\.mds"):
        list(Mds(path=str(tmp_path)).documents())
    entry["raw_data"]["bytes"] = len(raw)
    (tmp_path / "index.json").write_text(json.dumps(index))
    assert [document.text for document in Mds(path=str(tmp_path)).documents()] == ["one", "two"]
