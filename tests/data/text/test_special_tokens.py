"""Documents begin as `transformers` begins a text, and what lies beside a tokenizer is kept."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from panax.core import DataError, RecipeError
from panax.data import Document, PretrainedTokenizer, TextData

TEXTS = ["the cat sat on the mat", "naïve 猫 \n\n  def f(x):\n\treturn x", "<s> is text", "a"]
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "[CLS]", "[SEP]"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"


class Few:
    """A corpus of our own."""

    def __init__(self, *documents: Document) -> None:
        self.each = documents

    def documents(self):
        return iter(self.each)

    def fingerprint(self) -> str:
        return repr(self.each)


def llama3() -> tokenizers.Tokenizer:
    """Bytes, and a template in a sequence of post-processors."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    template = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B:1", special_tokens=[("<s>", 1)])
    return trained(made, processors.Sequence([processors.ByteLevel(trim_offsets=False), template]))


def llama2() -> tokenizers.Tokenizer:
    """Words that begin with a mark, bytes for unknown characters, a bare template."""
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(Regex(" "), "▁")])
    return trained(made, processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)]))


def bert() -> tokenizers.Tokenizer:
    """A token before and one after."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return trained(made, processors.BertProcessing(("[SEP]", 5), ("[CLS]", 4)))


def plain() -> tokenizers.Tokenizer:
    made = llama3()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    return made


def trained(made: tokenizers.Tokenizer, processor) -> tokenizers.Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(TEXTS * 3, trainer=trainer)
    made.post_processor = processor
    return made


def saved(folder: Path, made: tokenizers.Tokenizer, eos: str = "</s>", **config) -> Path:
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    raw = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(raw))
    return folder


def theirs(folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), split_special_tokens=True)


@pytest.mark.parametrize(
    ("make", "eos", "start"), [(llama3, "</s>", [1]), (llama2, "</s>", [1]), (bert, "[SEP]", [4]), (plain, "</s>", [])]
)
def test_documents_begin_as_transformers_begins_a_text(make, eos: str, start: list[int], tmp_path) -> None:
    folder = saved(tmp_path / "t", make(), eos)
    ours, reference = PretrainedTokenizer(path=str(folder)).load(), theirs(folder)
    assert list(ours.start_of_document) == start
    data = TextData(
        corpus=Few(*map(Document, TEXTS)),
        tokenizer=PretrainedTokenizer(path=str(folder)),
        held_out=0,
        packing=False,
        cache_dir=str(tmp_path),
    )
    opened = data.open()
    store = opened.training_documents.store
    for text, low, high in zip(TEXTS, store.offsets[:-1], store.offsets[1:], strict=True):
        ids = reference(text).input_ids
        ids = ids if ids[-1] == ours.end_of_document else [*ids, ours.end_of_document]
        assert store.tokens[low:high].tolist() == ids
        assert [*ours.start_of_document, *ours.encode(text), ours.end_of_document] == ids
    assert store.loss_mask is None
    assert bool(opened.notes) == bool(start) and all("add_bos=False" in note for note in opened.notes)


def test_left_out_as_asked_and_cached_apart(tmp_path) -> None:
    folder = saved(tmp_path / "t", llama3(), add_bos_token=True)
    on, off = (PretrainedTokenizer(path=str(folder), add_bos=add) for add in (True, False))
    assert off.load().start_of_document == () and on.load().fingerprint != off.load().fingerprint
    few = Few(Document("the cat"), Document("sat on", prompt="the mat"))
    first, second = (
        TextData(corpus=few, tokenizer=each, held_out=0, cache_dir=str(tmp_path)).open() for each in (on, off)
    )
    assert first.num_tokens == second.num_tokens + 2
    assert first.training_documents.fingerprint != second.training_documents.fingerprint
    assert first.notes and not second.notes
    # Of a prompt and its answer, the answer and the end are learnt.
    store = first.training_documents.store
    learnt = store.tokens[store.offsets[1] :][store.loss_mask[store.offsets[1] :] == 1]
    assert learnt.tolist() == [*on.load().encode("sat on"), on.load().end_of_document]
    # Saved, it stays left out, there too.
    off.load().save(tmp_path / "saved")
    again = PretrainedTokenizer(path=str(tmp_path / "saved")).load()
    assert again.fingerprint == off.load().fingerprint and again.start_of_document == ()
    assert theirs(tmp_path / "saved")("the cat").input_ids == again.encode("the cat")


def test_what_cannot_be_left_out_is_reported(tmp_path) -> None:
    folder = saved(tmp_path / "t", bert(), "[SEP]")
    with pytest.raises(RecipeError, match=r"add_bos=False: .*tokenizer\.json .* a BertProcessing"):
        PretrainedTokenizer(path=str(folder), add_bos=False).load()
    plainly = saved(tmp_path / "p", plain())
    assert PretrainedTokenizer(path=str(plainly), add_bos=False).load().start_of_document == ()


def test_rows_of_packed_documents_hold_each_start_once(tmp_path) -> None:
    folder = saved(tmp_path / "t", llama3())
    data = TextData(
        corpus=Few(*[Document(f"{text} {n}") for n in range(8) for text in TEXTS]),
        tokenizer=PretrainedTokenizer(path=str(folder)),
        held_out=0,
        sequence_length=16,
        batch_size=4,
        cache_dir=str(tmp_path),
    )
    opened = data.open()
    batch = next(opened.train.batches()).batch
    begins = (batch["position"] == 0) & (batch["segment"] > 0) & (np.arange(16) > 0)
    assert begins.any() and (batch["tokens"][begins] == 1).all()


@pytest.mark.parametrize("in_config", [True, False])
def test_what_lies_beside_is_kept_and_consistent(in_config: bool, tmp_path) -> None:
    config = {"chat_template": TEMPLATE} if in_config else {}
    folder = saved(tmp_path / "t", llama3(), bos_token="<s>", model_max_length=77, name_or_path="/home/me", **config)
    (folder / "special_tokens_map.json").write_text(json.dumps({"pad_token": {"content": "<pad>"}, "eos_token": "x"}))
    (folder / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "top_p": 0.9, "eos_token_id": [2, 5], "bos_token_id": 77, "pad_token_id": 99})
    )
    if not in_config:
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    ours = PretrainedTokenizer(path=str(folder)).load()
    assert ours.special_ids == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    ours.save(tmp_path / "once")
    PretrainedTokenizer(path=str(tmp_path / "once")).load().save(tmp_path / "twice")
    for name in ("once", "twice"):
        reference, again = theirs(folder), theirs(tmp_path / name)
        assert again.chat_template == reference.chat_template == TEMPLATE
        assert {f"{r}_token_id": getattr(again, f"{r}_token_id") for r in ("bos", "eos", "pad")} == ours.special_ids
        messages = [{"role": "user", "content": "the cat"}]
        assert again.apply_chat_template(messages, tokenize=False) == "<s>user: the cat</s>"
        assert [again(text).input_ids for text in TEXTS] == [reference(text).input_ids for text in TEXTS]
        assert again.model_max_length == 77
        from transformers import GenerationConfig

        generation = GenerationConfig.from_pretrained(str(tmp_path / name))
        assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, [2, 5], 3)
        assert generation.do_sample and generation.top_p == 0.9
        assert "/home/me" not in (tmp_path / name / "tokenizer_config.json").read_text()
    # Another end than the one in the files is the end in all of them.
    PretrainedTokenizer(path=str(folder), end_of_document="<pad>").load().save(tmp_path / "other")
    assert theirs(tmp_path / "other").eos_token_id == 3
    assert json.loads((tmp_path / "other" / "generation_config.json").read_text())["eos_token_id"] == 3


def test_a_models_folder_may_state_how_it_generates(tmp_path) -> None:
    ours = PretrainedTokenizer(path=str(saved(tmp_path / "t", llama3()))).load()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"top_k": 7, "eos_token_id": 50}))
    ours.add_generation_config(tmp_path / "model").save(tmp_path / "out")
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"top_k": 7, "eos_token_id": 2, "bos_token_id": 1}
    ours.add_generation_config(tmp_path / "t").save(tmp_path / "none")
    assert not (tmp_path / "none" / "generation_config.json").exists()


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "generation_config.json"])
def test_a_broken_file_beside_is_named(name: str, tmp_path) -> None:
    folder = saved(tmp_path / "t", plain())
    for text in ("[", "[]", "[" * 100_000):
        (folder / name).write_text(text)
        with pytest.raises(DataError, match=f"{name} is broken"):
            PretrainedTokenizer(path=str(folder)).load()
