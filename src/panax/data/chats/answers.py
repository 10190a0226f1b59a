"""The text of a conversation and the answers in it: by the template's own marks, else by rendering its beginnings."""

from collections.abc import Iterator
from typing import NamedTuple

from .conversation import Conversation
from .template import ChatTemplate, RenderError

_SHOWN = 40
"""Characters around a difference that a message shows."""


class RenderedChat(NamedTuple):
    """A text to encode, and its answers.

    Attributes:
        text: The rendered conversation, or its beginning up to an answer.
        spans: Beginning and end of each answer that carries loss, in characters.
        exact: True if the template itself marks the spans; else a span extends to the next message.
    """

    text: str
    spans: list[tuple[int, int]]
    exact: bool


def render_answers(conversation: Conversation, template: ChatTemplate) -> list[RenderedChat]:
    """Render a conversation: as one text if its answers can be found in it, else one text for each answer.

    A template without marks is rendered for the messages before an answer, with the beginning of an answer, and for the
    messages up to it. If each is the beginning of the next, their difference is the answer. Some templates change earlier
    turns, for example by removing their thoughts: then each answer becomes a separate text, after the messages as the model
    would see them.

    Raises:
        RenderError: The template fails, or its answers can't be found.
    """
    if template.marks_answers:
        text, spans = template.render_marked(
            conversation.messages, tools=conversation.tools, options=conversation.options
        )
        return [RenderedChat(text, _select_trained(spans, conversation), exact=True)]
    text = _render(conversation, template, len(conversation.messages))
    answers = list(_prefixes(conversation, template))
    if all(text.startswith(answer) for _, answer in answers):
        return [RenderedChat(text, [(len(before), len(answer)) for before, answer in answers], exact=False)]
    return [RenderedChat(answer, [(len(before), len(answer))], exact=False) for before, answer in answers]


def _render(conversation: Conversation, template: ChatTemplate, count: int, *, prompt: bool = False) -> str:
    return template.render(
        conversation.messages[:count],
        tools=conversation.tools,
        options=conversation.options,
        add_generation_prompt=prompt,
    )


def _prefixes(conversation: Conversation, template: ChatTemplate) -> Iterator[tuple[str, str]]:
    """Yield, for each answer to learn, the text before it and the text up to its end."""
    for number, trained in enumerate(conversation.trained):
        if not trained:
            continue
        if number == 0:
            raise RenderError("the conversation begins with an answer; expected a message before it")
        before = _render(conversation, template, number, prompt=True)
        answer = _render(conversation, template, number + 1)
        if not answer.startswith(before):
            raise RenderError(_describe_break(before, answer, number))
        yield before, answer


def _describe_break(before: str, answer: str, number: int) -> str:
    place = next(
        (at for at, (one, other) in enumerate(zip(before, answer)) if one != other), min(len(before), len(answer))
    )
    begin = max(0, place - _SHOWN)
    return (
        f"it prints the messages before answer {number} as ...{before[begin : place + _SHOWN]!r} with "
        f"add_generation_prompt, but as ...{answer[begin : place + _SHOWN]!r} when the answer follows, so that the answer "
        f"can't be found; put {{% generation %}} and {{% endgeneration %}} around answers in the template"
    )


def _select_trained(spans: list[tuple[int, int]], conversation: Conversation) -> list[tuple[int, int]]:
    """Return the marked answers that carry loss.

    Raises:
        RenderError: Some answers carry no loss, and the template does not mark each answer once.
    """
    answers = [message["role"] == "assistant" for message in conversation.messages]
    carries_loss = [trained for trained, answer in zip(conversation.trained, answers, strict=True) if answer]
    if all(carries_loss):
        return spans
    if len(spans) != len(carries_loss):
        raise RenderError(
            f"it marks {len(spans)} answers by {{% generation %}} where the conversation has {len(carries_loss)}, so that "
            f"answers without loss can't be found"
        )
    return [span for span, trained in zip(spans, carries_loss) if trained]
