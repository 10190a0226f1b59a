"""Draws of a rollout by an engine."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

from ..generate import Completion, GenerationEngine, GenerationRequest

_EVENTS = 64
"""Number of events after which progress is reported."""


def draw_answers(
    engine: GenerationEngine, requests: Sequence[GenerationRequest], on_progress: Callable[[], None]
) -> Iterator[Completion]:
    """Yield the answers to requests as they end.

    Args:
        on_progress: Called often while tokens are drawn; an exception from it abandons the draws.
    """
    with contextlib.closing(engine.stream(requests)) as events:
        for number, event in enumerate(events):
            if number % _EVENTS == 0:
                on_progress()
            if event.completion is not None:
                yield event.completion
