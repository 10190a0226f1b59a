"""The requests of sft_json and grpo_json: values that are held out, right answers, and room for them."""

import itertools
import json

import pytest

from panax.models import DecoderTask
from panax.rollouts import json_answer
from panax_recipes import json_objects
from panax_recipes.grpo_json import grpo_json
from panax_recipes.sft_json import sft_json

FILES = ("answered.jsonl", "prompts.jsonl", "questions.jsonl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    yield json_objects.objects_folder()
    patch.undo()


@pytest.fixture(scope="module")
def records(folder):
    return {name: [json.loads(line) for line in (folder / name).read_text().splitlines()] for name in FILES}


def value_pairs(record):
    words = record["prompt"].replace(",", "").rstrip(":\n").split()
    values = [word for word in words if word not in json_objects.MEMBERS and word not in ("yes", "no")]
    return set(map(frozenset, itertools.combinations(values, 2)))


def test_no_two_values_of_a_question_stand_together_in_training(records):
    trained = set().union(*(value_pairs(record) for name in FILES[:2] for record in records[name]))
    pairs = [value_pairs(record) for record in records["questions.jsonl"]]
    assert all(pairs) and trained.isdisjoint(set().union(*pairs))
    answers = [record["answer"] for record in records["questions.jsonl"]]
    assert len(set(answers)) == len(answers) == json_objects.QUESTIONS


def test_right_answers_have_the_reward_and_a_third_of_those_for_training_are_right(records):
    assert all(json_answer(record["answer"], record) == 1.0 for record in records["questions.jsonl"])
    other = records["questions.jsonl"][1:] + records["questions.jsonl"][:1]
    assert not any(json_answer(one["answer"], record) for one, record in zip(other, records["questions.jsonl"]))
    answered = records["answered.jsonl"][:2000]
    right = sum(record["answer"] == answer_of(record["prompt"]) for record in answered) / len(answered)
    assert 0.30 < right < 0.38


def answer_of(prompt):
    """Return the right answer to a prompt, by another way than the recipe's."""
    values = {}
    for part in prompt.rstrip(":\n").split(", "):
        name, *words = part.split()
        kind = json_objects.MEMBERS[name]["type"]
        values[name] = {"array": words, "boolean": words == ["yes"]}.get(
            kind, int(words[0]) if kind == "integer" else words[0]
        )
    return json.dumps(dict(sorted(values.items())))


def test_prompts_and_answers_have_room_and_words_are_tokens(records, folder):
    tokenizer, data = json_objects.objects_tokenizer().load(), grpo_json().data
    asked = [record["prompt"] for name in FILES for record in records[name]]
    assert max(len(tokenizer.encode(prompt)) for prompt in asked) <= data.prompt_tokens
    answers = [record["answer"] for record in records["questions.jsonl"] + records["answered.jsonl"]]
    assert max(len(tokenizer.encode(answer)) for answer in answers) < data.tokens
    task = sft_json().task
    assert isinstance(task, DecoderTask) and data.length <= task.model.max_length
    values = (*json_objects.NAMES, *json_objects.TOWNS, *json_objects.WORDS, *map(str, json_objects.AGES))
    assert all(len(tokenizer.encode(value)) == 1 for value in (*values, *json_objects.MEMBERS, "true", "false"))
    assert len(tokenizer.encode(" Ada")) == 2
