"""Prompts as token ids: texts to continue, and conversations to answer."""

import datetime
from collections.abc import Sequence
from typing import Any

from ..core.errors import RecipeError
from ..data.text.tokenizer import Tokenizer


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
    from ..data.chats.template import ChatTemplate, RenderError

    source = tokenizer.chat_templates.get("default")
    if source is None:
        raise RecipeError(
            "the tokenizer has no chat template, which a conversation (chat=True) needs; pass the prompt as a text"
        )
    today = datetime.date.today().isoformat()
    template = ChatTemplate(source, name="the tokenizer", tokens=tokenizer.role_tokens, date=today)
    try:
        text = template.render(list(messages), add_generation_prompt=True)
    except RenderError as error:
        raise RecipeError(f"the chat template fails on the prompt: {error}") from error
    return tokenizer.encode_rendered([text])[0].ids
