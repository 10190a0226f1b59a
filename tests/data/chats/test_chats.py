"""Conversations from files: layouts, mistakes, tokens, packing, and a run."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from chats.conftest import MARKED

from panax.core.errors import DataError, RecipeError
from panax.data import (
    BadRecord,
    BytePairTokenizer,
    Chats,
    ConcatCorpus,
    FilteredCorpus,
    Jsonl,
    PretrainedTokenizer,
    TextData,
    make_corpus,
)
from panax.data.chats.conversation import Conversation

HELLO = {"role": "user", "content": "Hello"}
HI = {"role": "assistant", "content": "Hi"}
PAIR = ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"})
CALL = {"name": "add", "arguments": {"a": 1}}


def write(path: Path, *records) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return str(path)


def read(tmp_path, *records, **settings):
    return list(Chats(paths=(write(tmp_path / "chats.jsonl", *records),), **settings).documents())


def shown(document) -> list[tuple]:
    assert isinstance(document, Conversation), document
    return [(message["role"], message["content"]) for message in document.messages]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [HELLO, HI]},
        {"conversations": [HELLO, HI]},
        {"messages": json.dumps([HELLO, HI])},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
                HI,
            ]
        },
        {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]},
        {"prompt": "Hello", "completion": "Hi"},
        {"prompt": [HELLO], "completion": [HI]},
        {"instruction": "Hello", "input": "", "output": "Hi"},
        {"instruction": "Hello", "output": "Hi", "messages": None},
    ],
)
def test_layouts_are_recognized(tmp_path, record):
    (document,) = read(tmp_path, record)
    assert shown(document) == [("user", "Hello"), ("assistant", "Hi")]
    assert document.trained == (False, True)
    assert document.text == "Hello\nHi"


def test_more_of_each_layout(tmp_path):
    records = [
        {"system": "Be brief.", "conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]},
        {"instruction": "Add", "input": "1 2", "output": "3", "system": "Be brief.", "history": [["Hello", "Hi"]]},
        {"prompt": [HELLO, HI, HELLO], "completion": [HI]},
        {"conversations": [{"from": "human", "value": "1+1"}, {"from": "function_call", "value": json.dumps(CALL)},
                           {"from": "observation", "value": "2"}, {"from": "gpt", "value": "two"}], "tools": json.dumps([CALL])},
        {"messages": [HELLO, {"role": "assistant", "content": None, "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]}],
         "chat_template_kwargs": {"think": False}},
    ]  # fmt: skip
    sharegpt, alpaca, completion, calling, openai = read(tmp_path, *records)
    assert shown(sharegpt)[0] == ("system", "Be brief.")
    assert shown(alpaca) == [
        ("system", "Be brief."),
        ("user", "Hello"),
        ("assistant", "Hi"),
        ("user", "Add\n1 2"),
        ("assistant", "3"),
    ]
    assert completion.trained == (False, False, False, True)
    assert [message["role"] for message in calling.messages] == ["user", "assistant", "tool", "assistant"]
    assert calling.messages[1]["tool_calls"] == [{"type": "function", "function": CALL}]
    assert calling.tools == (CALL,)
    # Arguments in a string would be quoted twice by a template that writes JSON.
    assert openai.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert openai.messages[1]["content"] == ""
    assert openai.options == {"think": False}


@pytest.mark.parametrize(
    "record, message",
    [
        ({"text": "a"}, "it holds no conversation: its fields are 'text'; expected messages, conversations,"),
        ({"messages": []}, "the messages are an empty list; expected a list of objects"),
        ({"messages": "no"}, "field 'messages' is a text that is not JSON"),
        ({"messages": [HELLO, "Hi"]}, "message 1 is a text; expected an object with a role"),
        ({"messages": [{"content": "Hi"}]}, "message 0 is an object with 'content'; expected an object with a role"),
        ({"messages": [{"role": "user", "content": 3}]}, "the content of message 0 is a number; expected a string"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "holds 'image_url'; only text is trained on",
        ),
        ({"messages": [{**HI, "weight": 2}]}, "message 0 has weight 2; expected 0 or 1"),
        ({"messages": [HELLO, {**HI, "tool_calls": "x"}]}, "tool_calls of message 1 is a text; expected a list"),
        ({"messages": [HELLO, HI], "tools": "{"}, "tools is a text that is not JSON"),
        ({"messages": [HELLO, HI], "tools": 3}, "tools is a number; expected a list"),
        (
            {"messages": [HELLO, HI], "chat_template_kwargs": []},
            "chat_template_kwargs is an empty list; expected an object",
        ),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "holds .ud800, half of a character"),
        ({"messages": [{"role": "user", "content": "\ufdd0"}]}, "which are not characters"),
        ({"conversations": [{"from": "alien", "value": "Hi"}]}, "message 0 is from 'alien'; expected from human,"),
        ({"instruction": "a", "output": "b", "history": [1]}, "history holds 1; expected pairs"),
    ],
)
def test_mistakes_in_records(tmp_path, record, message):
    import re

    (bad,) = read(tmp_path, record)
    assert isinstance(bad, BadRecord)
    assert bad.where.endswith("chats.jsonl, line 1")
    assert re.search(message, bad.reason), bad.reason


def test_another_field(tmp_path):
    (document,) = read(tmp_path, {"dialog": [HELLO, HI]}, field="dialog")
    assert shown(document) == [("user", "Hello"), ("assistant", "Hi")]
    (bad,) = read(tmp_path, {"messages": [HELLO, HI]}, field="dialog")
    assert "no field 'dialog'; it has 'messages'" in bad.reason


def test_a_field_that_stands_twice(tmp_path):
    (tmp_path / "chats.jsonl").write_text('{"messages": [], "messages": []}\n')
    (bad,) = Chats(paths=(str(tmp_path / "chats.jsonl"),)).documents()
    assert "field 'messages' stands twice" in bad.reason


def test_parquet(tmp_path):
    """Structs have the fields of all rows; those of others are null and removed."""
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [
        {"messages": [HELLO, {**HI, "name": "Ada"}], "tools": None},
        {"messages": [HELLO, HI], "tools": json.dumps([CALL])},
        {"messages": None, "tools": None},
    ]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "chats.parquet")
    first, second, third = Chats(paths=(str(tmp_path),)).documents()
    assert first.messages[1] == {"role": "assistant", "name": "Ada", "content": "Hi"}
    assert second.messages[1] == HI
    assert second.tools == (CALL,)
    assert isinstance(third, BadRecord)
    parquet.write_table(arrow.table({"text": ["a"]}), tmp_path / "chats.parquet")
    with pytest.raises(DataError, match=r"has the columns 'text'; expected one of messages, conversations"):
        list(Chats(paths=(str(tmp_path),)).documents())


def test_a_row_that_is_too_large(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [{"messages": [HELLO, HI]}, {"messages": [HELLO, {**HI, "content": "x" * 5000}]}]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "chats.parquet")
    good, bad = Chats(paths=(str(tmp_path),), max_record_bytes=4000).documents()
    assert shown(good) == [("user", "Hello"), ("assistant", "Hi")]
    assert isinstance(bad, BadRecord) and "max_record_bytes=4000" in bad.reason


def data(tmp_path, tokenizer_folder, *records, **settings) -> TextData:
    corpus = Chats(paths=(write(tmp_path / "chats.jsonl", *records),), **settings.pop("corpus", {}))
    return TextData(
        corpus=corpus,
        tokenizer=PretrainedTokenizer(path=str(tokenizer_folder)),
        sequence_length=64,
        batch_size=2,
        held_out=0,
        cache_dir=str(tmp_path / "cache"),
        **settings,
    )


def conversations(count: int) -> list[dict]:
    return [
        {"messages": [{"role": "user", "content": f"the {n}"}, {"role": "assistant", "content": f"fox {n}"}]}
        for n in range(count)
    ]


def test_packed_conversations_are_segments_of_their_own(tmp_path, tokenizer_folder):
    opened = data(tmp_path, tokenizer_folder, *conversations(40)).open()
    assert opened.tokenizer is not None
    batch, _ = next(opened.train.batches())
    start = opened.tokenizer.encode_rendered(["<|im_start|>"])[0].ids[0]
    segments = set()
    for row in range(2):
        for segment in set(batch["segment"][row].tolist()) - {0}:
            places = np.flatnonzero(batch["segment"][row] == segment)
            segments.add((row, segment))
            assert (batch["position"][row][places] == np.arange(len(places))).all()
            if places[0]:  # a row may begin with the end of a conversation
                assert batch["tokens"][row][places[0]] == start
            # Nothing is predicted across the end of a conversation.
            if places[-1] + 1 < 64:
                assert batch["loss_mask"][row][places[-1]] == 0
    assert len(segments) > 4
    learnt = batch["targets"][batch["loss_mask"] != 0]
    assert "user" not in opened.tokenizer.decode(learnt)
    assert (learnt == opened.tokenizer.end_ids[1]).sum() > 4
    assert opened.train.rows.tokenizers


def test_the_cache_follows_template_and_date(tmp_path, tokenizer_folder):
    def first(**settings) -> np.ndarray:
        return next(data(tmp_path, tokenizer_folder, *conversations(20), corpus=settings).open().train.batches())[0][
            "tokens"
        ]

    plain = first()
    (tmp_path / "t.jinja").write_text(MARKED.replace("bos_token", "strftime_now('%Y')"))
    other = first(template=str(tmp_path / "t.jinja"), date="2025-01-01")
    later = first(template=str(tmp_path / "t.jinja"), date="2026-01-01")
    assert (first() == plain).all()
    assert (other != plain).any()
    assert (later != other).any()


def test_notes_on_special_tokens(tmp_path, tokenizer_folder):
    records = [{"messages": [HELLO, {**HI, "content": "<|im_start|>assistant"}]}, *conversations(3)]
    opened = data(tmp_path, tokenizer_folder, *records).open()
    assert any("the messages of 1 of 4 conversations spell special tokens" in line for line in opened.account)
    texts = write(tmp_path / "texts.jsonl", {"text": "<|im_start|>user\nHello<|im_end|>"}, {"text": "plain"})
    plain = TextData(
        corpus=Jsonl(paths=(texts,)),
        tokenizer=PretrainedTokenizer(path=str(tokenizer_folder)),
        held_out=0,
        cache_dir=str(tmp_path / "cache"),
    ).open()
    assert any("1 of 2 documents spell special tokens of the tokenizer" in line for line in plain.account)


def test_filters_read_the_messages(tmp_path):
    chats = Chats(paths=(write(tmp_path / "chats.jsonl", *conversations(12)),))
    kept = list(FilteredCorpus(corpus=chats, keep=r"fox 1\b").documents())
    assert [shown(each)[1][1] for each in kept] == ["fox 1"]


@pytest.mark.parametrize(
    "make, error, message",
    [
        (
            lambda paths: Chats(paths=paths, date="28 November"),
            RecipeError,
            "date='28 November'; expected a day as YYYY-MM-DD",
        ),
        (lambda paths: Chats(paths=paths, max_record_bytes=0), RecipeError, "max_record_bytes"),
        (
            lambda paths: ConcatCorpus(corpora=(Chats(paths=paths),)),
            RecipeError,
            "not plain texts; name all of its files in one",
        ),
        (
            lambda paths: TextData(corpus=Chats(paths=paths), tokenizer=BytePairTokenizer()).open(),
            RecipeError,
            "chat template",
        ),
    ],
)
def test_settings(tmp_path, make, error, message):
    with pytest.raises(error, match=message):
        make((write(tmp_path / "chats.jsonl", *conversations(2)),))


def test_a_tokenizer_without_a_template(tmp_path, tokenizer_folder):
    (tmp_path / "tokenizer.json").write_text((tokenizer_folder / "tokenizer.json").read_text())
    with pytest.raises(DataError, match=r"need a chat template, and the tokenizer has none; name a file with one in"):
        data(tmp_path, tmp_path, *conversations(2)).open()


def test_paths_find_conversations(tmp_path):
    chats = write(tmp_path / "chats.jsonl", *conversations(2))
    assert make_corpus(chats) == Chats(paths=(chats,))
    alpaca = write(tmp_path / "alpaca.jsonl", {"instruction": "a", "input": "", "output": "b"})
    assert make_corpus(alpaca) == Chats(paths=(alpaca,))
    quoted = write(tmp_path / "texts.jsonl", {"text": json.dumps({"messages": [HELLO]})})
    assert make_corpus(quoted) == Jsonl(paths=(quoted,))
    assert make_corpus(alpaca, prompt="instruction", answer="output") == Jsonl(
        paths=(alpaca,), prompt="instruction", answer="output"
    )
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(arrow.Table.from_pylist(conversations(2)), tmp_path / "chats.parquet")
    assert make_corpus(tmp_path / "chats.parquet") == Chats(paths=(str(tmp_path / "chats.parquet"),))


def test_a_run_trains_answers_and_evaluates(tmp_path, tokenizer_folder):
    """The run's tokenizer and template read other conversations, and its checkpoint stops at the end of an answer."""
    import panax
    from panax import Experiment
    from panax.mesh import MeshShape
    from panax.models import DecoderConfig, DecoderTask
    from panax.run.folder.trained_model import load_model

    experiment = Experiment(
        name="chats",
        task=DecoderTask(model=DecoderConfig(max_length=64, embed=16, num_layers=1, heads=2, ffn=32)),
        data=data(tmp_path, tokenizer_folder, *conversations(40)),
        num_steps=2,
        mesh=MeshShape(fsdp=1),
        directory=str(tmp_path / "run"),
    )
    panax.fit(experiment, quiet=True)
    trained = load_model(str(tmp_path / "run"), print)
    end = trained.tokenizer.encode_rendered(["<|im_end|>"])[0].ids[0]
    assert trained.tokenizer.end_ids == (trained.tokenizer.end_of_document, end)
    assert isinstance(trained.generate("the 1", tokens=3, chat=True), str)
    others = write(tmp_path / "others.jsonl", *conversations(7))
    measured = trained.evaluate(others)
    # Each answer is "fox N" and its end: three tokens and more, and nothing else.
    texts = [f"fox {n}<|im_end|>" for n in range(7)]
    assert measured["tokens"] == sum(len(each.ids) for each in trained.tokenizer.encode_rendered(texts))


