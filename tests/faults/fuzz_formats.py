"""The formats that are fuzzed: how a small file of each is made, read whole, and changed below its checksums."""

import bz2
import contextlib
import dataclasses
import gzip
import io
import itertools
import json
import random
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from fuzz_mutations import mutate, mutate_json

from panax.checkpoint import open_checkpoint
from panax.checkpoint.converting import import_tensors, write_arrays
from panax.checkpoint.manifest import FILE, ArrayEntry, Manifest, checksum, merged
from panax.data import ImageFolder, Jsonl, Parquet, ParquetImages, Table, TextData, TextFiles, TokenFile, TokenWriter
from panax.data.array_record import ArrayRecord
from panax.data.arrow import Arrow
from panax.data.checksums import checksum_of, seal_of
from panax.data.images import WebDatasetImages
from panax.data.mds import Mds
from panax.data.megatron import MegatronTokens
from panax.data.packed_files import PackedFiles, Record, pack
from panax.data.pictures import number_classes
from panax.data.records import HuggingFaceDisk
from panax.data.tokenizer import PretrainedTokenizer
from panax.data.webdataset import WebDataset
from panax.stores import LocalStore

Change = Callable[[Path, random.Random, bool], None]

TEXTS = [f"text {i}: the oak, the ash and über {'x' * (i * 7 % 50)}" for i in range(40)]
IMAGES = ("jpeg", "png", "webp", "bmp", "gif", "tiff", "ppm")
FIXTURES = Path(__file__).parents[1] / "data" / "sources" / "fixtures"


class Format(NamedTuple):
    """A format.

    Attributes:
        make: Writes files into an empty folder.
        load: Reads all of them; raises a PanaxError where they can't be used.
        change: Changes one of them; below its outer checksum, or with that made again, where the last argument is true.
    """

    make: Callable[[Path], None]
    load: Callable[[Path], None]
    change: Change


def any_file(folder: Path, rng: random.Random, inner: bool) -> None:
    """Change the bytes of a file; of JSON its values, too."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    path = rng.choice(paths)
    how = mutate_json if path.suffix == ".json" else mutate
    path.write_bytes(how(path.read_bytes(), rng))


def within(unpack: Callable[[bytes], bytes], repack: Callable[[bytes], bytes], how: Change = any_file) -> Change:
    """Change what a file holds when it is decompressed, or the file itself."""

    def change(folder: Path, rng: random.Random, inner: bool) -> None:
        if not inner:
            return how(folder, rng, inner)
        path = rng.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
        path.write_bytes(repack(mutate(unpack(path.read_bytes()), rng)))

    return change


def consume(examples) -> None:
    """Draw a few batches of examples."""
    numbers = np.arange(min(examples.num_examples, 8))
    examples.read(numbers)
    examples.keys()


def texts(corpus_of: Callable[[Path], object]) -> Callable[[Path], None]:
    def load(folder: Path) -> None:
        corpus = corpus_of(folder)
        for _ in corpus.documents():  # type: ignore[attr-defined]
            pass
        corpus.fingerprint()  # type: ignore[attr-defined]

    return load


# Checkpoints


def make_checkpoint(folder: Path) -> None:
    values = np.arange(600.0, dtype=np.float32).reshape(20, 30)
    words = np.arange(8, dtype=np.uint32).reshape(4, 2)
    arrays = [
        ("params.w", ArrayEntry((20, 30), "float32"), lambda box: values[box.slices]),
        ("params.b", ArrayEntry((), "float32"), lambda box: np.float32(3)),
        ("key", ArrayEntry((4, 2), "uint32", key_impl="threefry2x32"), lambda box: words[box.slices]),
    ]
    write_arrays(
        LocalStore(folder),
        "",
        arrays,
        step=7,
        attachments={"task.json": '{"type": "Task"}'},
        host={"data": {"epoch": 1}},
    )


def load_checkpoint(folder: Path) -> None:
    found = open_checkpoint(folder)
    found.verify()
    for name in found.manifest.arrays:
        found.read(name)
    for name in found.manifest.attachments:
        found.attachment(name)
    Manifest.from_json(found.manifest.to_json(), "again")


def change_checkpoint(folder: Path, rng: random.Random, inner: bool) -> None:
    if not inner:
        return any_file(folder, rng, inner)
    if rng.random() < 0.3:
        any_file(folder / "data", rng, inner)
        reseal(folder / FILE, lambda body: measured(body, folder))
    else:
        reseal(folder / FILE, lambda body: json.loads(mutate_json(json.dumps(body).encode(), rng)))


def reseal(path: Path, change: Callable[[Any], Any]) -> None:
    """Change a manifest's body, and make its checksum again."""
    outer = json.loads(path.read_text())
    with contextlib.suppress(ValueError, RecursionError):
        outer["body"] = change(outer["body"])
    outer["checksum"] = checksum(json.dumps(outer["body"], sort_keys=True, separators=(",", ":")).encode())
    path.write_text(json.dumps(outer))


