"""Tools of a chat: offered to the model by its chat template, called by it in one of two common forms."""

import dataclasses
import enum
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..core.errors import RecipeError, suggest_name
from ..data.chats.template import RenderError
from ..data.text.tokenizer import Tokenizer
from ..system import json_reader
from .constraints import Grammar
from .constraints.settings import JSON_DIRECTIVE, WHITESPACE
from .prompts import load_template

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
"""Token that Llama 3.1 may write before a call."""

MAX_TOOLS = 128
"""As OpenAI has it."""

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


class CallForm(enum.Enum):
    """How a model writes a call; the value is the name of its arguments.

    TAGGED is that of Hermes and Qwen, `<tool_call>{"name": ..., "arguments": ...}</tool_call>`; BARE that of Llama 3,
    `{"name": ..., "parameters": ...}` as the whole answer.
    """

    TAGGED = "arguments"
    BARE = "parameters"


class ToolCall(NamedTuple):
    """A call of a tool.

    Attributes:
        arguments: A JSON object, as text.
    """

    name: str
    arguments: str


@dataclasses.dataclass(frozen=True)
class OfferedTools:
    """The tools of a request.

    Attributes:
        tools: In OpenAI's form, for the chat template.
        grammar: Of the answer, if it has to be a call, or if a tool is strict.
        parallel: False to return the first call alone.
    """

    tools: tuple[Mapping[str, Any], ...]
    form: CallForm
    grammar: Grammar | None
    parallel: bool

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        """Split an answer into the text before its calls, and these; none if one is incomplete or of another name."""
        names = [tool["function"]["name"] for tool in self.tools]
        content, sources = split_calls(text, self.form)
        calls = []
        for source in sources:
            try:
                call = json_reader.parse_as(dict, source.strip())
            except json_reader.JsonError:
                return text, []
            arguments = call.get(self.form.value, call.get("arguments"))
            if call.get("name") not in names or not isinstance(arguments, dict):
                return text, []
            calls.append(ToolCall(call["name"], json.dumps(arguments, ensure_ascii=False)))
        return (content.strip(), calls if self.parallel else calls[:1]) if calls else (text, [])

    def split_stream(self, text: str) -> int:
        """Return the length of the beginning of an unfinished answer that can't be part of a call."""
        if self.form is CallForm.BARE:
            begin = text.lstrip()
            return 0 if not begin or begin[0] == "{" or PYTHON_TAG.startswith(begin[: len(PYTHON_TAG)]) else len(text)
        if (place := text.find(OPEN)) >= 0:
            return place
        return len(text) - max((size for size in range(1, len(OPEN)) if text.endswith(OPEN[:size])), default=0)


def split_calls(text: str, form: CallForm) -> tuple[str, list[str]]:
    """Split an answer into the text before its calls, and the text of each; of the form BARE, all of it may be a call.

    >>> split_calls("Wait. <tool_call>{}</tool_call>", CallForm.TAGGED)
    ('Wait. ', ['{}'])
    """
    if form is CallForm.BARE:
        return "", [text.strip().removeprefix(PYTHON_TAG)]
    content, *parts = text.split(OPEN)
    return content, [part.partition(CLOSE)[0] for part in parts]


def read_tools(body: Mapping[str, Any], tokenizer: Tokenizer) -> OfferedTools | None:
    """Read `tools`, `tool_choice` and `parallel_tool_calls` of a chat; None if the model is offered no tools.

    Raises:
        RecipeError: A field is of another form, or the chat template has no tools, or calls of another form.
    """
    tools, choice, parallel = (body.get(name) for name in ("tools", "tool_choice", "parallel_tool_calls"))
    if not tools:
        if choice not in (None, "none", "auto") or parallel is not None:
            raise RecipeError("tool_choice and parallel_tool_calls need tools; pass these too, or remove the others")
        return None
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise RecipeError(f"tools: expected a list of at most {MAX_TOOLS} tools")
    for number, tool in enumerate(tools):
        _check_tool(tool, f"tools[{number}]")
    by_name = {tool["function"]["name"]: tool for tool in tools}
    if len(by_name) < len(tools):
        raise RecipeError("tools: two have the same name; rename one of them")
    if parallel is not None and not isinstance(parallel, bool):
        raise RecipeError(f"parallel_tool_calls={parallel!r}; expected true or false")
    required = _read_choice(choice, by_name)
    if choice == "none":
        return None
    form = find_call_form(tokenizer)
    is_strict = [bool(tool["function"].get("strict")) for tool in tools]
    grammar = None
    if required:
        grammar = _call_grammar(form, required, tokenizer, several=parallel is not False and choice == "required")
    elif any(is_strict):
        free = {"type": "object"}
        bounded = [tool if strict else _with_schema(tool, free) for tool, strict in zip(tools, is_strict, strict=True)]
        grammar = _text_grammar(form, bounded, tokenizer)
    return OfferedTools(tuple(tools), form, grammar, parallel is not False)


