"""Prompts as token ids: texts to continue, and conversations to answer."""

import datetime
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..core.errors import RecipeError
from ..data.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ..data.chats.template import ChatTemplate


def encode_prompt(tokenizer: Tokenizer, prompt: str, *, chat: bool = False) -> list[int]:
    """Encode a text to continue, or a user's message to answer.

    Raises:
        RecipeError: The text is empty; or the tokenizer has no chat template, or that fails.
    """
    ids = [*tokenizer.start_of_document, *tokenizer.encode(prompt)]
    if not ids or (chat and not prompt):
        raise RecipeError("the prompt is empty; pass at least one character")
    return encode_conversation(tokenizer, [{"role": "user", "content": prompt}]) if chat else ids


def encode_conversation(
    tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
) -> list[int]:
    """Return the ids of a conversation by the tokenizer's chat template, and of the beginning of an answer to it.

    Args:
        tools: Functions that the answer may call, in OpenAI's form.

    Raises:
        RecipeError: The tokenizer has no chat template, or that fails.
    """
    return tokenizer.encode_rendered([render_conversation(tokenizer, messages, tools)])[0].ids


def render_conversation(
    tokenizer: Tokenizer,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    add_generation_prompt: bool = True,
) -> str:
    """Return the text of a conversation by the tokenizer's chat template.

    Args:
        tools: As for `encode_conversation`.
        add_generation_prompt: End with the beginning of an answer.

    Raises:
        RecipeError: The tokenizer has no chat template, or that fails.
    """
    from ..data.chats.template import RenderError

    template = load_template(tokenizer, tools=bool(tools))
    try:
        return template.render(list(messages), tools=tools, add_generation_prompt=add_generation_prompt)
    except RenderError as error:
        raise RecipeError(f"the chat template fails on the prompt: {error}") from error


def load_template(tokenizer: Tokenizer, *, tools: bool = False) -> "ChatTemplate":
    """Compile the tokenizer's chat template; with tools, a separate one if there is one for them.

    Raises:
        RecipeError: The tokenizer has none.
    """
    from ..data.chats.template import ChatTemplate

    templates = tokenizer.chat_templates
    source = templates.get("tool_use" if tools else "default", templates.get("default"))
    if source is None:
        raise RecipeError(
            "the tokenizer has no chat template, which a conversation (chat=True) needs; pass the prompt as a text"
        )
    today = datetime.date.today().isoformat()
    return ChatTemplate(source, name="the tokenizer", tokens=tokenizer.role_tokens, date=today)
