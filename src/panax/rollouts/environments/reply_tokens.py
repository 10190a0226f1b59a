"""`ReplyEncoder`: the tokens of a reply, between the end of the model's turn and its next one.

Sampled tokens are never encoded again: those of a reply are the ones that the chat template adds after any message of the
assistant, up to the beginning of the next answer.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ...core.errors import RecipeError
from ...data import Tokenizer
from ...generate.prompts import render_conversation
from .turns import Message, OpenedEnvironment

_PLACEHOLDER = "placeholderofananswer"
_ADVICE = (
    "take a tokenizer with a chat template of separate turns, such as that of Qwen or Llama, or prompts as plain texts"
)


class ReplyEncoder:
    """Encodes replies for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, environment: OpenedEnvironment, stop_ids: Sequence[int]):
        """
        Args:
            stop_ids: Tokens at which a turn ends, beside those of the tokenizer.
        """
        self._tokenizer, self._environment = tokenizer, environment
        self._end_ids = {*tokenizer.end_ids, *stop_ids}
        self._closing_ids: frozenset[int] = frozenset()

    def check_chat(self) -> None:
        """Check that the chat template renders a reply alike after any conversation, and after a token that ends a turn.

        Raises:
            RecipeError: It does not, or there is none.
        """
        replies = self._environment.reply_examples
        first = self._render_after([], replies)
        later = self._render_after([{"role": "assistant", "content": "an earlier answer"}, *replies], replies)
        if first != later:
            raise RecipeError(
                f"the chat template renders a reply as {first[:80]!r} after one turn, and as {later[:80]!r} after two, so that "
                f"the tokens of earlier turns would not remain; {_ADVICE}"
            )
        ids = self._tokenizer.encode_rendered([first])[0].ids
        if not ids or ids[0] not in self._end_ids:
            shown = self._tokenizer.decode(ids[:1])
            raise RecipeError(
                f"the chat template ends a turn of the assistant with {shown!r}, at which no answer ends; add its id "
                f"({', '.join(map(str, ids[:1]))}) to data.stop_ids, or {_ADVICE}"
            )
        ends = [self._render_after([], messages, begins_answer=False) for messages in ((), replies)]
        ends = [ends[0], ends[1].rpartition(str(replies[-1]["content"]))[2]]
        self._closing_ids = frozenset(each for text in self._tokenizer.encode_rendered(ends) for each in text.ids)

    def check_text(self) -> None:
        """Check that texts can be encoded one after another.

        Raises:
            RecipeError: They can't.
        """
        if self._environment.tools:
            raise RecipeError(
                "the prompts of a ToolEnvironment are plain texts, which offer no tools; set data.chat=True, or write them as "
                "messages"
            )
        if self._tokenizer.marks_beginnings:
            raise RecipeError(
                "this tokenizer puts a space before each text that is encoded by itself, so that a reply would not follow the "
                "model's turn as written; set data.chat=True, or write prompts as messages"
            )

    def encode_chat(self, messages: Sequence[Message], end: int) -> tuple[int, ...]:
        """Return the tokens from the one after the turn's own end to the beginning of the next turn.

        The token that ended the turn was drawn, and takes the place of that of the template, also if they differ. Templates
        such as GLM's end a turn only by the token that begins the next message: it is missing if another one was drawn.

        Args:
            end: The token that ended the turn.

        Raises:
            RecipeError: The chat template rejects a message.
        """
        ids = tuple(self._tokenizer.encode_rendered([self._render_after([], messages)])[0].ids)
        return ids[1:] if ids[0] == end or ids[0] in self._closing_ids else ids

    def encode_text(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Return the tokens of the messages' contents, as they are."""
        return tuple(self._tokenizer.encode("".join(str(message["content"]) for message in messages)))

    def _render_after(
        self, history: Sequence[Message], messages: Sequence[Message], *, begins_answer: bool = True
    ) -> str:
        """Return the text that the template adds after an answer to a history.

        Args:
            begins_answer: End with the beginning of the next answer.
        """
        conversation = [
            {"role": "user", "content": "a question"},
            *history,
            {"role": "assistant", "content": _PLACEHOLDER},
            *messages,
        ]
        text = render_conversation(
            self._tokenizer, conversation, self._environment.tools, add_generation_prompt=begins_answer
        )
        before, written, after = text.rpartition(_PLACEHOLDER)
        if not written or _PLACEHOLDER in before:
            raise RecipeError(
                f"the chat template writes an assistant's message {text.count(_PLACEHOLDER)} times, so that the end of a turn "
                f"can't be found; {_ADVICE}"
            )
        return after
