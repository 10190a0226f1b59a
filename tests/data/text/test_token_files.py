"""Token files come back as written; damaged or unfitting ones are refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from panax.core import DataError, RecipeError
from panax.data import TokenFile, TokenWriter, open_tokens

DOCUMENTS = [[5, 6, 7], [], [8], list(range(40))]


def write(directory: Path, documents=DOCUMENTS, *, vocab_size=100, prompts=None) -> Path:
    with TokenWriter(directory, vocab_size=vocab_size, end_of_document=99) as writer:
        for i, document in enumerate(documents):
            writer.append(document, num_prompt_tokens=prompts[i] if prompts else 0)
    return directory


@pytest.mark.parametrize("buffer", [1, 5, 2**20])
@pytest.mark.parametrize("prompts", [None, [0, 0, 1, 10]])
def test_documents_come_back_as_written_however_they_are_buffered(tmp_path, monkeypatch, buffer, prompts):
    plain = open_tokens(write(tmp_path / "whole", prompts=prompts))
    monkeypatch.setattr("panax.data.text.tokens.BUFFER_TOKENS", buffer)
    store = open_tokens(write(tmp_path / "buffered", prompts=prompts))
    documents = [store.tokens[a:b].tolist() for a, b in zip(store.offsets, store.offsets[1:], strict=False)]
    assert documents == [[*document, 99] for document in DOCUMENTS]
    mask = np.concatenate([np.arange(len(d) + 1) >= (prompts[i] if prompts else 0) for i, d in enumerate(DOCUMENTS)])
    assert (store.loss_mask is None) == (prompts is None)
    np.testing.assert_array_equal(mask, 1 if store.loss_mask is None else store.loss_mask)
    mask[store.offsets[:-1]] = False
    np.testing.assert_array_equal(store.target_counts, np.bincount(store.tokens[mask], minlength=100))
    assert store.content == plain.content


@pytest.mark.parametrize(("vocab_size", "dtype"), [(2**16, "uint16"), (2**16 + 1, "uint32")])
def test_ids_take_two_bytes_where_they_fit(tmp_path, vocab_size, dtype):
    store = open_tokens(write(tmp_path, [[vocab_size - 1]], vocab_size=vocab_size))
    assert store.tokens.dtype == dtype and store.tokens[0] == vocab_size - 1


@pytest.mark.parametrize("wrong", [100, -1])
def test_an_id_outside_the_vocabulary_is_refused(tmp_path, wrong):
    with pytest.raises(DataError, match=f"token id {wrong} is outside the vocabulary of 100"):
        write(tmp_path, [[1, wrong]])
    assert not (tmp_path / "header.json").exists()


def test_content_depends_on_ids_documents_and_mask(tmp_path):
    versions = [([[1, 2]], [0]), ([[1, 3]], [0]), ([[1], [2]], [0, 0]), ([[1, 2]], [1]), ([[1, 99, 2]], [0])]
    contents = [open_tokens(write(tmp_path / str(i), d, prompts=p)).content for i, (d, p) in enumerate(versions)]
    assert len(set(contents)) == len(versions)


@pytest.mark.parametrize("name", ["tokens", "offsets", "loss_mask", "target_counts"])
@pytest.mark.parametrize("change", ["shorter", "longer", "missing"])
def test_a_file_of_the_wrong_size_is_refused(tmp_path, name, change):
    path = write(tmp_path, prompts=[1, 0, 0, 0]) / f"{name}.bin"
    data = path.read_bytes()
    path.unlink()
    if change != "missing":
        path.write_bytes(data[:-1] if change == "shorter" else data + b"\0")
    with pytest.raises(DataError, match=rf"{name}\.bin"):
        open_tokens(tmp_path)


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ("", "damaged"),
        ("[]", "damaged"),
        ({"version": 99}, "version 99"),
        ({"format": "other"}, "'other'"),
        ({"dtype": "float8"}, "damaged"),
        ({"num_tokens": 3}, "damaged"),
        ({"num_documents": 0}, "no document"),
    ],
)
def test_a_damaged_header_is_refused(tmp_path, header, says):
    path = write(tmp_path) / "header.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **header}) if isinstance(header, dict) else header)
    with pytest.raises(DataError, match=says):
        open_tokens(tmp_path)


def test_offsets_that_do_not_rise_are_refused(tmp_path):
    offsets = np.fromfile(write(tmp_path) / "offsets.bin", "<i8")
    offsets[[1, 2]] = offsets[[2, 1]]
    offsets.tofile(tmp_path / "offsets.bin")
    with pytest.raises(DataError, match="don't rise"):
        open_tokens(tmp_path)


def test_a_token_file_opens_by_its_directory_or_its_ids(tmp_path):
    write(tmp_path / "t")
    for path in (tmp_path / "t", tmp_path / "t" / "tokens.bin"):
        assert TokenFile(path=str(path)).open(tmp_path).vocab_size == 100
    with pytest.raises(RecipeError, match="dtype has no effect"):
        TokenFile(path=str(tmp_path / "t"), dtype="uint16").open(tmp_path)


def flat(path: Path, ids, dtype="<u2") -> str:
    np.array(ids, dtype).tofile(path)
    return str(path)


@pytest.mark.parametrize("buffer", [2, 3, 100])
def test_a_flat_file_is_cut_at_the_end_of_document(tmp_path, monkeypatch, buffer):
    monkeypatch.setattr("panax.data.text.token_file.BUFFER_TOKENS", buffer)
    path = flat(tmp_path / "flat.bin", [1, 2, 9, 3, 9, 9, 4])
    store = TokenFile(path=path, dtype="uint16", end_of_document=9).open(tmp_path / "cache")
    assert store.offsets.tolist() == [0, 3, 5, 6, 7]
    assert store.tokens.tolist() == [1, 2, 9, 3, 9, 9, 4] and store.vocab_size == 10
    assert store.target_counts.tolist() == [0, 0, 1, 0, 0, 0, 0, 0, 0, 2]
    token_file = TokenFile(path=path, dtype="uint16", vocab_size=50).open(tmp_path / "cache")
    assert token_file.offsets.tolist() == [0, 7] and token_file.vocab_size == 50 and token_file.end_of_document is None
    assert token_file.content != store.content


def test_a_flat_file_is_read_through_only_once(tmp_path, monkeypatch):
    file = TokenFile(path=flat(tmp_path / "flat.bin", [1, 2, 9]), dtype="uint16", end_of_document=9)
    first = file.open(tmp_path / "cache")
    monkeypatch.setattr(TokenFile, "_index", None)
    assert file.open(tmp_path / "cache").content == first.content


@pytest.mark.parametrize(
    ("ids", "settings", "error", "says"),
    [
        ([1, 2], {}, RecipeError, "dtype=None for the flat token file .* expected uint16 or uint32"),
        ([1, 2], {"dtype": "int8"}, RecipeError, "dtype='int8'"),
        ([], {"dtype": "uint16"}, DataError, "has 0 bytes"),
        ([1, 2, 3], {"dtype": "uint32"}, DataError, "has 6 bytes; expected one or more ids of 4 bytes"),
        ([1, 7, 3], {"dtype": "uint16", "vocab_size": 5}, DataError, "id 7 at token 1; vocab_size=5"),
        ([1, 2, 3], {"dtype": "uint16", "end_of_document": 9}, DataError, "nowhere holds end_of_document=9"),
    ],
)
def test_a_flat_file_that_does_not_fit_its_settings_is_refused(tmp_path, ids, settings, error, says):
    path = flat(tmp_path / "flat.bin", ids)
    with pytest.raises(error, match=says):
        TokenFile(path=path, **settings).open(tmp_path / "cache")


def test_a_token_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match=r"no\.bin is not a token file"):
        TokenFile(path=str(tmp_path / "no.bin"), dtype="uint16").open(tmp_path)
