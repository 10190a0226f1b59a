"""Tokenizers: deterministic, exact, and deaf to special tokens that stand in a text."""

import json

import pytest

from panax.core import DataError, RecipeError
from panax.data import BytePairTokenizer, Document, PretrainedTokenizer, TextFiles, Tokenizer
from panax.data.files.cache import read_or_build
from panax.data.text.encoding import _split_text

TEXT = "the cat sat on the mat, the cat ate the rat; naïve 猫 \t\n\n  def f(x):\n    return x ** 2\n"


class Lines:
    """A corpus of our own: any class with these two methods is one."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def documents(self):
        return (Document(text) for text in self.texts)

    def fingerprint(self) -> str:
        return str(hash(self.texts))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return BytePairTokenizer(vocab_size=300).train(Lines(*[TEXT] * 5))


@pytest.mark.parametrize("text", ["", " ", TEXT, "never seen: Ωmega \x00\x7f 🦜", "<|endoftext|> inside"])
def test_any_text_comes_back_exactly(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_batch([text, TEXT]) == [tokenizer.encode(text), tokenizer.encode(TEXT)]


def test_a_special_token_in_a_text_is_only_text(tokenizer):
    ids = tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.end_of_document not in ids and len(ids) > 5
    assert tokenizer.decode([tokenizer.end_of_document]) == "<|endoftext|>"


def test_training_is_deterministic_and_depends_on_the_text(tokenizer):
    again = BytePairTokenizer(vocab_size=300).train(Lines(*[TEXT] * 5))
    other = BytePairTokenizer(vocab_size=300).train(Lines("quite another text, another text, text"))
    assert again.fingerprint == tokenizer.fingerprint != other.fingerprint
    assert tokenizer.vocab_size == 300


def test_a_small_corpus_gives_a_smaller_vocabulary():
    small = BytePairTokenizer(vocab_size=5000).train(Lines("abab"))
    assert 257 <= small.vocab_size < 270 and max(small.encode("abab")) < small.vocab_size


def test_train_bytes_limits_what_is_read():
    texts = iter(["a"] * 10_000)

    class Watched(Lines):
        def documents(self):
            return (Document(text) for text in texts)

    BytePairTokenizer(train_bytes=300).train(Watched())
    assert len(list(texts)) > 9_000


def test_too_small_a_vocabulary_is_refused():
    with pytest.raises(RecipeError, match="vocab_size=256; expected at least 257"):
        BytePairTokenizer(vocab_size=256)
    with pytest.raises(RecipeError, match="train_bytes=0"):
        BytePairTokenizer(train_bytes=0)


def test_saved_and_loaded_is_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "t")
    for path in (tmp_path / "t", tmp_path / "t" / "tokenizer.json"):
        loaded = PretrainedTokenizer(path=str(path)).load()
        assert loaded.fingerprint == tokenizer.fingerprint
        assert loaded.encode("a<|endoftext|>b") == tokenizer.encode("a<|endoftext|>b")


def test_hugging_face_reads_what_is_saved(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    tokenizer.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    assert theirs(TEXT)["input_ids"] == tokenizer.encode(TEXT)
    assert theirs.eos_token_id == tokenizer.end_of_document


def test_the_end_of_a_document_is_found_or_named(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": {"content": "a"}}))
    assert PretrainedTokenizer(path=str(tmp_path)).load().end_of_document == tokenizer.encode("a")[0]
    assert (
        PretrainedTokenizer(path=str(tmp_path), end_of_document="b").load().end_of_document == tokenizer.encode("b")[0]
    )
    config.unlink()
    assert PretrainedTokenizer(path=str(tmp_path)).load().fingerprint == tokenizer.fingerprint
    with pytest.raises(DataError, match=r"no token '<end>'; choose .* special tokens are: '<\|endoftext\|>'"):
        PretrainedTokenizer(path=str(tmp_path), end_of_document="<end>").load()
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    saved["added_tokens"] = []
    del saved["model"]["vocab"]["<|endoftext|>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    with pytest.raises(DataError, match="no file states the token that ends a document; name it with end_of_document="):
        PretrainedTokenizer(path=str(tmp_path)).load()
    config.write_text("[")
    with pytest.raises(DataError, match=r"tokenizer_config\.json is broken"):
        PretrainedTokenizer(path=str(tmp_path)).load()


def test_a_file_that_is_no_tokenizer_is_named(tmp_path):
    with pytest.raises(DataError, match=r"tokenizer\.json can't be read: No such file"):
        PretrainedTokenizer(path=str(tmp_path)).load()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json is not a tokenizer"):
        PretrainedTokenizer(path=str(tmp_path)).load()


def test_long_texts_are_cut_where_the_tokens_stay_the_same(tokenizer, monkeypatch):
    monkeypatch.setattr("panax.data.text.encoding._PIECE_CHARACTERS", 10)
    text = TEXT * 20
    pieces = _split_text(text)
    assert "".join(pieces) == text and len(pieces) > 50
    assert [i for ids in tokenizer.encode_batch(pieces) for i in ids] == tokenizer.encode(text)
    assert _split_text("x" * 50) == ["x" * 50] and _split_text("") == [""]


def test_a_corpus_that_fails_fails_training(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match="byte 0 is 0xff"):
        BytePairTokenizer().train(TextFiles(paths=(str(tmp_path),)))


def test_a_full_cache_is_named(tokenizer, tmp_path):
    """The library would say "No space left on device (os error 28)" and no path, in an error that is not an OSError."""

    def build(folder):
        (folder / "tokenizer.json").symlink_to("/dev/full")
        tokenizer.save(folder)

    with pytest.raises(
        DataError, match=rf"the cache {tmp_path} can't be written: .*No space left on device.*PANAX_CACHE"
    ):
        read_or_build(tmp_path, "entry", build=build, read=lambda folder: folder)
