"""Rows of answers, the journal, prompts, and the orders of updates."""

import dataclasses
import json

import numpy as np
import pytest

from panax.core.errors import DataError, RecipeError
from panax.data import PretrainedTokenizer, split_by_hash
from panax.generate.requests import Completion, GeneratedToken
from panax.rollouts import PromptFiles, Reward, RolloutData
from panax.rollouts.answers import SampledAnswer
from panax.rollouts.collector import draw_seeds
from panax.rollouts.journal import JOURNAL_FILE, Journal, JournalEntry
from panax.rollouts.rows import make_rows, split_updates


def answer(prompt, actions, group=0):
    return SampledAnswer(prompt, group, actions, tuple(-0.5 * (i + 1) for i in range(len(actions))), "", False)


def test_an_answer_is_the_targets_after_its_prompt():
    rows = make_rows(
        [answer((5, 6, 7), (8, 9)), answer((4,), (1,)), answer((4, 4), (2, 3))],
        np.array([2.0, -1.0, 3.0], np.float32),
        np.array([True, True, False]),
        8,
    )
    assert rows["tokens"][0].tolist() == [5, 6, 7, 8, 0, 0, 0, 0] and rows["targets"][0].tolist() == [
        6,
        7,
        8,
        9,
        0,
        0,
        0,
        0,
    ]
    assert rows["loss_mask"].tolist() == [[0, 0, 1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0], [0] * 8]
    assert rows["segment"].sum(1).tolist() == [4, 1, 3] and rows["position"][0].tolist() == [0, 1, 2, 3, 0, 0, 0, 0]
    assert rows["advantage"][0].tolist() == [0, 0, 2, 2, 0, 0, 0, 0] and rows["advantage"][1, 0] == -1
    assert rows["behavior_log_probability"][0, 2:4].tolist() == [-0.5, -1.0]
    # An answer that is left out has no action.
    assert not rows["advantage"][2].any() and not rows["behavior_log_probability"][2].any()


def test_the_experts_of_an_answer_are_those_of_its_positions():
    answers = [
        dataclasses.replace(answer((5, 6, 7), (8, 9)), experts=np.arange(16, dtype=np.int32).reshape(4, 2, 2)),
        dataclasses.replace(answer((4,), (1,)), experts=np.full((1, 2, 2), 3, np.int32)),
    ]
    rows = make_rows(answers, np.ones(2, np.float32), np.array([True, False]), 8)
    assert rows["experts"].shape == (2, 8, 2, 2) and rows["experts"].dtype == np.int32
    assert rows["experts"][0, :4].reshape(-1).tolist() == list(range(16))
    assert (rows["experts"][1, 0] == 3).all()
    assert (rows["experts"][0, 4:] == -1).all() and (rows["experts"][1, 1:] == -1).all()


def test_the_token_that_ends_an_answer_is_an_action_and_a_cut_one_has_none():
    drawn = tuple(GeneratedToken(token, -1.0, -2.0 - token) for token in (3, 4))
    end = GeneratedToken(0, -1.0, -2.0)
    ended = SampledAnswer.from_completion((7,), 2, Completion(9, 0, drawn, "cd", "end", end=end))
    assert ended.actions == (3, 4, 0) and ended.log_probabilities == (-5.0, -6.0, -2.0) and not ended.is_truncated
    cut = SampledAnswer.from_completion((7,), 2, Completion(9, 0, drawn, "cd", "length"))
    assert cut.actions == (3, 4) and cut.is_truncated and cut.group == 2


def test_a_digest_tells_where_the_prompt_ends():
    assert answer((1, 2), (3,)).digest != answer((1,), (2, 3)).digest
    assert answer((1, 2), (3,)).digest == answer((1, 2), (3,), group=1).digest


ENTRY = JournalEntry(3, 2, (5, 5), ("a", "b"), ("right", "brief"), ((1.0, None), (0.5, 0.25)), {0: "it took too long"})


def test_what_the_journal_holds_comes_back(tmp_path):
    written = Journal(tmp_path)
    written.append([ENTRY])
    with open(tmp_path / JOURNAL_FILE, "a") as file:
        file.write('{"rollout": 4, "st')
    later = JournalEntry(4, 3, (1,), ("c",), ("right",), ((2.0,),))
    written.append([later])
    again = JournalEntry(3, 2, (5, 5), ("d", "e"), ("right", "brief"), ((0.0, 1.0), (1.0, 1.0)))
    written.append([again])
    read = Journal(tmp_path)
    read.read(after=2)
    # The newest counts; an incomplete line was removed.
    assert read.find(3) == again and read.find(4) == later and read.find(5) is None
    read.read(after=3)
    assert read.find(3) is None
    assert JournalEntry.from_json(ENTRY.to_json()) == ENTRY


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "{}",
        '{"rollout": 3}',
        ENTRY.to_json().replace('"digests": ["a", "b"]', '"digests": ["a"]'),
        ENTRY.to_json().replace("0.25", '"x"'),
        ENTRY.to_json().replace('"right", ', ""),
        ENTRY.to_json().replace("0.25", "true"),
        ENTRY.to_json().replace('"rewards": [[1.0, null]', '"rewards": [7'),
        ENTRY.to_json().replace("0.25", "NaN"),
    ],
)
def test_a_broken_journal_is_named(tmp_path, line):
    (tmp_path / JOURNAL_FILE).write_text(line + "\n")
    with pytest.raises(DataError, match=r"rollouts.jsonl, line 1: .*restore the file"):
        Journal(tmp_path).read(after=0)


