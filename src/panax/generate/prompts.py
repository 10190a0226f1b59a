"""Prompts as token ids: texts to continue, and conversations to answer."""

import datetime
from collections.abc import Sequence
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


def encode_conversation(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]]) -> list[int]:
    """Return the ids of a conversation by the tokenizer's chat template, and of the beginning of an answer to it.

    Raises:
        RecipeError: The tokenizer has no chat template, or that fails.
    """
    return tokenizer.encode_rendered([render_conversation(tokenizer, messages)])[0].ids


def render_conversation(
    tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True
) -> str:
    """Return the text of a conversation by the tokenizer's chat template.

    Args:
        add_generation_prompt: End with the beginning of an answer.

    Raises:
        RecipeError: The tokenizer has no chat template, or that fails.
    """
    from ..data.chats.template import RenderError

    try:
        return load_template(tokenizer).render(list(messages), add_generation_prompt=add_generation_prompt)
    except RenderError as error:
        raise RecipeError(f"the chat template fails on the prompt: {error}") from error


def load_template(tokenizer: Tokenizer) -> "ChatTemplate":
    """Compile the tokenizer's chat template.

    Raises:
        RecipeError: The tokenizer has none.
    """
    from ..data.chats.template import ChatTemplate

    source = tokenizer.chat_templates.get("default")
    if source is None:
        raise RecipeError(
            "the tokenizer has no chat template, which a conversation (chat=True) needs; pass the prompt as a text"
        )
    today = datetime.date.today().isoformat()
    return ChatTemplate(source, name="the tokenizer", tokens=tokenizer.role_tokens, date=today)
