"""Tokens, tables and records that are damaged on the disk are found before they are trained on, and never end the process."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from panax.core import DataError
from panax.data import ExampleData, Table, TextData, TextFiles, TokenFile, TokenWriter, open_tokens
from panax.data.files.packed_files import PackedFiles, PackedRecord, pack
from panax.data.formats.megatron import MegatronTokens
from panax.data.images.encoded_images import number_classes
from panax.data.loading.examples import Arrays

FIXTURES = Path(__file__).parents[1] / "sources" / "fixtures"


@pytest.fixture
def tokens(tmp_path) -> Path:
    with TokenWriter(tmp_path / "tokens", vocab_size=100, end_of_document=99) as writer:
        for begin in range(40):
            writer.append(range(begin, begin + 50), num_prompt_tokens=begin % 3)
    return tmp_path / "tokens"


def source(corpus, cache: Path):
    settings = {"tokenizer": None} if isinstance(corpus, TokenFile) else {}
    return TextData(corpus=corpus, sequence_length=16, batch_size=2, cache_dir=str(cache), **settings).open().train


def zero(path: Path) -> None:
    """Put zeros in place of what a file holds; size and time of change stay as they are."""
    before = path.stat()
    path.write_bytes(bytes(before.st_size))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("name", ["tokens", "offsets", "loss_mask"])
def test_a_token_file_cut_short_while_it_is_trained_on_is_named(tokens, tmp_path, name):
    batches = source(TokenFile(path=str(tokens)), tmp_path / "cache").batches()
    next(batches)
    os.truncate(tokens / f"{name}.bin", 0)
    with pytest.raises(
        DataError, match=rf"tokens/{name}\.bin was cut short to 0 bytes while it was in use; expected \d"
    ):
        next(batches)


@pytest.mark.parametrize("name", ["tokens", "loss_mask", "target_counts"])
@pytest.mark.parametrize("remembered", [False, True])
def test_a_token_file_that_holds_zeros_is_named(tokens, tmp_path, monkeypatch, name, remembered):
    monkeypatch.setattr("panax.data.files.checksums._SETTLED_SECONDS", -9.0 if remembered else 9.0)
    open_tokens(tokens, verified_dir=tmp_path / "seen")
    zero(tokens / f"{name}.bin")
    with pytest.raises(
        DataError,
        match=rf"{name}\.bin is damaged: its checksum does not match the one stored when it was written; write",
    ):
        open_tokens(tokens, verified_dir=tmp_path / "seen")


def test_checksums_are_compared_once_for_each_state_of_a_file(tokens, tmp_path, monkeypatch):
    monkeypatch.setattr("panax.data.files.checksums._SETTLED_SECONDS", -9.0)
    open_tokens(tokens, verified_dir=tmp_path / "seen")
    with monkeypatch.context() as patched:
        patched.setattr("panax.data.text.tokens.compute_checksum", None)
        open_tokens(tokens, verified_dir=tmp_path / "seen")
        with pytest.raises(TypeError):
            open_tokens(tokens)
    (tokens / "tokens.bin").touch()
    monkeypatch.setattr("panax.data.text.tokens.compute_checksum", None)
    with pytest.raises(TypeError):
        open_tokens(tokens, verified_dir=tmp_path / "seen")


@pytest.mark.parametrize("earlier", [False, True])
def test_ids_outside_the_vocabulary_and_files_of_earlier_versions(tokens, earlier):
    header = json.loads((tokens / "header.json").read_text())
    if earlier:  # Panax 0.1 wrote neither
        del header["checksums"], header["seal"]
    (tokens / "header.json").write_text(json.dumps(header))
    assert open_tokens(tokens).vocab_size == 100
    ids = np.fromfile(tokens / "tokens.bin", "<u2")
    ids[7] = 100
    ids.tofile(tokens / "tokens.bin")
    with pytest.raises(DataError, match=r"tokens\.bin: id 100 at token 7 is outside the vocabulary of 100"):
        open_tokens(tokens)
    ids[7] = 98
    ids.tofile(tokens / "tokens.bin")
    with pytest.raises(DataError, match=r"tokens\.bin is damaged: its checksum does not match"):
        open_tokens(tokens)


@pytest.mark.parametrize("field", ["vocab_size", "end_of_document", "num_documents", "has_loss_mask"])
def test_a_header_that_was_changed_is_named(tokens, field):
    header = json.loads((tokens / "header.json").read_text())
    header[field] = {"has_loss_mask": False}.get(field, header[field] - 1)
    (tokens / "header.json").write_text(json.dumps(header))
    with pytest.raises(
        DataError, match=r"header\.json is damaged \(.*checksum|target_counts\.bin has|offsets\.bin has"
    ):
        open_tokens(tokens)


@pytest.mark.parametrize("damage", [zero, lambda path: os.truncate(path, 10)])
def test_damaged_tokens_in_the_cache_are_made_again(tmp_path, damage):
    (tmp_path / "a.txt").write_text("the oak and the ash " * 99)
    corpus = TextFiles(paths=(str(tmp_path / "a.txt"),))
    before = next(source(corpus, tmp_path / "cache").batches()).batch["tokens"]
    (path,) = tmp_path.glob("cache/tokens-*/tokens.bin")
    damage(path)
    assert (next(source(corpus, tmp_path / "cache").batches()).batch["tokens"] == before).all()


def test_tokens_of_megatron_that_were_changed_are_read_again(tmp_path):
    for suffix in (".bin", ".idx"):
        shutil.copy(FIXTURES / f"megatron_u16{suffix}", tmp_path / f"a{suffix}")
    corpus = MegatronTokens(path=str(tmp_path / "a"))
    before = corpus.open(tmp_path / "cache")
    zero(tmp_path / "a.bin")
    assert corpus.open(tmp_path / "cache").content != before.content
    with pytest.raises(DataError, match=r"a\.bin: document 0 ends with id 0, not with end_of_document=9"):
        MegatronTokens(path=str(tmp_path / "a"), end_of_document=9).open(tmp_path / "cache")


@pytest.mark.parametrize("megatron", [False, True])
def test_an_id_beyond_any_vocabulary_takes_no_memory(tmp_path, megatron):
    shutil.copy(FIXTURES / "megatron_i32.idx", tmp_path / "a.idx")
    np.array([1, 2, 3, 9, 4, 5, 6, 9, 2**30, 9], "<u4").tofile(tmp_path / "a.bin")
    path = str(tmp_path / "a")
    corpus = MegatronTokens(path=path) if megatron else TokenFile(path=f"{path}.bin", dtype="uint32")
    with pytest.raises(DataError, match=r"a\.bin: id 1073741824 at token 8; larger than any vocabulary"):
        corpus.open(tmp_path / "cache")


def test_a_damaged_table_is_made_again_and_one_cut_short_is_named(tmp_path):
    (tmp_path / "t.csv").write_text("a,b\n" + "".join(f"{i}.5,{i}\n" for i in range(1, 300)))
    data = ExampleData(
        examples=Table(paths=(str(tmp_path / "t.csv"),), numeric=("a",), label="b"), cache_dir=str(tmp_path / "cache")
    )
    before = next(data.open().train.batches()).batch
    (path,) = tmp_path.glob("cache/table-*/label.bin")
    zero(path)
    batches = data.open().train.batches()
    assert (next(batches).batch["label"] == before["label"]).all()
    (path,) = tmp_path.glob("cache/table-*/numeric.bin")
    os.truncate(path, 0)
    with pytest.raises(DataError, match=r"numeric\.bin was cut short to 0 bytes while it was in use"):
        next(batches)


def test_an_array_that_its_user_mapped_and_that_is_cut_short_is_named(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(9000, dtype=np.float32))
    arrays = Arrays({"a": np.load(tmp_path / "a.npy", mmap_mode="r")[100:]})
    assert arrays.read(np.array([0]))["a"] == 100
    os.truncate(tmp_path / "a.npy", 128)
    with pytest.raises(DataError, match=r"a\.npy was cut short to 128 bytes while it was in use; expected 36,128"):
        arrays.read(np.array([0]))


@pytest.mark.parametrize("name", ["data", "names", "labels"])
def test_damaged_records_are_found(tmp_path, name):
    records = [PackedRecord(f"r{i}", bytes([i] * 5000), str(i % 2)) for i in range(1, 9)]
    pack(records, tmp_path, lambda bad: None, number_classes)
    packed = PackedFiles(tmp_path)
    assert packed.read(3) == records[3].data and packed.name(3) == "r4"
    original = (tmp_path / f"{name}.bin").read_bytes()
    zero(tmp_path / f"{name}.bin")
    with pytest.raises(DataError, match=rf"{name}\.bin is damaged: its checksum"):
        PackedFiles(tmp_path)
    (tmp_path / f"{name}.bin").write_bytes(original)
    os.truncate(tmp_path / "data.bin", 99)
    with pytest.raises(DataError, match=r"data\.bin was cut short to 99 bytes while it was in use"):
        packed.read(3)