def measured(body: Any, folder: Path) -> Any:
    """A manifest's body with the checksums of chunks, and the sizes of files, as they are."""
    for entry in body["arrays"].values():
        for chunk in entry["chunks"]:
            data = (folder / body["files"][chunk[2]][0]).read_bytes()
            chunk[4] = checksum(data[chunk[3] : chunk[3] + int(np.prod(chunk[1])) * 4])
    for file in body["files"]:
        file[1] = (folder / file[0]).stat().st_size
    return body


def make_parts(folder: Path) -> None:
    make_checkpoint(folder)
    whole = Manifest.from_json((folder / FILE).read_bytes(), "")
    (folder / FILE).unlink()
    for number in range(2):
        parts = {
            name: dataclasses.replace(entry, chunks=entry.chunks[number::2]) for name, entry in whole.arrays.items()
        }
        part = Manifest(7, parts, whole.files, whole.attachments if number == 0 else {}, whole.host)
        (folder / f"part{number}").mkdir()
        (folder / f"part{number}" / FILE).write_text(part.to_json())


def load_parts(folder: Path) -> None:
    parts = [Manifest.from_json((folder / f"part{n}" / FILE).read_bytes(), f"part {n}") for n in range(2)]
    found = merged(parts)
    found.check_covered()
    found.to_json()


def change_part(folder: Path, rng: random.Random, inner: bool) -> None:
    part = folder / f"part{rng.randrange(2)}"
    if inner:
        reseal(part / FILE, lambda body: json.loads(mutate_json(json.dumps(body).encode(), rng)))
    else:
        any_file(part, rng, inner)


# Tokens and caches


def make_tokens(folder: Path) -> None:
    with TokenWriter(folder / "t", vocab_size=100, end_of_document=99) as writer:
        for i in range(12):
            writer.append(range(i, i + 30), num_prompt_tokens=i % 2)


def load_tokens(folder: Path) -> None:
    train(TokenFile(path=str(folder / "t")), folder)


def train(corpus, folder: Path) -> None:
    data = TextData(corpus=corpus, tokenizer=None, sequence_length=16, batch_size=2, cache_dir=str(folder / "cache"))
    opened = data.open()
    list(itertools.islice(opened.train.batches(), 3))
    assert opened.unigram_entropy_nats == opened.unigram_entropy_nats


def resealed(header_of: Callable[[Path], Path]) -> Change:
    """Change a file, and make its checksum and the header's seal again."""

    def change(folder: Path, rng: random.Random, inner: bool) -> None:
        any_file(folder, rng, inner)
        path = header_of(folder)
        try:
            header = json.loads(path.read_bytes())
            if inner:
                for name in header["checksums"]:
                    file = path.with_name(name if name.endswith(".bin") else f"{name}.bin")
                    if file.is_file():
                        header["checksums"][name] = checksum_of(file)
                header["seal"] = seal_of(header)
                path.write_text(json.dumps(header))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            pass

    return change


def make_flat(folder: Path) -> None:
    np.arange(400, dtype="<u2").__mod__(50).tofile(folder / "a.bin")


