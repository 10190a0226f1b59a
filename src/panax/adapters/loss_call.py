"""Calls of a user's loss with only the available keywords that it accepts."""

import inspect
from collections.abc import Callable
from typing import Any

from ..core.errors import RecipeError


def call_loss(loss: Callable[..., Any], *arguments: Any, **offered: Any) -> Any:
    """Call `loss(*arguments)` with the `offered` keywords that its signature names.

    Raises:
        RecipeError: The loss can't be called this way.
    """
    return loss(*arguments, **select_keywords(loss, len(arguments), offered))


def select_keywords(loss: Callable[..., Any], positional: int, offered: dict[str, Any]) -> dict[str, Any]:
    """Return the `offered` keywords that `loss` accepts."""
    signature = inspect.signature(loss)
    parameters = list(signature.parameters.values())
    named = {p.name for p in parameters[positional:]} & offered.keys()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        named = set(offered)
    chosen = {name: offered[name] for name in named}
    try:
        signature.bind(*[None] * positional, **chosen)
    except TypeError as error:
        raise RecipeError(
            f"the loss {getattr(loss, '__name__', loss)}{signature} can't be called: {error}; expected loss(model, batch), and "
            f"any of the keywords {', '.join(sorted(offered))}"
        ) from error
    return chosen
