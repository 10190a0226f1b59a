"""Guesses of an answer's next tokens from its own beginning: what followed the last tokens when they occurred before.

Many answers repeat parts of their prompt: code, names, quotations. The engine runs the guessed tokens together with the last one
and keeps those that it draws itself, so that guesses change the time of an answer and not its tokens (speculative decoding,
arXiv:2211.17192, with drafts by lookup).
"""

from collections.abc import Sequence

LONGEST = 3
"""Tokens of the longest beginning that is looked up; shorter ones are tried if it has not occurred."""


class DraftLookup:
    """The tokens of a prompt and its answer, and where each short sequence of them occurred last.

    >>> lookup = DraftLookup((1, 2, 3, 4, 1, 2))
    >>> lookup.guess(5)
    [3, 4, 1, 2, 3]
    >>> lookup.add(9)
    >>> lookup.guess(3)
    []
    """

    def __init__(self, tokens: Sequence[int]):
        self._tokens: list[int] = []
        self._places: dict[tuple[int, ...], int] = {}
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """Append a token."""
        # Sequences that end before it: the last one has no token after it yet.
        end = len(self._tokens)
        for size in range(1, min(LONGEST, end) + 1):
            self._places[tuple(self._tokens[end - size :])] = end
        self._tokens.append(token)

    def guess(self, count: int) -> list[int]:
        """Return `count` tokens that followed the last ones before, or none.

        A repetition continues: after 1, 2, 1, 2 follow 1, 2, 1.
        """
        for size in range(min(LONGEST, len(self._tokens)), 0, -1):
            place = self._places.get(tuple(self._tokens[-size:]))
            if place is not None:
                period = len(self._tokens) - place
                return [self._tokens[place + offset % period] for offset in range(count)]
        return []
