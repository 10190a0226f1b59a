"""Tools in chats: offered by the template, called under their schemas, returned in OpenAI's form; and formats of responses."""

import importlib.util
import json
import re
from pathlib import Path

import jax
import jsonschema
import pytest
from loopback import Running, byte_tokenizer

from panax.core.errors import RecipeError
from panax.generate import Completion, GenerationEngine, StreamEvent
from panax.generate.constraints.matchers import ConstraintCompiler
from panax.generate.serving.messages import read_messages
from panax.generate.serving.tool_responses import ToolForm
from panax.generate.tools import CallForm, OfferedTools, find_call_form, read_tools
from panax.models import DecoderConfig, DecoderTask

TASK = DecoderTask(model=DecoderConfig(vocab_size=272, max_length=1600, embed=16, num_layers=1, heads=2, ffn=24))
CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"type": "string", "maxLength": 8}},
}


def tool(name, parameters=None, **fields):
    return {"type": "function", "function": {"name": name, "parameters": parameters or {"type": "object"}, **fields}}


TOOLS = [tool("weather", WEATHER), tool("stop", {"type": "object", "additionalProperties": False})]
MESSAGES = [{"role": "user", "content": "a"}]


def template(name):
    """A published template, of TRL's package, which is read and not imported."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.submodule_search_locations, "requirements/published.txt has the package"
    return (Path(spec.submodule_search_locations[0]) / "chat_templates" / f"{name}.jinja").read_text("utf-8")


def with_template(name, *special):
    return byte_tokenizer("<|im_end|>", *special).with_chat(template(name), [257])


def build(tokenizer):
    params, state = TASK.init(jax.random.key(0))
    params = jax.tree.map(lambda leaf: leaf * 3.0 if leaf.ndim > 2 else leaf, params)
    return GenerationEngine(TASK.incremental_model(params, state), tokenizer, rows=2, chunk=256)


@pytest.fixture(scope="module")
def server():
    tokenizer = with_template("qwen2_5")
    running = Running(build(tokenizer), tokenizer)
    yield running
    running.close()


def check_calls(message, names=("weather", "stop")):
    assert message["role"] == "assistant" and message["content"] is None and message["tool_calls"]
    for call in message["tool_calls"]:
        function = call["function"]
        assert call["type"] == "function" and call["id"].startswith("call_") and function["name"] in names
        schema = next(each["function"]["parameters"] for each in TOOLS if each["function"]["name"] == function["name"])
        jsonschema.validate(json.loads(function["arguments"]), schema)


def test_a_call_that_is_required_is_one_of_the_tools_under_its_schema(server):
    asked = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 200, "parallel_tool_calls": False}
    choices = server.ask(CHAT, **asked, tool_choice="required", n=4)["choices"]
    for choice in choices:
        assert choice["finish_reason"] == "tool_calls" and len(choice["message"]["tool_calls"]) == 1
        check_calls(choice["message"])
    assert {choice["message"]["tool_calls"][0]["function"]["name"] for choice in choices} == {"weather", "stop"}
    named = {"type": "function", "function": {"name": "stop"}}
    [choice] = server.ask(CHAT, **asked, tool_choice=named)["choices"]
    check_calls(choice["message"], ["stop"])
    [cut] = server.ask(CHAT, **(asked | {"max_tokens": 12}), tool_choice="required")["choices"]
    assert cut["finish_reason"] == "length" and cut["message"]["content"] == "<tool_call>\n"
    several = server.ask(CHAT, **(asked | {"parallel_tool_calls": True}), tool_choice="required", n=4)["choices"]
    assert all(choice["finish_reason"] in ("tool_calls", "length") for choice in several)


def test_a_stream_has_its_calls_in_the_last_part(server):
    asked = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 200, "seed": 3, "tool_choice": "required"}
    asked["parallel_tool_calls"] = False
    [whole] = server.ask(CHAT, **asked)["choices"]
    first, *_, last = server.stream(CHAT, **asked)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    delta = last["choices"][0]["delta"]
    assert last["choices"][0]["finish_reason"] == "tool_calls" and "content" not in delta
    [call] = delta["tool_calls"]
    assert call["index"] == 0 and call["function"] == whole["message"]["tool_calls"][0]["function"]


def test_a_model_may_answer_with_text(server):
    asked = {"messages": MESSAGES, "max_tokens": 6, "seed": 1}
    [offered] = server.ask(CHAT, **asked, tools=TOOLS, tool_choice="auto")["choices"]
    [by_default] = server.ask(CHAT, **asked, tools=TOOLS)["choices"]
    assert offered == by_default and offered["message"]["content"] and offered["finish_reason"] == "length"
    [none] = server.ask(CHAT, **asked, tools=TOOLS, tool_choice="none")["choices"]
    [without] = server.ask(CHAT, **asked)["choices"]
    assert none == without
    parts = server.stream(CHAT, **asked, tools=TOOLS)
    text = "".join(part["choices"][0]["delta"].get("content", "") for part in parts)
    assert text == offered["message"]["content"]


@pytest.mark.parametrize(
    ("name", "special"), [("qwen2_5", ()), ("qwen3", ("<tool_call>", "</tool_call>")), ("llama3_1", ())]
)
def test_a_strict_tool_is_called_under_its_schema_or_not_at_all(name, special):
    tokenizer = with_template(name, *special)
    tools = read_tools({"tools": [tool("weather", WEATHER, strict=True), tool("other")]}, tokenizer)
    assert tools is not None and tools.grammar is not None
    compiler = ConstraintCompiler(tokenizer, 272)

    def is_allowed(text):
        """True for a whole answer, None for a beginning, False for neither."""
        answer = compiler.begin(tools.grammar)
        assert answer is not None
        for token in tokenizer.encode_rendered([text])[0].ids:
            if not answer.allowed[token // 32] >> (token % 32) & 1:
                return False
            if answer.accept(token) == "stop":
                return True
        return True if answer.allowed[8] & 1 else None  # The end is token 256.

    begin, end = ("", "") if name == "llama3_1" else ("<tool_call>\n", "\n</tool_call>")
    field = "parameters" if name == "llama3_1" else "arguments"
    good = f'{begin}{{"name": "weather", "{field}": {{"city": "x", "days": 3}}}}{end}'
    assert is_allowed("text <tool") is True and is_allowed("") is True
    assert is_allowed(good) is True and tools.parse(good)[1]
    assert is_allowed(good.removesuffix(end)[:-2]) is None
    assert is_allowed(good.replace("3", "8")) is False and is_allowed(good.replace("weather", "wether")) is False
    assert is_allowed(good.replace("weather", "other").replace("days", "any")) is True, "that one is not strict"
    if begin:
        assert is_allowed(f"text\n{good}\n{good} text") is True
        assert is_allowed(f"text\n{good.replace('3', '8')}") is False


def test_results_of_tools_are_part_of_the_conversation(server):
    called = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "x", "days": 1}'},
    }
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [called], "refusal": None},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    short = server.ask(CHAT, messages=messages[:1], tools=TOOLS, max_tokens=1)["usage"]["prompt_tokens"]
    asked = server.ask(CHAT, messages=messages, tools=TOOLS, max_tokens=1)["usage"]["prompt_tokens"]
    assert asked > short + 60
    _, assistant, result = read_messages(messages)
    assert assistant["tool_calls"][0]["function"]["arguments"] == {"city": "x", "days": 1}
    assert assistant["content"] == "" and "refusal" not in assistant and result["content"] == "rain"


FORMATS = {
    "an object": ({"type": "json_object"}, lambda text: isinstance(json.loads(text), dict)),
    "a schema": (
        {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": WEATHER}},
        lambda text: jsonschema.validate(json.loads(text), WEATHER) is None,
    ),
    "an expression": ({"type": "regex", "pattern": "[ab]{5}"}, lambda text: re.fullmatch("[ab]{5}", text)),
    "a grammar": ({"type": "grammar", "rules": 'start: "x" | "yz"'}, lambda text: text in ("x", "yz")),
    "text": ({"type": "text"}, lambda text: True),
}


@pytest.mark.parametrize("case", FORMATS)
def test_formats_of_responses(case, server):
    form, holds = FORMATS[case]
    for choice in server.ask(CHAT, messages=MESSAGES, response_format=form, max_tokens=150, n=2)["choices"]:
        assert choice["finish_reason"] == "length" or holds(choice["message"]["content"])
    [choice] = server.ask("/v1/completions", prompt="a", response_format=form, max_tokens=150)["choices"]
    assert choice["finish_reason"] == "length" or holds(choice["text"])


OTHER = {"type": "function", "function": {"name": "wether"}}
REFUSED = {
    "no list": ({"tools": {"a": 1}}, "tools: expected a list"),
    "too many": ({"tools": [tool(f"a{n}") for n in range(129)]}, "at most 128 tools"),
    "another type": ({"tools": [{"type": "custom"}]}, "tools[0]: expected"),
    "no name": ({"tools": [tool("a b")]}, "tools[0].function.name='a b'"),
    "a field": ({"tools": [tool("a", paramters={})]}, "unknown or unsupported field 'paramters'; did you mean"),
    "twice": ({"tools": [tool("a"), tool("a")]}, "two have the same name"),
    "another tool": ({"tools": TOOLS, "tool_choice": OTHER}, "names the function 'wether'; did you mean 'weather'"),
    "another choice": ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice='any'; expected 'auto'"),
    "a choice of nothing": ({"tool_choice": "required"}, "tool_choice and parallel_tool_calls need tools"),
    "parallel": ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls=1; expected true or false"),
    "a broken schema": (
        {"tools": [tool("a", {"type": "nothing"})], "tool_choice": "required"},
        "failed to compile JSON schema: Invalid type: nothing",
    ),
    "both": ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format with tools"),
    "no format": ({"response_format": {"type": "xml"}}, "response_format={'type': 'xml'}; expected the type"),
    "no schema": ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "expected a JSON schema"),
    "a bad schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
        "the schema can't be used: llguidance states: Unimplemented keys",
    ),
    "no call": ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]: expected"),
    "calls of a user": (
        {"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]},
        "of the role 'user' has tool_calls",
    ),
    "no arguments": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "["}}]}]},
        "tool_calls[0].function.arguments: expected a JSON object",
    ),
    "no content": ({"messages": [{"role": "tool"}]}, "messages[0].content is not a text"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_chat_that_can_not_be_answered_has_one_message(case, server):
    body, words = REFUSED[case]
    status, text = server.send(CHAT, {"messages": MESSAGES, "max_tokens": 2} | body)
    assert status == 400 and words in json.loads(text)["error"]["message"]


def test_an_answer_that_fails_is_the_error_of_its_request_alone(server):
    explodes = {"type": "regex", "pattern": r"(\w{0,500}\p{L}{0,500}){0,500}"}
    asked = {"prompt": "a", "max_tokens": 60, "response_format": explodes}
    status, text = server.send("/v1/completions", asked)
    assert status == 400 and "the answer ended after" in json.loads(text)["error"]["message"]
    status, text = server.send("/v1/completions", asked | {"stream": True})
    last = json.loads(text.strip().split("\n\n")[-1].removeprefix("data: "))
    assert status == 200 and "too many expressions" in last["error"]["message"]
    assert server.ask("/v1/completions", prompt="a", max_tokens=3)["choices"][0]["finish_reason"] == "length"


FORMS = {
    "qwen2_5": CallForm.TAGGED, "qwen3": CallForm.TAGGED, "llama3_1": CallForm.BARE, "llama3_2": CallForm.BARE,
    "qwen3_6": None, "glm4moe": None, "gptoss": None, "gemma4": None, "phi3": None,
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_the_form_of_calls_is_that_of_the_template(name):
    if FORMS[name] is None:
        with pytest.raises(RecipeError, match="has no tools, or calls of a form that is not supported"):
            find_call_form(with_template(name))
    else:
        assert find_call_form(with_template(name)) is FORMS[name]
    with pytest.raises(RecipeError, match="no chat template"):
        find_call_form(byte_tokenizer())


@pytest.mark.full
@pytest.mark.parametrize(("name", "special"), [("llama3_1", ()), ("qwen3", ("<tool_call>", "</tool_call>"))])
def test_other_forms_of_calls_and_tags_that_are_special_tokens(name, special):
    tokenizer = with_template(name, *special)
    running = Running(build(tokenizer), tokenizer)
    try:
        asked = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 120, "tool_choice": "required", "n": 2}
        choices = running.ask(CHAT, **asked, parallel_tool_calls=False)["choices"]
    finally:
        running.close()
    for choice in choices:
        assert choice["finish_reason"] == "tool_calls"
        check_calls(choice["message"])


TAGGED = OfferedTools(tuple(TOOLS), CallForm.TAGGED, None, True)
BARE = OfferedTools(tuple(TOOLS), CallForm.BARE, None, True)
CALL = '<tool_call>\n{"name": "stop", "arguments": {"a": "é<"}}\n</tool_call>'
STOP = ("stop", '{"a": "é<"}')
TEXTS = [
    (TAGGED, f"I call.\n\n{CALL}", "I call.", [STOP]),
    (TAGGED, f"{CALL}\n{CALL}", "", [STOP, STOP]),
    (OfferedTools(tuple(TOOLS), CallForm.TAGGED, None, False), f"{CALL}\n{CALL}", "", [STOP]),
    (TAGGED, CALL.removesuffix("</tool_call>"), "", [STOP]),
    (TAGGED, "no < call <tool", None, []),
    (TAGGED, CALL[:40], None, []),
    (TAGGED, f"{CALL}\n<tool_call>", None, []),
    (TAGGED, CALL.replace("stop", "other"), None, []),
    (TAGGED, CALL.replace("{", "["), None, []),
    (TAGGED, "<tool_call>" + "[" * 500, None, []),
    (BARE, ' {"name": "stop", "parameters": {"a": "é<"}}', "", [STOP]),
    (BARE, '<|python_tag|>{"name": "stop", "arguments": {"a": "é<"}}', "", [STOP]),
    (BARE, '{"name": "stop", "parameters": 3}', None, []),
    (BARE, 'It is {"name": "stop", "parameters": {}}', None, []),
    (BARE, "<b> is text", None, []),
    (BARE, "", None, []),
]


@pytest.mark.parametrize(("tools", "text", "content", "calls"), TEXTS)
def test_calls_are_found_in_a_text_and_in_its_stream(tools, text, content, calls):
    expected = text if content is None else content
    assert tools.parse(text) == (expected, calls)
    form, served = ToolForm(tools), type("Served", (), {"log_probabilities": None, "answers": True})
    parts = []
    form = ToolForm(tools)
    for letter in text:
        parts.append(form.delta(0, StreamEvent(0, 0, None, letter), served, None))  # pyright: ignore
    done = Completion(0, 0, (), text, "end")
    parts.append(form.delta(0, StreamEvent(0, 0, None, "", done), served, None))  # pyright: ignore
    sent = "".join(part["delta"].get("content", "") for part in parts if part)
    assert sent.strip() == expected.strip()
    streamed = [call["function"] for call in parts[-1]["delta"].get("tool_calls", [])]
    assert [(each["name"], each["arguments"]) for each in streamed] == calls
    assert parts[-1]["finish_reason"] == ("tool_calls" if calls else "stop")


def test_text_that_can_not_be_a_call_is_streamed_at_once():
    assert TAGGED.split_stream("text <too") == 5 and TAGGED.split_stream("text <tools") == 11
    assert TAGGED.split_stream("text <tool_call>{") == 5
    assert BARE.split_stream("text {") == 6 and BARE.split_stream(" {") == 0 and BARE.split_stream("<|pyt") == 0
