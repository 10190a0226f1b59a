"""The reward functions that come with Panax: right and wrong answers, and records that they refuse."""

import sys
from fractions import Fraction

import pytest

from panax.core import RecipeError
from panax.rollouts import Reward, RewardPool, Verdict, matches, number_equals, text_equals
from panax.rollouts.rewards.json_answer import json_answer
from panax.rollouts.rewards.stock import find_last_number

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ADA = {"schema": PERSON, "values": {"name": "Ada", "age": 36}}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7", 7), ("3+4=7", 7), ("x=-7.50", Fraction(-15, 2)), ("it is 12.", 12), ("$1,234,567.5!", Fraction(2469135, 2)),
        ("1,23", 23), ("1,2345", 2345), ("12,345,67", 67), ("\u22125", -5), ("5-3", 3), ("5 - 3", 3), ("a-3", 3),
        ("(-3)", -3), ("7km", 7), ("1e3", 1000), ("2.5E-1", Fraction(1, 4)), ("6/8", Fraction(3, 4)), ("6 / 8", 8),
        ("1/0", None), ("", None), ("none", None), ("CO2", None), ("x_1", None), (".5", Fraction(1, 2)),
        ("1.2.3", Fraction(6, 5)), ("1" * 1001, None), ("1e401", None), ("1e" + "9" * 50, None), ("007", 7), ("\u0663", None),
        ("**12**", 12), ("\\boxed{12}", 12), ("no. 4\nthen 5\n", 5), ("1/3/2", 2),
    ],
)  # fmt: skip
def test_the_last_number_of_a_text(text, number):
    assert find_last_number(text) == number


@pytest.mark.parametrize(
    ("function", "answer", "record", "reward"),
    [
        (number_equals, "3 + 4 = 7", {"answer": 7}, 1),
        (number_equals, "3 + 4 = 7", {"answer": "7"}, 1),
        (number_equals, "0.1 + 0.2 = 0.3", {"answer": 0.3}, 1),
        (number_equals, "0.30000000000000004", {"answer": 0.3}, 0),
        (number_equals, "7 or 8", {"answer": 7}, 0),
        (number_equals, "seven", {"answer": 7}, 0),
        (number_equals, "", {"answer": 7}, 0),
        (number_equals, "-7", {"answer": 7}, 0),
        (number_equals, "1250", {"answer": "steps, then #### 1,250"}, 1),
        (text_equals, " a\n b ", {"answer": "a b"}, 1),
        (text_equals, "e\u0301", {"answer": "\u00e9"}, 1),
        (text_equals, "A", {"answer": "a"}, 0),
        (text_equals, "a", {"answer": "a b"}, 0),
        (text_equals, "", {"answer": ""}, 1),
        (matches, "x <b>1</b>", {"pattern": r"<b>\d</b>$"}, 1),
        (matches, "x <b>1</b> y", {"pattern": r"<b>\d</b>$"}, 0),
        (matches, "", {"pattern": "a"}, 0),
        (json_answer, '{"name": "Ada", "age": 36}', ADA, 1),
        (json_answer, ' {"age": 36.0, "name": "Ada", "tags": []}\n', ADA, 1),
        (json_answer, '{"name": "Ada", "age": 35}', ADA, 0),
        (json_answer, '{"name": "Ada"}', ADA, 0),
        (json_answer, '{"name": "Ada", "age": 36, "x": 1}', ADA, 0),
        (json_answer, '{"name": "Ada", "age": true}', {**ADA, "values": {"age": 1}}, 0),
        (json_answer, "It is {}", ADA, 0),
        (json_answer, '```json\n{"name": "Ada", "age": 36}\n```', ADA, 0),
        (json_answer, '{"name": "Ada", "age": 36', ADA, 0),
        (json_answer, '{"name": "Ada", "age": NaN}', ADA, 0),
        (json_answer, "[" * 5000, ADA, 0),
        (json_answer, '"' + "a" * (1 << 21) + '"', {"schema": {}, "values": {}}, 0),
        (json_answer, "3", {"schema": {"type": "integer"}, "values": {}}, 1),
        (json_answer, "3", {"schema": {"type": "integer"}, "values": {"a": 3}}, 0),
        (json_answer, '{"a": [1, {"b": true}]}', {"schema": True, "values": {"a": [1, {"b": True}]}}, 1),
        (json_answer, '{"a": [1, {"b": 1}]}', {"schema": True, "values": {"a": [1, {"b": True}]}}, 0),
        (json_answer, '{"a": [1]}', {"schema": True, "values": {"a": [1, 2]}}, 0),
        (json_answer, '{"a": null}', {"schema": True, "values": {"a": None}}, 1),
        (json_answer, "{}", {"schema": True, "values": {"a": None}}, 0),
        (
            json_answer,
            '{"a": 1}',
            {"schema": {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}}, "values": {"a": 1}},
            1,
        ),
    ],
)
def test_rewards(function, answer, record, reward):
    assert function(answer, record) == reward