def make_megatron(folder: Path) -> None:
    for suffix in (".bin", ".idx"):
        (folder / f"a{suffix}").write_bytes((FIXTURES / f"megatron_u16{suffix}").read_bytes())


def make_packed(folder: Path) -> None:
    records = [Record(f"r{i}", bytes([i]) * 50, str(i % 3)) for i in range(9)]
    pack(records, folder, lambda bad: None, number_classes)


def load_packed(folder: Path) -> None:
    packed = PackedFiles(folder)
    for number in range(len(packed)):
        packed.read(number)
        packed.name(number)


def make_table_cache(folder: Path) -> None:
    make_csv(folder)
    load_csv(folder)


def change_table_cache(folder: Path, rng: random.Random, inner: bool) -> None:
    (cache,) = folder.glob("cache/table-*")
    resealed(lambda where: where / "header.json")(cache, rng, inner)


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


# Images and tables


def an_image(kind: str) -> bytes:
    from PIL import Image

    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 255, (24, 30, 3), dtype=np.uint8))
    file = io.BytesIO()
    (image.convert("P") if kind == "gif" else image).save(file, kind)
    return file.getvalue()


def make_images(folder: Path) -> None:
    for kind in IMAGES:
        (folder / "a").mkdir(exist_ok=True)
        (folder / "a" / f"{kind}.{kind}").write_bytes(an_image(kind))
    (folder / "labels.csv").write_text("file,label\n" + "".join(f"a/{kind}.{kind},{kind}\n" for kind in IMAGES))


def load_images(folder: Path) -> None:
    for label in ("folder", str(folder / "labels.csv")):
        consume(ImageFolder(path=str(folder), label=label, size=8, max_pixels=10**7).open(folder / "cache", 100))


def change_image(folder: Path, rng: random.Random, inner: bool) -> None:
    if not inner:
        return any_file(folder, rng, inner)
    path = folder / "a" / "png.png"
    data = bytearray(mutate(path.read_bytes(), rng))
    at = 8
    while at + 12 <= len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        end = at + 8 + size
        if end + 4 > len(data):
            break
        data[end : end + 4] = zlib.crc32(data[at + 4 : end]).to_bytes(4, "big")
        at = end + 4
    path.write_bytes(data)


def make_parquet_images(folder: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = [{"image": {"bytes": an_image(kind), "path": kind}, "label": i} for i, kind in enumerate(IMAGES)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "a.parquet", compression="none")


def load_parquet_images(folder: Path) -> None:
    images = ParquetImages(paths=(str(folder / "a.parquet"),), size=8, max_pixels=10**7, max_record_bytes=2**22)
    consume(images.open(folder / "cache", 100))


def make_csv(folder: Path) -> None:
    (folder / "a.csv").write_text("a,b,c\n" + "".join(f'{i}.5,{i},"c {i}"\n' for i in range(50)))


def load_csv(folder: Path, suffix: str = "csv") -> None:
    table = Table(paths=(str(folder / f"a.{suffix}"),), numeric=("a",), categorical=("c",), label="b", hash_buckets=9)
    consume(table.open(folder / "cache", 10**6))


def make_csv_gz(folder: Path) -> None:
    make_csv(folder)
    (folder / "a.csv.gz").write_bytes(gzip.compress((folder / "a.csv").read_bytes()))
    (folder / "a.csv").unlink()


def make_npz(folder: Path) -> None:
    np.savez_compressed(folder / "a.npz", a=np.arange(50.0), b=np.arange(50), c=np.array([f"c {i}" for i in range(50)]))


def change_npz(folder: Path, rng: random.Random, inner: bool) -> None:
    if not inner:
        return any_file(folder, rng, inner)
    path = folder / "a.npz"
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = rng.choice(sorted(members))
    members[name] = mutate(members[name], rng)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


# Weights, configurations and tokenizers


def make_safetensors(folder: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"w": np.ones((8, 4), np.float32), "s": np.array(3, np.int64)}, folder / "model.safetensors")
    save_file({"b": np.ones(4, np.float16)}, folder / "more.safetensors")
    where = {"w": "model.safetensors", "s": "model.safetensors", "b": "more.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))


def load_safetensors(folder: Path) -> None:
    import_tensors(folder, LocalStore(folder / "out"))
    load_checkpoint(folder / "out")


def change_safetensors(folder: Path, rng: random.Random, inner: bool) -> None:
    if not inner:
        return any_file(folder, rng, inner)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = mutate_json(data[8 : 8 + size], rng)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])


