"""Other people's formats of texts, to be fuzzed."""

import bz2
import gzip
import io
import json
import random
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash
from fuzz_base import FIXTURES, TEXTS, any_file, consume, texts
from fuzz_examples import an_image
from fuzz_mutations import mutate, mutate_json

from panax.data import Parquet
from panax.data.formats.array_record import ArrayRecord
from panax.data.formats.arrow import Arrow
from panax.data.formats.mds import Mds
from panax.data.formats.webdataset import WebDataset
from panax.data.images.images import WebDatasetImages

# Text


def make_jsonl(folder: Path) -> None:
    lines = b"".join(json.dumps({"text": text, "n": [1, {"a": None}]}).encode() + b"\n" for text in TEXTS)
    (folder / "a.jsonl").write_bytes(lines)


def change_lines(folder: Path, rng: random.Random, inner: bool) -> None:
    if not inner:
        return any_file(folder, rng, inner)
    path = folder / "a.jsonl"
    lines = path.read_bytes().splitlines()
    at = rng.randrange(len(lines))
    lines[at] = mutate_json(lines[at], rng).replace(b"\n", b" ")
    path.write_bytes(b"\n".join(lines))


def make_jsonl_gz(folder: Path) -> None:
    make_jsonl(folder)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress((folder / "a.jsonl").read_bytes()))
    (folder / "a.jsonl").unlink()


def make_text(folder: Path) -> None:
    (folder / "a.txt").write_text("\n\n".join(TEXTS))


def arrow_table():
    import pyarrow

    words = pyarrow.array(TEXTS)
    return pyarrow.table(
        {
            "text": words,
            "large": words.cast(pyarrow.large_string()),
            "view": words.cast(pyarrow.string_view()),
            "words": words.dictionary_encode(),
            "many": [[i, i + 1] for i in range(len(TEXTS))],
            "number": np.arange(len(TEXTS)),
        }
    )


def make_arrow(stream: bool = False, compression: str | None = None) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        from pyarrow import ipc

        table = arrow_table()
        options = ipc.IpcWriteOptions(compression=compression)
        new = ipc.new_stream if stream else ipc.new_file
        with new(str(folder / "a.arrow"), table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=20)

    return make


def load_arrow(folder: Path) -> None:
    for text in ("text", "large", "view", "words", "many", "number"):
        texts(lambda where, text=text: Arrow(paths=(str(where / "a.arrow"),), text=text, max_batch_bytes=2**26))(folder)


def make_parquet(folder: Path) -> None:
    from pyarrow import parquet

    table = arrow_table().drop_columns(["view", "many"])
    parquet.write_table(
        table,
        folder / "a.parquet",
        row_group_size=20,
        data_page_size=300,
        write_page_checksum=False,
        compression="zstd",
    )
    plain = {"text": "DELTA_BYTE_ARRAY", "large": "PLAIN"}
    parquet.write_table(
        table.select(["text", "large"]),
        folder / "b.parquet",
        use_dictionary=False,
        column_encoding=plain,
        compression="none",
    )


def load_parquet(folder: Path) -> None:
    for file, columns in {"a": ("text", "large", "words", "number"), "b": ("text", "large")}.items():
        for text in columns:
            texts(
                lambda where, f=file, t=text: Parquet(
                    paths=(str(where / f"{f}.parquet"),), text=t, max_record_bytes=2**22
                )
            )(folder)


def make_dataset(folder: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(folder / "d"))


def make_mds(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        for path in (FIXTURES / name).iterdir():
            (folder / path.name).write_bytes(path.read_bytes())

    return make


def load_mds(folder: Path) -> None:
    index = json.loads((FIXTURES / "mds_plain" / "index.json").read_text())
    for text in index["shards"][0]["column_names"]:
        texts(lambda where, text=text: Mds(path=str(where), text=text, max_shard_bytes=2**26))(folder)


def change_mds(folder: Path, rng: random.Random, inner: bool) -> None:
    any_file(folder, rng, inner)
    if inner:
        path = folder / "index.json"
        try:
            index = json.loads(path.read_bytes())
            for shard in index["shards"]:
                stored = shard["zip_data"] or shard["raw_data"]
                data = (folder / stored["basename"]).read_bytes()
                stored["hashes"] = {"xxh64": xxhash.xxh64(data).hexdigest()}
                stored["bytes"] = len(data)
            path.write_text(json.dumps(index))
        except (ValueError, TypeError, KeyError, AttributeError, OSError, RecursionError):
            pass


def make_shard(folder: Path) -> None:
    with tarfile.open(folder / "a.tar", "w", format=tarfile.PAX_FORMAT) as shard:
        for i, text in enumerate(TEXTS[:6]):
            files = {
                "txt": text.encode(),
                "json": json.dumps({"body": text, "cls": i}).encode(),
                "png": an_image("png"),
            }
            for suffix, data in files.items():
                member = tarfile.TarInfo(f"{'long/' * (30 * (i == 3))}s{i}.{suffix}")
                member.size = len(data)
                if i == 2:
                    member.pax_headers = {"comment": "über" * 30}
                shard.addfile(member, io.BytesIO(data))


def load_shard(folder: Path) -> None:
    paths = (str(folder / "a.tar"),)
    texts(lambda where: WebDataset(paths=paths, max_record_bytes=2**22))(folder)
    texts(lambda where: WebDataset(paths=paths, text="json.body", max_record_bytes=2**22))(folder)
    images = WebDatasetImages(paths=paths, label="json.cls", size=8, max_record_bytes=2**22)
    consume(images.open(folder / "cache", 100))


def change_shard(folder: Path, rng: random.Random, inner: bool) -> None:
    """Change a header's fields and make its checksum again, or change and compress the shard."""
    path = folder / "a.tar"
    data = bytearray(path.read_bytes())
    if inner:
        at = 512 * rng.randrange(max(1, len(data) // 512))
        data[at : at + 512] = mutate(bytes(data[at : at + 512]), rng)[:512].ljust(512, b"\0")
        total = sum(data[at : at + 148]) + 8 * 32 + sum(data[at + 156 : at + 512])
        data[at + 148 : at + 156] = b"%06o\0 " % total
    else:
        data = bytearray(mutate(bytes(data), rng))
    squeeze = rng.choice((bytes, bytes, gzip.compress, bz2.compress))
    squeezed = squeeze(bytes(data))
    path.write_bytes(mutate(squeezed, rng) if squeeze is not bytes and rng.random() < 0.3 else squeezed)


def write_records(path: Path, records: list[bytes]) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter  # pyright: ignore

    writer = ArrayRecordWriter(str(path), "group_size:2")
    for record in records:
        writer.write(record)
    writer.close()


def make_records(folder: Path) -> None:
    write_records(folder / "a.array_record", [json.dumps({"text": text}).encode() for text in TEXTS])


def load_records(folder: Path) -> None:
    paths = (str(folder / "a.array_record"),)
    texts(lambda where: ArrayRecord(paths=paths, record="json"))(folder)
    texts(lambda where: ArrayRecord(paths=paths))(folder)


def change_records(folder: Path, rng: random.Random, inner: bool) -> None:
    if not inner:
        return any_file(folder, rng, inner)
    write_records(
        folder / "a.array_record", [mutate_json(json.dumps({"text": text}).encode(), rng) for text in TEXTS[:8]]
    )
