"""`ToolEnvironment`: Python functions that the model may call in its turns."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ...core.errors import RecipeError
from ...core.validation import Validated
from ...data import Tokenizer
from ...generate.tools import CallForm, find_call_form, split_calls
from ...system import json_reader
from ..calls.location import resolve_location, split_location
from ..calls.pool import Call, CalledFunction, CallPool
from ..calls.process import read_schemas
from .text_environment import check_limits
from .turns import AskedTurn, Message, TurnReply

_ADVICE = "Take a tokenizer with such a template, or a TextEnvironment that reads calls by itself"


class WrittenCall(NamedTuple):
    """A call as the model wrote it.

    Attributes:
        name: Name of the tool; empty if it can't be read.
        arguments: Its arguments; None if they can't be read.
        error: Why it can't be made; empty if it can.
    """

    name: str
    arguments: Mapping[str, Any] | None
    error: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolEnvironment(Validated):
    """Functions that the model may call: each turn with calls is followed by their results, and one without calls ends the
    episode.

    The chat template offers the functions to the model (`tools`), and determines the form of its calls: that of Hermes and
    Qwen, or of Llama 3. A call that fails is answered with an error, from which the model may learn: an unknown name,
    arguments that don't fit, an exception, a time limit.

    Attributes:
        tools: Functions with annotated parameters, or their locations, as `Reward.function`. A docstring's first paragraph
            describes the tool to the model, and its section `Args:` the parameters. They return a text or another JSON
            value. The model does not see two parameters: `record` is the prompt's record, and `state` an object of the
            episode, which a function may change.
        tokens: Maximum number of tokens of an episode after its prompt, those of the results included.
        turns: Maximum number of turns of the model.
        calls: Maximum number of calls of one turn that are made; others are answered with an error.
        seconds: Time limit of one call.
    """

    tools: tuple[Callable[..., Any] | str, ...]
    tokens: int
    turns: int = 8
    calls: int = 8
    seconds: float = 10.0

    def __post_init__(self) -> None:
        if not self.tools:
            raise RecipeError("ToolEnvironment.tools is empty; pass at least one function")
        locations = tuple(resolve_location(tool, "ToolEnvironment.tools") for tool in self.tools)
        object.__setattr__(self, "tools", locations)
        names = [split_location(where)[1] for where in locations]
        if twice := [name for name in names if names.count(name) > 1]:
            raise RecipeError(f"two of ToolEnvironment.tools are called {twice[0]!r}; rename one of them")
        check_limits(self)
        if self.calls < 1:
            raise RecipeError(f"ToolEnvironment.calls={self.calls}: expected 1 or more")

    def open(self, tokenizer: Tokenizer) -> "ToolReplies":
        """Import the functions in another process, and return the environment that makes their calls.

        Raises:
            RecipeError: A function can't be imported or described, or the tokenizer's chat template has no tools.
        """
        form = find_call_form(tokenizer, advice=_ADVICE)
        locations = [str(where) for where in self.tools]
        schemas = read_schemas(locations)
        functions = {
            split_location(where)[1]: (CalledFunction(where, "tool", self.seconds), schemas[where])
            for where in locations
        }
        return ToolReplies(form, functions, self.calls)


@dataclasses.dataclass(frozen=True)
class ToolReplies:
    """Replies of tools; see `OpenedEnvironment`.

    Attributes:
        form: How the model writes calls.
        by_name: Each tool's function and description.
        max_calls: Maximum number of calls of one turn.
    """

    form: CallForm
    by_name: Mapping[str, tuple[CalledFunction, Mapping[str, Any]]]
    max_calls: int
    reply_examples: tuple[Message, ...] = (
        {"role": "tool", "name": "first", "content": "example of a result"},
        {"role": "tool", "name": "second", "content": "example of another"},
    )

    @property
    def name(self) -> str:
        return f"tools {', '.join(self.by_name)}"

    @property
    def functions(self) -> tuple[CalledFunction, ...]:
        return tuple(function for function, _ in self.by_name.values())

    @property
    def tools(self) -> tuple[Mapping[str, Any], ...]:
        return tuple(described for _, described in self.by_name.values())

    def read_turn(self, text: str, turn: int) -> Message:
        """Return the assistant's message; calls that can be read are in its `tool_calls`."""
        content, calls = read_calls(text, self.form)
        written = [
            {
                "id": _call_id(turn, number),
                "type": "function",
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for number, call in enumerate(calls)
            if call.arguments is not None
        ]
        if not written:
            return {"role": "assistant", "content": text}
        return {"role": "assistant", "content": content, "tool_calls": written}

    def reply(
        self, pool: CallPool, asked: Sequence[AskedTurn], *, stop_at_failure: bool, on_wait: Callable[[], None]
    ) -> list[TurnReply]:
        """Make the calls of turns: those of one turn after each other, since they share a state.

        No failure of a call stops the run, so that `stop_at_failure` has no effect.
        """
        turns = [[self._check(call) for call in read_calls(each.text, self.form)[1]] for each in asked]
        states = [each.state for each in asked]
        results: list[list[tuple[str, bool]]] = [[] for _ in asked]
        for number in range(max(map(len, turns), default=0)):
            places = []
            calls = []
            for place, written in enumerate(turns):
                if number >= len(written):
                    continue
                call, error = written[number], written[number].error
                if number >= self.max_calls:
                    error = f"more than {self.max_calls} calls in one turn"
                if error:
                    results[place].append((f"Error: {error}", True))
                    continue
                arguments = {
                    "arguments": dict(call.arguments or {}),
                    "record": dict(asked[place].record),
                    "state": {} if states[place] is None else states[place],
                }
                places.append(place)
                calls.append(Call(self.by_name[call.name][0], arguments))
            for place, outcome in zip(places, pool.run(calls, on_wait=on_wait), strict=True):
                if outcome.error:
                    name = turns[place][number].name
                    results[place].append((f"Error: {name} {outcome.error}", True))
                else:
                    # A tool without a state got an empty one.
                    states[place] = outcome.value["state"] or (None if states[place] is None else {})
                    results[place].append((outcome.value["content"], False))
        return [
            self._assemble(each, written, result, state)
            for each, written, result, state in zip(asked, turns, results, states, strict=True)
        ]

    def _check(self, call: WrittenCall) -> WrittenCall:
        if call.error or call.name in self.by_name:
            return call
        return call._replace(error=f"unknown tool {call.name!r}; expected {', '.join(self.by_name)}")

    def _assemble(
        self, asked: AskedTurn, written: Sequence[WrittenCall], results: Sequence[tuple[str, bool]], state: Any
    ) -> TurnReply:
        messages = tuple(
            {"role": "tool", "name": call.name, "content": content, "tool_call_id": _call_id(asked.turn, number)}
            for number, (call, (content, _)) in enumerate(zip(written, results, strict=True))
        )
        failed = sum(is_error for _, is_error in results)
        return TurnReply(messages, state, not written, len(written), failed)


def read_calls(text: str, form: CallForm) -> tuple[str, list[WrittenCall]]:
    """Split a turn into the text before its calls, and these, also those that can't be made.

    >>> read_calls('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', CallForm.TAGGED)
    ('', [WrittenCall(name='add', arguments={'a': 1}, error='')])
    >>> read_calls("The sum is 3.", CallForm.BARE)
    ('The sum is 3.', [])
    """
    content, sources = split_calls(text, form)
    calls = []
    for source in sources:
        try:
            call = json_reader.parse_as(dict, source.strip())
        except json_reader.JsonError as error:
            if form is CallForm.BARE:  # a text
                return text, []
            calls.append(WrittenCall("", None, f"the call is not a JSON object: {error}"))
            continue
        if form is CallForm.BARE and not isinstance(call.get("name"), str):
            return text, []
        calls.append(_read_call(call, form))
    return (content.strip(), calls) if calls else (text, [])


def _read_call(call: Mapping[str, Any], form: CallForm) -> WrittenCall:
    name, arguments = call.get("name"), call.get(form.value, call.get("arguments"))
    if isinstance(name, str) and isinstance(arguments, dict):
        return WrittenCall(name, arguments)
    example = json.dumps({"name": "...", form.value: {}})
    return WrittenCall(name if isinstance(name, str) else "", None, f"the call has another form than {example}")


def _call_id(turn: int, number: int) -> str:
    return f"call_{turn}_{number}"
