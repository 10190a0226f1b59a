"""`ToolForm`: the answers of a chat with tools, of which some are calls."""

import dataclasses
import uuid
from collections.abc import Sequence
from typing import Any

from ...data.text.tokenizer import Tokenizer
from ..requests import Completion, StreamEvent
from ..tools import OfferedTools, ToolCall
from .bodies import ServedRequest
from .responses import CHAT


class ToolForm:
    """How one request's answers are written: as `CHAT`, with calls in `tool_calls`.

    A stream holds back text that may be a call, and has the calls of an answer in its last part.
    """

    prefix, whole, part = CHAT.prefix, CHAT.whole, CHAT.part

    def __init__(self, tools: OfferedTools):
        self._tools = tools
        self._texts: dict[int, str] = {}
        self._sent: dict[int, int] = {}

    def choice(
        self, index: int, completion: Completion, served: ServedRequest, tokenizer: Tokenizer, prompt: Sequence[int]
    ) -> dict[str, Any]:
        choice = CHAT.choice(index, completion, served, tokenizer, prompt)
        content, calls = self._tools.parse(completion.text)
        if not calls:
            return choice
        message = {"role": "assistant", "content": content or None, "tool_calls": _written(calls)}
        return choice | {"message": message, "finish_reason": "tool_calls"}

    def first(self, index: int, served: ServedRequest, tokenizer: Tokenizer) -> list[dict[str, Any]]:
        return CHAT.first(index, served, tokenizer)

    def delta(
        self, index: int, event: StreamEvent, served: ServedRequest, tokenizer: Tokenizer
    ) -> dict[str, Any] | None:
        text = self._texts[index] = self._texts.get(index, "") + event.text
        sent = self._sent.get(index, 0)
        calls: list[ToolCall] = []
        end = self._tools.split_stream(text)
        if event.completion is not None:
            _, calls = self._tools.parse(text)
            end = end if calls else len(text)
        new = text[sent:end]
        # White space before a call is not part of the answer's text.
        new = new.rstrip() if calls or (not sent and not new.strip() and event.completion is None) else new
        self._sent[index] = sent + len(new)
        delta = CHAT.delta(index, dataclasses.replace(event, text=new), served, tokenizer)
        if delta is None or not calls:
            return delta
        numbered = [{"index": number} | call for number, call in enumerate(_written(calls))]
        return delta | {"delta": delta["delta"] | {"tool_calls": numbered}, "finish_reason": "tool_calls"}


def _written(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in calls
    ]