def _check_tool(tool: Any, name: str) -> None:
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    if not isinstance(function, Mapping):
        raise RecipeError(f'{name}: expected {{"type": "function", "function": {{"name": ..., "parameters": ...}}}}')
    if not isinstance(function.get("name"), str) or not _NAME.fullmatch(function["name"]):
        raise RecipeError(
            f"{name}.function.name={function.get('name')!r}; expected 1 to 64 letters, digits, or any of _ . -"
        )
    if not isinstance(function.get("parameters", {}), Mapping):
        raise RecipeError(f"{name}.function.parameters: expected a JSON schema")
    known = ("name", "description", "parameters", "strict")
    if unknown := [field for field in function if field not in known]:
        raise RecipeError(
            f"{name}.function: unknown or unsupported field {unknown[0]!r}; {suggest_name(unknown[0], known)}"
        )


def _read_choice(choice: Any, by_name: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the tools of which one has to be called; empty if none has to."""
    if choice in (None, "auto", "none"):
        return []
    if choice == "required":
        return list(by_name.values())
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if name is None:
        raise RecipeError(
            f"tool_choice={choice!r}; expected 'auto', 'none', 'required' or "
            f'{{"type": "function", "function": {{"name": ...}}}}'
        )
    if name not in by_name:
        raise RecipeError(f"tool_choice names the function {name!r}; {suggest_name(str(name), by_name)}")
    return [by_name[name]]


def find_call_form(tokenizer: Tokenizer, *, advice: str = "Remove tools, or pass tool_choice='none'") -> CallForm:
    """Return the form of calls, from a conversation with one that the chat template renders.

    Args:
        advice: The end of the message of an error.

    Raises:
        RecipeError: The template does not show tools, or has calls of another form.
    """
    template = load_template(tokenizer, tools=True)
    form = _form_of(template.source, tuple(sorted(tokenizer.role_tokens.items())))
    if form is None:
        raise RecipeError(
            f"the tokenizer's chat template has no tools, or calls of a form that is not supported; expected that of Hermes and "
            f"Qwen ({OPEN} with JSON) or of Llama 3 (JSON with name and parameters). {advice}"
        )
    return form


@functools.lru_cache(maxsize=8)
def _form_of(source: str, tokens: tuple[tuple[str, str], ...]) -> CallForm | None:
    from ..data.chats.template import ChatTemplate

    name, marker, arguments = "example_function", "example of a description", {"x": 1}
    schema = {"type": "object", "properties": {"x": {"type": "integer", "description": marker}}}
    tool = {"type": "function", "function": {"name": name, "description": marker, "parameters": schema}}
    call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    template = ChatTemplate(source, name="the tokenizer", tokens=dict(tokens), date="2026-01-01")
    try:
        text = template.render(messages, tools=[tool])
    except RenderError:
        return None
    if marker not in text:
        return None
    tail = text[text.rfind(marker) :]
    for form in CallForm:
        written = json.dumps({"name": name, form.value: arguments})
        if written in tail and (OPEN in tail[: tail.find(written)]) is (form is CallForm.TAGGED):
            return form
    return None


def _call_grammar(
    form: CallForm, tools: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, *, several: bool
) -> Grammar:
    """Return the grammar of a call of one of the tools, with arguments under its schema.

    Args:
        several: Allow more calls after the first one, if the form has them.
    """
    if form is CallForm.BARE:
        return Grammar("\n".join(["start: object", *_object_rules(form, tools)]))
    begin, end = _tag(OPEN, tokenizer), _tag(CLOSE, tokenizer)
    rules = ['start: call ("\\n" call)*' if several else "start: call"]
    rules.append(f'call: {begin} "\\n" object "\\n" {end}')
    return Grammar("\n".join([*rules, *_object_rules(form, tools)]))


def _text_grammar(form: CallForm, tools: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> Grammar:
    """Return the grammar of a text that may have calls, with arguments under the schemas of their tools."""
    if form is CallForm.BARE:
        rules = ["start: object | TEXT", r"TEXT: /([^{\s](.|\n)*)?/"]
        return Grammar("\n".join([*rules, *_object_rules(form, tools)]))
    begin, end = _tag(OPEN, tokenizer), _tag(CLOSE, tokenizer)
    # The text ends at the first tag, which a special token is in any case.
    name = "begin" if begin == OPEN else "begin[lazy]"
    rules = ["start: call* TEXT", r"TEXT: /(.|\n)*/", f"{name}: TEXT {begin}", f'call: begin "\\n" object "\\n" {end}']
    return Grammar("\n".join([*rules, *_object_rules(form, tools)]))


def _object_rules(form: CallForm, tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the rules of `object`: the name of a tool, and its arguments."""
    rules = ["object: " + " | ".join(f"call_{number}" for number in range(len(tools)))]
    options = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
    for number, tool in enumerate(tools):
        function = tool["function"]
        head = json.dumps(f'{{"name": {json.dumps(function["name"])}, "{form.value}": ')
        schema = {"type": "object", "properties": {}} | dict(function.get("parameters") or {}) | options
        rules.append(f'call_{number}: {head} arguments_{number} "}}"')
        rules.append(f"arguments_{number}: {JSON_DIRECTIVE} {json.dumps(schema, ensure_ascii=False)}")
    return rules


def _with_schema(tool: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    return {**tool, "function": {**tool["function"], "parameters": schema}}


def _tag(tag: str, tokenizer: Tokenizer) -> str:
    """Return a tag in a grammar: a special token, or text."""
    ids = tokenizer.encode_rendered([tag])[0].ids
    return tag if len(ids) == 1 and ids[0] in tokenizer.all_special_ids else json.dumps(tag)
