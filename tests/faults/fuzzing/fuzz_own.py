"""Panax's own formats, to be fuzzed: checkpoints, their parts, tokens, packed records; and flat files of tokens."""

import contextlib
import dataclasses
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from fuzz_base import FIXTURES, Change, any_file
from fuzz_mutations import mutate_json

from panax.checkpoint import manifest as manifests
from panax.checkpoint import open_checkpoint
from panax.checkpoint.conversion import write_arrays
from panax.checkpoint.manifest import MANIFEST_FILE, ArrayEntry, Manifest, merge_manifests
from panax.data import TextData, TokenFile, TokenWriter
from panax.data.files.checksums import compute_checksum, compute_seal
from panax.data.files.packed_files import PackedFiles, PackedRecord, pack
from panax.data.images.encoded_images import number_classes
from panax.stores import LocalStore

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
        # A save's files stand in a folder of its own name, which differs from save to save.
        (saved,) = (path for path in folder.iterdir() if path.is_dir())
        any_file(saved, rng, inner)
        reseal(folder / MANIFEST_FILE, lambda body: measured(body, folder))
    else:
        reseal(folder / MANIFEST_FILE, lambda body: json.loads(mutate_json(json.dumps(body).encode(), rng)))


def reseal(path: Path, change: Callable[[Any], Any]) -> None:
    """Change a manifest's body, and make its checksum again."""
    outer = json.loads(path.read_text())
    with contextlib.suppress(ValueError, RecursionError):
        outer["body"] = change(outer["body"])
    outer["checksum"] = manifests.compute_checksum(
        json.dumps(outer["body"], sort_keys=True, separators=(",", ":")).encode()
    )
    path.write_text(json.dumps(outer))


def measured(body: Any, folder: Path) -> Any:
    """A manifest's body with the checksums of chunks, and the sizes of files, as they are."""
    for entry in body["arrays"].values():
        for chunk in entry["chunks"]:
            data = (folder / body["files"][chunk[2]][0]).read_bytes()
            chunk[4] = manifests.compute_checksum(data[chunk[3] : chunk[3] + int(np.prod(chunk[1])) * 4])
    for file in body["files"]:
        file[1] = (folder / file[0]).stat().st_size
    return body


def make_parts(folder: Path) -> None:
    make_checkpoint(folder)
    manifest = Manifest.from_json((folder / MANIFEST_FILE).read_bytes(), "")
    (folder / MANIFEST_FILE).unlink()
    for number in range(2):
        parts = {
            name: dataclasses.replace(entry, chunks=entry.chunks[number::2]) for name, entry in manifest.arrays.items()
        }
        part = Manifest(7, parts, manifest.files, manifest.attachments if number == 0 else {}, manifest.host)
        (folder / f"part{number}").mkdir()
        (folder / f"part{number}" / MANIFEST_FILE).write_text(part.to_json())


def load_parts(folder: Path) -> None:
    parts = [Manifest.from_json((folder / f"part{n}" / MANIFEST_FILE).read_bytes(), f"part {n}") for n in range(2)]
    found = merge_manifests(parts)
    found.check_covered()
    found.to_json()


def change_part(folder: Path, rng: random.Random, inner: bool) -> None:
    part = folder / f"part{rng.randrange(2)}"
    if inner:
        reseal(part / MANIFEST_FILE, lambda body: json.loads(mutate_json(json.dumps(body).encode(), rng)))
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
                        header["checksums"][name] = compute_checksum(file)
                header["seal"] = compute_seal(header)
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
    records = [PackedRecord(f"r{i}", bytes([i]) * 50, str(i % 3)) for i in range(9)]
    pack(records, folder, lambda bad: None, number_classes)


def load_packed(folder: Path) -> None:
    packed = PackedFiles(folder)
    for number in range(len(packed)):
        packed.read(number)
        packed.name(number)
