"""Tools: their descriptions, the calls that a model writes, and the results that it gets."""

import json
from pathlib import Path

import pytest
import tool_functions
from scripted import CHAT, Scripted, open_rollouts
from test_episodes import draw
from tool_functions import add, fails, forget, look_up, many

from panax.core.errors import RecipeError
from panax.generate.tools import CallForm
from panax.rollouts import ToolEnvironment
from panax.rollouts.answers import describe_episodes
from panax.rollouts.calls.process import read_schemas
from panax.rollouts.calls.tool_schema import InvalidFunctionError, describe_tool
from panax.rollouts.environments.tool_environment import WrittenCall, read_calls

FILE = Path(tool_functions.__file__)


def call(name, /, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def opened(folder, *tools, limits=None, **settings):
    environment = ToolEnvironment(tools=tools, **{"tokens": 3000, "turns": 4, "seconds": 0.5} | (limits or {}))
    return open_rollouts(folder, environment, **{"tokens": 400} | settings)


def results(answer):
    return [message["content"] for message in answer.episode.messages if message["role"] == "tool"]


def test_the_model_gets_the_results_of_its_calls_and_ends_without_one(tmp_path):
    rollouts = opened(tmp_path, add, look_up, forget)
    # The prompt offers the tools.
    assert rollouts.tokenizer.decode(rollouts.encode(0)).startswith(
        "add: Add two numbers.; look_up: Return the record's number.; forget: Forget the state.; <|im_start|>user\nask"
    )
    turns = ["Wait. " + call("add", a=2) + "\n" + call("look_up", name="x"), call("look_up", name="y"), "It is 3."]
    first, second = draw(
        rollouts, Scripted(rollouts.tokenizer, turns, [call("look_up", name="x") + call("forget"), "I know."])
    )
    assert results(first) == [
        "3",
        '{"name": "x", "number": 0, "looked": 1}',
        # The state is the episode's, and no other's.
        '{"name": "y", "number": 0, "looked": 2}',
    ]
    assert first.text == "It is 3." and first.episode.state == {"looked": 2} and first.episode.turns == 3
    spoken = first.episode.messages[1]
    assert spoken["content"] == "Wait." and [each["function"]["name"] for each in spoken["tool_calls"]] == [
        "add",
        "look_up",
    ]
    ids = [each["id"] for each in spoken["tool_calls"]]
    assert [each["tool_call_id"] for each in first.episode.messages[2:4]] == ids
    assert "<|im_start|>tool\n3<|im_end|>\n<|im_start|>tool\n{" in rollouts.tokenizer.decode(first.tokens)
    # What was drawn stays as it was, calls too.
    assert rollouts.tokenizer.decode(first.actions) == "".join(f"{turn}<|im_end|>" for turn in turns)
    assert second.text == "I know." and second.episode.turns == 2 and second.episode.state == {}
    figures = describe_episodes([first.episode, second.episode])
    assert figures == {"turns/mean": 2.5, "turns/at_limit": 0.0, "calls": 2.5, "failed_calls": 0.0}
    assert "assistant: Wait. [calls add with {'a': 2}] [calls look_up with {'name': 'x'}]" in first.episode.describe()


def test_a_call_that_fails_is_answered_with_an_error(tmp_path):
    rollouts = opened(tmp_path, add, fails, limits={"turns": 12, "calls": 2})
    scripts = {
        call("sub", a=1): "Error: unknown tool 'sub'; expected add, fails",
        call("add", b=1): "Error: add raised TypeError: the argument 'a' is missing",
        call("add", a=1, c=1): "Error: add raised TypeError: unknown argument 'c'; expected a, b",
        call("add", a="1"): "Error: add raised TypeError: the argument 'a' is '1'; expected integer",
        call("add", a=True): "Error: add raised TypeError: the argument 'a' is True; expected integer",
        call("fails", kind="raises"): "Error: fails raised ValueError: it is not so (tool_functions.py, line",
        call("fails", kind="hangs"): "Error: fails gave no result within 0.5 seconds",
        call("fails", kind="object"): "Error: fails returned a value that is not JSON",
        call(
            "fails", kind="other"
        ): "Error: fails raised TypeError: the argument 'kind' is 'other'; expected ['raises',",
        "<tool_call>{not JSON": "Error: the call is not a JSON object: ",
        '<tool_call>{"name": "add"}</tool_call>': "Error: the call has another form than ",
    }
    answer, several = draw(
        rollouts,
        Scripted(rollouts.tokenizer, [*scripts, "done"], [call("add", a=1) + call("sub") + call("add", a=5), "done"]),
    )
    found = results(answer)
    assert len(found) == len(scripts)
    for text, expected in zip(found, scripts.values(), strict=True):
        assert text.startswith(expected), text
    assert answer.episode.failed_calls == answer.episode.calls == len(scripts)
    assert answer.episode.turns == len(scripts) + 1 and not answer.episode.error
    # A call that can't be read stays text.
    assert "tool_calls" not in answer.episode.messages[-5] and "{not JSON" in answer.episode.messages[-5]["content"]
    assert results(several) == [
        "2",
        "Error: unknown tool 'sub'; expected add, fails",
        "Error: more than 2 calls in one turn",
    ]
    assert several.episode.calls == 3 and several.episode.failed_calls == 2


def test_calls_of_llamas_form_are_the_whole_turn():
    assert read_calls('{"name": "add", "parameters": {"a": 1}}', CallForm.BARE)[1] == [WrittenCall("add", {"a": 1})]
    for text in ('{"sum": 3}', "3", "[1]", '{"name": 3}'):
        assert read_calls(text, CallForm.BARE) == (text, [])


def test_descriptions_are_those_of_signatures_and_docstrings():
    schemas = read_schemas([f"{FILE}:add", f"{FILE}:look_up", f"{FILE}:many"])
    described = schemas[f"{FILE}:add"]["function"]
    assert described["name"] == "add" and described["description"] == "Add two numbers."
    assert described["parameters"] == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "The first, which must be there."},
            "b": {"type": "integer", "description": "The second."},
        },
        "required": ["a"],
    }
    # The record and the state are not the model's.
    assert list(schemas[f"{FILE}:look_up"]["function"]["parameters"]["properties"]) == ["name"]
    kinds = {
        name: each["type"] for name, each in describe_tool(many, "many")["function"]["parameters"]["properties"].items()
    }
    assert kinds == {
        "a": "integer", "b": "number", "c": "boolean", "d": "array", "e": "object", "f": ["string", "null"],
    }  # fmt: skip
    assert describe_tool(fails, "fails")["function"]["parameters"]["properties"]["kind"]["enum"] == [
        "raises",
        "hangs",
        "object",
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("without_annotation", "the parameter 'a' of the tool .* has no annotation; give it one, such as a: str"),
        ("with_rest", r"the parameter \*a: int; expected parameters with names alone"),
        ("with_object", "is annotated with <class 'object'>; expected str, int"),
    ],
)
def test_functions_that_cannot_be_described_are_refused(name, message):
    with pytest.raises(InvalidFunctionError, match=message):
        describe_tool(getattr(tool_functions, name), name)


def test_a_function_that_cannot_be_described_is_one_error():
    with pytest.raises(RecipeError, match=r"can't be started: the parameter 'a' of the tool .* has no annotation"):
        read_schemas([f"{FILE}:without_annotation"])


def test_what_cannot_be_offered_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="a ToolEnvironment are plain texts, which offer no tools"):
        opened(tmp_path, add, chat=False)
    with pytest.raises(
        RecipeError, match=r"chat template has no tools, or calls of a form .* or a TextEnvironment that reads"
    ):
        opened(tmp_path, add, template=CHAT.replace("tool_call>", "call>"))
    with pytest.raises(RecipeError, match=r"ToolEnvironment\.tools is empty"):
        opened(tmp_path)
    with pytest.raises(RecipeError, match=r"two of ToolEnvironment\.tools are called 'add'"):
        opened(tmp_path, add, "other:add")
    with pytest.raises(RecipeError, match=r"ToolEnvironment\.calls=0"):
        opened(tmp_path, add, limits={"calls": 0})
    with pytest.raises(RecipeError, match="has no function 'nothing'"):
        opened(tmp_path, f"{FILE}:nothing")