def test_the_journal_is_not_written_through_a_link(tmp_path):
    (tmp_path / "elsewhere").write_text("mine\n")
    (tmp_path / JOURNAL_FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        Journal(tmp_path).append([ENTRY])
    assert (tmp_path / "elsewhere").read_text() == "mine\n"


def test_prompts_are_read_with_their_records(tmp_path):
    records = [{"prompt": "2+2=", "answer": 4}, {"prompt": [{"role": "user", "content": "hi"}], "answer": None}]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))
    prompts = PromptFiles(paths=(str(tmp_path),)).open(tmp_path, 0)
    assert list(prompts.records) == records and prompts.read(np.array([1, 0]))["prompt"].tolist() == [1, 0]
    # The order of lines, and other fields, make other prompts.
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records[::-1]))
    assert PromptFiles(paths=(str(tmp_path),)).open(tmp_path, 0).fingerprint != prompts.fingerprint
    many = [{"prompt": str(number)} for number in range(200)]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in many))
    training, held_out = split_by_hash(PromptFiles(paths=(str(tmp_path),)).open(tmp_path, 0), 0.25)
    both = [
        *training.read(np.arange(training.num_examples))["prompt"],
        *held_out.read(np.arange(held_out.num_examples))["prompt"],
    ]
    assert sorted(both) == list(range(200)) and 20 < held_out.num_examples < 80


@pytest.mark.parametrize(
    "line", ['{"text": "a"}', '{"prompt": ""}', '{"prompt": []}', '{"prompt": ["a"]}', '{"prompt": 3}', "{"]
)
def test_a_record_without_a_prompt_is_named(tmp_path, line):
    (tmp_path / "a.jsonl").write_text(f'{{"prompt": "a"}}\n{line}\n')
    with pytest.raises(DataError, match=r"a\.jsonl"):
        PromptFiles(paths=(str(tmp_path / "a.jsonl"),)).open(tmp_path, 0)
    assert PromptFiles(paths=(str(tmp_path / "a.jsonl"),)).open(tmp_path, 1).num_examples == 1


def test_seeds_are_functions_of_the_run_and_the_rollout():
    seeds = draw_seeds(3, 7, 4, 5)
    assert np.shape(seeds) == (4, 5) and len({each for row in seeds for each in row}) == 20
    assert draw_seeds(3, 7, 4, 5) == seeds and draw_seeds(4, 7, 4, 5) != seeds != draw_seeds(3, 8, 4, 5)
    # More prompts or samples of the same rollout are other draws for some, none for the first.
    assert draw_seeds(3, 7, 8, 5)[:4] == seeds


def test_each_epoch_has_all_answers_in_another_order():
    batch = {"x": np.arange(12), "y": np.arange(24).reshape(12, 2)}
    parts = list(split_updates(batch, epochs=2, minibatches=3, seeds=[1, 2]))
    assert [len(part["x"]) for part in parts] == [4] * 6
    epochs = [np.concatenate([part["x"] for part in parts[start : start + 3]]) for start in (0, 3)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs) and (epochs[0] != epochs[1]).any()
    assert all((part["y"][:, 0] == 2 * part["x"]).all() for part in parts)
    (whole,) = split_updates(batch, epochs=1, minibatches=1, seeds=[1, 2])
    assert whole["x"].tolist() == list(range(12))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rewards": ()}, "data.rewards is empty"),
        ({"rewards": (Reward(function="math:fsum"),) * 2}, "two rewards have the name 'fsum'"),
        ({"samples": 1}, "an advantage of 0"),
        ({"temperature": 0.0}, "data.temperature=0.0"),
        ({"overlong": 8, "tokens": 8}, "data.overlong=8"),
        ({"minibatches": 3}, "data.minibatches=3 does not divide the 256 answers"),
        ({"batch_size": 0}, "data.batch_size=0"),
        ({"held_out": 1.0}, "data.held_out=1.0"),
        ({"baseline": "none", "scale": "group"}, "scale"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    usual = {"rewards": (Reward(function="math:fsum"),), "tokenizer": PretrainedTokenizer(path="t")}
    with pytest.raises(RecipeError, match=message):
        RolloutData(**{"prompts": PromptFiles(paths=("a",)), **usual, **settings})