@pytest.mark.parametrize(
    ("function", "record", "message"),
    [
        (
            number_equals,
            {"prompt": "p", "reply": 3},
            "no field 'answer', which this reward reads; its fields: prompt, reply",
        ),
        (number_equals, {"answer": "seven"}, "expected a number, or a text with one"),
        (number_equals, {"answer": True}, "the record's answer is True; expected a number"),
        (number_equals, {"answer": None}, "the record's answer is None; expected a number"),
        (text_equals, {"answer": 3}, "the record's answer is 3; expected a text"),
        (matches, {}, "no field 'pattern'"),
        (matches, {"pattern": "("}, "is not a regular expression: missing"),
        (matches, {"pattern": 3}, "expected a text"),
        (json_answer, {"schema": {}}, "no field 'values'"),
        (json_answer, {"schema": {}, "values": ["a"]}, "expected an object with the members"),
        (json_answer, {"schema": {"type": "person"}, "values": {}}, "schema is invalid: 'person' is not valid"),
        (json_answer, {"schema": 3, "values": {}}, "schema is invalid"),
        (json_answer, {"schema": {"$ref": "http://localhost:1/a"}, "values": {}}, "refers to 'http://localhost:1/a'"),
    ],
)
def test_records_that_are_refused(function, record, message):
    with pytest.raises(ValueError, match=message):
        function("{}", record)


def test_they_run_in_processes_and_an_expression_without_end_fails_alone():
    rewards = [
        Reward(function=matches, seconds=0.5),
        Reward(function=number_equals),
        Reward(function=json_answer),
        Reward(function="panax.rollouts:text_equals", weight=0.5),
    ]
    assert rewards[0].function == "panax.rollouts.rewards.stock:matches"
    record = {"pattern": "(a+)+$", "answer": "a", "schema": {}, "values": {}}
    with RewardPool(rewards, 1) as pool:
        first, *rest = pool.score([("a" * 40 + "!", record)])[0]
        assert "gave no result within 0.5 seconds" in first.error
        assert [bool(verdict.error) for verdict in rest] == [True, False, False]
        assert pool.score([("a", {**record, "answer": "a1"})])[0][0] == Verdict(1.0)


def test_a_missing_library_is_an_error_with_its_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    monkeypatch.delitem(sys.modules, "panax.rollouts.rewards.json_answer")
    with pytest.raises(RecipeError, match=r"the reward json_answer needs jsonschema, .* run: .*rl"):
        import panax.rollouts.rewards.json_answer  # noqa: F401


def test_an_error_of_panax_at_import_is_shown_without_a_traceback(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from panax.core.errors import RecipeError\nraise RecipeError('install it')\n")
    with pytest.raises(RecipeError, match=r"can't be started: .*mine\.py:rate can't be imported: install it$"):
        RewardPool([Reward(function=f"{file}:rate")], 1)
