"""A prompt and its answer are read back as written, whatever a tokenizer puts at the beginning of a text; ids are the file's."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from panax.core import DataError
from panax.data import Jsonl, PretrainedTokenizer, TextData

PAIRS = [("Q: is it an oak? A:", " yes"), ("Q: is it an oak? A: ", "yes"), ("[", "no]"), ("", "yes")]


def marking(kind):
    """As of Llama 2, or of T5: a space is put before each text."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    if kind == "llama":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        backend.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", "</s>"], show_progress=False)
    backend.train_from_iterator(["Q: is it an oak? A: yes no [no]" * 30], trainer)
    return backend


def byte_level():
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.train_from_iterator(
        ["the oak the ash Q: is it an oak? A: yes"],
        trainers.BpeTrainer(
            vocab_size=280,
            special_tokens=["</s>"],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return backend


@pytest.mark.parametrize("kind", ["llama", "t5", "bytes"])
def test_an_answer_begins_as_it_is_written(tmp_path, kind):
    backend = byte_level() if kind == "bytes" else marking(kind)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = PretrainedTokenizer(path=str(tmp_path / "tokenizer.json"))
    assert tokenizer.load().marks_beginnings == (kind != "bytes")
    (tmp_path / "qa.jsonl").write_text("".join(json.dumps({"q": q, "a": a}) + "\n" for q, a in PAIRS))
    opened = TextData(
        corpus=Jsonl(paths=(str(tmp_path / "qa.jsonl"),), prompt="q", answer="a"), tokenizer=tokenizer, sequence_length=64,
        batch_size=1, held_out=0, packing=False, cache_dir=str(tmp_path / "cache"),
    ).open()  # fmt: skip
    store = opened.training_documents.store
    for document, (prompt, answer) in enumerate(PAIRS):
        begin, end = store.offsets[document : document + 2].tolist()
        ids = store.tokens[begin : end - 1].tolist()
        assert backend.decode(ids, skip_special_tokens=False) == prompt + answer
        # Each token that has something of the answer is learnt; of a prompt that stands alone none is.
        assert store.loss_mask is not None
        learnt = [i for i, mask in zip(ids, store.loss_mask[begin : end - 1], strict=True) if mask]
        assert "".join(backend.decode(learnt).split()).endswith(answer.strip())


def test_a_long_text_is_one_text(tmp_path, monkeypatch):
    monkeypatch.setattr("panax.data.text.encoding._PIECE_CHARACTERS", 16)
    marking("llama").save(str(tmp_path / "tokenizer.json"))
    tokenizer = PretrainedTokenizer(path=str(tmp_path / "tokenizer.json"))
    text = "Q: is it an oak? A: yes " * 5 + "no"
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + "\n")
    opened = TextData(
        corpus=Jsonl(paths=(str(tmp_path / "a.jsonl"),)), tokenizer=tokenizer, held_out=0, sequence_length=8,
        cache_dir=str(tmp_path / "cache"),
    ).open()  # fmt: skip
    assert opened.tokenizer.decode(opened.training_documents.store.tokens[:-1]) == text


@pytest.mark.parametrize("offsets", [(0, 1), (2, 3), (1, 0)])
def test_added_tokens_have_the_ids_of_the_file_or_it_is_refused(tmp_path, offsets):
    path = tmp_path / "tokenizer.json"
    byte_level().save(str(path))
    content = json.loads(path.read_text())
    first = max(content["model"]["vocab"].values()) + 1
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    content["added_tokens"] += [
        {"id": first + offset, "content": f"<|{letter}|>", **flags}
        for letter, offset in zip("ab", offsets, strict=True)
    ]
    path.write_text(json.dumps(content))
    if offsets == (0, 1):
        assert PretrainedTokenizer(path=str(path)).load().encode("<|b|>") == [first + 1]
        return
    with pytest.raises(
        DataError, match=rf"added token '<\|a\|>' the id {first + offsets[0]}, but the tokenizers library"
    ):
        PretrainedTokenizer(path=str(path)).load()


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json", "x.tiktoken"])
def test_a_folder_with_a_tokenizer_in_another_form_explains_how_to_convert_it(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x0a\x00")
    with pytest.raises(DataError, match=rf"holds {name} .*convert it with transformers: AutoTokenizer"):
        PretrainedTokenizer(path=str(tmp_path)).load()
