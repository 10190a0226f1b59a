"""The rows of an engine: which request each holds, and which row's cache a new request can use."""

import dataclasses
from collections.abc import Collection, Sequence

from .constraints.matchers import AnswerConstraint
from .drafts import DraftLookup
from .requests import Completion, FinishReason, GeneratedToken, GenerationRequest
from .text import AnswerText


@dataclasses.dataclass
class PendingAnswer:
    """An answer in progress.

    Attributes:
        number: Index of its request.
        sample: Index among the request's answers.
        text: None without a tokenizer.
        filled: Number of prompt positions in the cache.
        prompt_scores: The prompt's tokens after the first, as far as they are scored.
        reused: Number of prompt positions that were copied.
        order: Smaller for an answer that was admitted to a row earlier.
        leader: Answer to the same request that computes the prompt for this one too; None for one that computes its own.
        row: Index of its row, once it has one.
        constraint: None without one.
        lookup: Where guesses come from; None without drafts.
    """

    number: int
    sample: int
    request: GenerationRequest
    text: AnswerText | None
    constraint: AnswerConstraint | None = None
    lookup: DraftLookup | None = None
    filled: int = 0
    tokens: list[GeneratedToken] = dataclasses.field(default_factory=list)
    prompt_scores: list[GeneratedToken] = dataclasses.field(default_factory=list)
    reused: int = 0
    order: int = 0
    leader: "PendingAnswer | None" = None
    row: int = -1

    @property
    def is_prefilling(self) -> bool:
        return self.filled < len(self.request.prompt)

    @property
    def position(self) -> int:
        """Position of the last token, which is not in the cache yet."""
        return len(self.request.prompt) + len(self.tokens) - 1

    def accept(self, token: GeneratedToken, end_ids: Collection[int]) -> tuple[str, FinishReason | None]:
        """Add a drawn token, unless it ends the answer; return the text that is new, and why the answer ends, if it does.

        Args:
            end_ids: Tokens that end every answer.
        """
        sampling = self.request.sampling
        is_end = not sampling.ignore_end and token.token in end_ids
        if is_end or token.token in sampling.stop_ids:
            return "", "end" if is_end else "stop"
        self.tokens.append(token)
        if self.lookup is not None:
            self.lookup.add(token.token)
        text = "" if self.text is None else self.text.add(token.token)
        if self.text is not None and self.text.is_stopped:
            return text, "stop"
        if self.constraint is not None and (ended := self.constraint.accept(token.token)):
            return text, ended
        return text, "length" if len(self.tokens) == sampling.tokens else None

    def complete(self, finish: FinishReason, end: GeneratedToken | None) -> Completion:
        """Return the whole answer.

        Args:
            end: The token that ended it and is not a part of it; None if there is none.
        """
        return Completion(
            self.number,
            self.sample,
            tuple(self.tokens),
            "" if self.text is None else self.text.text,
            finish,
            tuple(self.prompt_scores),
            self.reused,
            self.constraint.error if self.constraint is not None and finish == "error" else "",
            end,
        )


@dataclasses.dataclass
class EngineRow:
    """A row of the caches.

    Attributes:
        answer: None for a free row.
        prefix: Tokens of the positions that were filled by whole chunks of a prompt; they remain after the request.
    """

    answer: PendingAnswer | None = None
    prefix: tuple[int, ...] = ()


def choose_rows(
    rows: Sequence[EngineRow], prompt: Sequence[int], chunk: int, *, shares: bool, groups: int = 1
) -> tuple[int, int, int] | None:
    """Choose a free row for a prompt.

    A prompt waits while another one that begins alike is computed: its turn would not come before.

    Args:
        chunk: Size of a chunk; only whole ones are shared, so that a prompt is computed in the same chunks in any
            case. The last token is always computed, since the answer's first token is drawn from it.
        shares: True if rows with a common beginning may share it.
        groups: Number of groups of adjacent rows; a row is copied within its group only.

    Returns:
        The row, the row that holds the longest common beginning (it may be the same one), and its length, 0 without
        any; None if no row is free, or the prompt waits.
    """
    free = {index for index, row in enumerate(rows) if row.answer is None}
    if not free:
        return None
    size = len(rows) // groups
    if groups == 1 and not (shares and len(prompt) > chunk):
        return min(free, key=lambda index: (len(rows[index].prefix), index)), 0, 0
    with_free = {index // size for index in free}
    begin = prompt[: len(prompt) - 1]
    shares = shares and len(begin) >= chunk
    lengths = [common_prefix(row.prefix, begin) // chunk * chunk if shares else 0 for row in rows]
    source = max(
        (index for index in range(len(rows)) if index // size in with_free),
        key=lambda index: (lengths[index], index in free, -index),
    )
    prefilling = [row.answer.request.prompt for row in rows if row.answer is not None and row.answer.is_prefilling]
    # Groups run their prompts at the same time, so that waiting for another group would lose a turn.
    if (
        shares
        and groups == 1
        and any(common_prefix(each, begin) // chunk * chunk > lengths[source] for each in prefilling)
    ):
        return None
    if lengths[source] and source in free:
        return source, source, lengths[source]
    waiting = [
        sum(row.answer is not None and row.answer.is_prefilling for row in rows[first : first + size])
        for first in range(0, len(rows), size)
    ]
    candidates = [index for index in free if index // size == source // size] if lengths[source] else free
    # A group with few prompts before this one; in it, the free row with the least that others might share.
    target = min(candidates, key=lambda index: (waiting[index // size], len(rows[index].prefix), index))
    return target, source, lengths[source]


def first_prompts(rows: Sequence[EngineRow], group: range, count: int) -> list[int | None]:
    """Return the rows of a group with the `count` incomplete prompts that were admitted first, and None in place of missing ones.

    Args:
        group: Indices of the group's rows.
    """
    answers = [(rows[index].answer, index) for index in group]
    admitted = sorted(
        (answer.order, index)
        for answer, index in answers
        if answer is not None and answer.leader is None and answer.is_prefilling
    )
    chosen = [index for _, index in admitted[:count]]
    return [*chosen, *[None] * (count - len(chosen))]


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common beginning.

    >>> common_prefix((1, 2, 3), (1, 2, 4, 5))
    2
    """
    limit = min(len(first), len(second))
    return next((place for place in range(limit) if first[place] != second[place]), limit)
