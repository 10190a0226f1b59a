"""Text of an answer while its tokens arrive: whole characters, and stop texts that may span tokens."""

from collections.abc import Sequence

from ..data.text.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Character to which a tokenizer decodes bytes that are not a whole character."""

CONTEXT_TOKENS = 8
"""Tokens that are decoded again beside new ones: a token may be spelled in another way at the beginning of a text."""

MAX_CHARACTER_TOKENS = 8
"""Tokens after which bytes that are no character are passed on as replacement characters."""


class AnswerText:
    """The text of one answer, by tokens.

    >>> class Letters:
    ...     def decode(self, ids): return "".join(map(chr, ids))
    >>> text = AnswerText(Letters(), ("xyz",))
    >>> [text.add(ord(letter)) for letter in "axyb"]
    ['a', '', '', 'xyb']
    >>> [text.add(ord(letter)) for letter in "cxyz"], text.is_stopped, text.text
    (['c', '', '', ''], True, 'axybc')
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], *, pieces: bool = True):
        """
        Args:
            pieces: False if the text is read at its end alone, and tokens are decoded then unless a stop text may end it.
        """
        self._tokenizer, self._stop = tokenizer, stop
        self._waits = not pieces and not stop
        self._ids: list[int] = []
        self._begin = self._end = 0
        self._decoded = ""
        self._passed = 0
        self.is_stopped = False

    @property
    def text(self) -> str:
        """Return the text that has been passed on."""
        return self._decoded[: self._passed]

    def add(self, token: int) -> str:
        """Add a token; return the text that is final now, "" while a character or a stop text may be incomplete."""
        self._ids.append(token)
        if self._waits:
            return ""
        before = self._tokenizer.decode(self._ids[self._begin : self._end])
        now = self._tokenizer.decode(self._ids[self._begin :])
        is_incomplete = now.endswith(REPLACEMENT) and len(self._ids) - self._end < MAX_CHARACTER_TOKENS
        if is_incomplete or len(now) < len(before):
            return ""
        self._decoded += now[len(before) :]
        self._end = len(self._ids)
        self._begin = max(0, self._end - CONTEXT_TOKENS)
        return self._pass_on(self._find_stop())

    def finish(self) -> str:
        """Return the rest of the text after the last token."""
        if not self.is_stopped:
            before = self._tokenizer.decode(self._ids[self._begin : self._end])
            self._decoded += self._tokenizer.decode(self._ids[self._begin :])[len(before) :]
            self._end = len(self._ids)
            self._find_stop()
        return self._pass_on(len(self._decoded))

    def _find_stop(self) -> int:
        """Cut the text at a stop text; return the length of the text that can't be the beginning of one."""
        places = [place for stop in self._stop if (place := self._decoded.find(stop, self._passed)) >= 0]
        if places:
            self.is_stopped = True
            self._decoded = self._decoded[: min(places)]
            return len(self._decoded)
        tail = self._decoded[self._passed :]
        held = (size for stop in self._stop for size in range(1, len(stop)) if tail.endswith(stop[:size]))
        return len(self._decoded) - max(held, default=0)

    def _pass_on(self, end: int) -> str:
        new, self._passed = self._decoded[self._passed : end], end
        return new