@pytest.mark.full
def test_after_fifty_conversations_answers_end(tmp_path, tokenizer_folder):
    """Greedy answers to questions that were not among them stop at the end of an answer, and not at the limit."""
    import panax
    from panax import Experiment
    from panax.mesh import MeshShape
    from panax.models import DecoderConfig, DecoderTask
    from panax.optim import AdamW, Schedule
    from panax.run.folder.trained_model import load_model

    experiment = Experiment(
        name="chats",
        task=DecoderTask(model=DecoderConfig(max_length=64, embed=32, num_layers=2, heads=2, ffn=64)),
        data=dataclasses.replace(data(tmp_path, tokenizer_folder, *conversations(50)), batch_size=8),
        optimizer=AdamW(schedule=Schedule(peak=1e-2, decay="constant")),
        num_steps=80,
        mesh=MeshShape(fsdp=1),
        directory=str(tmp_path / "run"),
    )
    panax.fit(experiment, quiet=True)
    trained = load_model(str(tmp_path / "run"), print)
    limit = 40
    for question in ("the 51", "the 60", "the 73", "the 99"):
        answer = trained.generate(question, tokens=limit, temperature=0.0, chat=True)
        length = len(trained.tokenizer.encode_rendered([answer])[0].ids)
        assert "fox" in answer and length < limit // 2, answer