def make_tokenizer(folder: Path) -> None:
    from panax.data.tokenizer import BytePairTokenizer

    (folder / "a.txt").write_text("\n".join(TEXTS))
    tokenizer = BytePairTokenizer(vocab_size=300).train(TextFiles(paths=(str(folder / "a.txt"),)))
    (folder / "a.txt").unlink()
    tokenizer.save(folder)


def load_tokenizer(folder: Path) -> None:
    tokenizer = PretrainedTokenizer(path=str(folder)).load()
    tokenizer.decode(tokenizer.encode(TEXTS[3]))
    tokenizer.encode_batch(TEXTS)


CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 32, "head_dim": 8,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 32},
}  # fmt: skip


def make_config(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG))


def load_config(folder: Path) -> None:
    from panax.adapters.huggingface import config_from

    config_from(folder)


FORMATS: dict[str, Format] = {
    "manifest": Format(make_checkpoint, load_checkpoint, change_checkpoint),
    "parts": Format(make_parts, load_parts, change_part),
    "tokens": Format(make_tokens, load_tokens, resealed(lambda folder: folder / "t" / "header.json")),
    "flat": Format(
        make_flat, lambda f: train(TokenFile(path=str(f / "a.bin"), dtype="uint16", end_of_document=7), f), any_file
    ),
    "megatron": Format(make_megatron, lambda f: train(MegatronTokens(path=str(f / "a")), f), any_file),
    "packed": Format(make_packed, load_packed, resealed(lambda folder: folder / "header.json")),
    "table_cache": Format(make_table_cache, load_csv, change_table_cache),
    "text": Format(make_text, texts(lambda f: TextFiles(paths=(str(f / "a.txt"),), separator="\n\n")), any_file),
    "jsonl": Format(make_jsonl, texts(lambda f: Jsonl(paths=(str(f / "a.jsonl"),))), change_lines),
    "jsonl_gz": Format(
        make_jsonl_gz,
        texts(lambda f: Jsonl(paths=(str(f / "a.jsonl.gz"),))),
        within(gzip.decompress, gzip.compress),
    ),
    "arrow": Format(make_arrow(), load_arrow, any_file),
    "arrow_stream": Format(make_arrow(stream=True), load_arrow, any_file),
    "arrow_zstd": Format(make_arrow(compression="zstd"), load_arrow, any_file),
    "parquet": Format(make_parquet, load_parquet, any_file),
    "dataset": Format(make_dataset, texts(lambda f: HuggingFaceDisk(path=str(f / "d"))), any_file),
    "mds": Format(make_mds("mds_plain"), load_mds, change_mds),
    "mds_zstd": Format(make_mds("mds_zstd"), texts(lambda f: Mds(path=str(f), max_shard_bytes=2**26)), change_mds),
    "webdataset": Format(make_shard, load_shard, change_shard),
    "array_record": Format(make_records, load_records, change_records),
    "images": Format(make_images, load_images, change_image),
    "parquet_images": Format(make_parquet_images, load_parquet_images, any_file),
    "csv": Format(make_csv, load_csv, any_file),
    "csv_gz": Format(make_csv_gz, lambda f: load_csv(f, "csv.gz"), within(gzip.decompress, gzip.compress)),
    "npz": Format(make_npz, lambda f: load_csv(f, "npz"), change_npz),
    "safetensors": Format(make_safetensors, load_safetensors, change_safetensors),
    "tokenizer": Format(make_tokenizer, load_tokenizer, any_file),
    "config": Format(make_config, load_config, any_file),
}
