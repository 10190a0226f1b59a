"""An engine's requests as the arrays that its programs take, and the programs' results as its tokens.

Arrays are on the host; a program takes all of them in one transfer.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .constraints.matchers import ConstraintCompiler
from .draw import DrawnTokens, RowSettings
from .programs import DraftedTokens, NextTokens, PromptChunk, PromptScores
from .requests import GeneratedToken
from .rows import EngineRow, PendingAnswer
from .sampling import Sampling

_NO_SAMPLING = Sampling(temperature=0.0)
"""Settings of rows without an answer."""


def stack_chunks(
    answers: Sequence[PendingAnswer | None], rows: Sequence[int], chunk: int, vocab_size: int
) -> PromptChunk:
    """Return the next parts of prompts.

    Args:
        answers: Equally many for each group; None for those without an incomplete prompt.
        rows: Indices of their rows in their groups.
        chunk: Size of a part.
    """
    nothing = np.zeros(vocab_size, bool), np.zeros(vocab_size, np.float32)
    prompts = [() if each is None else each.request.prompt[each.filled : each.filled + chunk + 1] for each in answers]
    histories = [nothing if each is None else (each.in_prompt, each.bias) for each in answers]
    sampling = [each.request.sampling for each in answers if each is not None]

    def pad(tokens: Sequence[int]) -> list[int]:
        return [*tokens, *[0] * (chunk - len(tokens))]

    return PromptChunk(
        _host([pad(prompt[:chunk]) for prompt in prompts], np.int32),
        _host([pad(prompt[1 : chunk + 1]) for prompt in prompts], np.int32),
        _host(rows, np.int32),
        _host([0 if each is None else each.filled for each in answers], np.int32),
        _host([len(prompt[:chunk]) for prompt in prompts], np.int32),
        _host([in_prompt for in_prompt, _ in histories], bool),
        _host([bias for _, bias in histories], np.float32),
        _host(any(each.prompt_log_probabilities for each in sampling), bool),
        _host(any(each.top_log_probabilities for each in sampling), bool),
    )


def stack_tokens(answers: Sequence[PendingAnswer | None], rows: Sequence[EngineRow]) -> NextTokens:
    """Return the last token of each row.

    Args:
        answers: Those with a complete prompt; None for other rows.
    """
    starts = [each.position if each else _next_position(row) for each, row in zip(answers, rows, strict=True)]
    return NextTokens(
        _host([each.tokens[-1].token if each else 0 for each in answers], np.int32),
        _host(starts, np.int32),
        _host([each is not None for each in answers], bool),
        _host(any(each.request.sampling.top_log_probabilities for each in answers if each), bool),
    )


def stack_drafts(answers: Sequence[PendingAnswer | None], rows: Sequence[EngineRow], drafts: int) -> DraftedTokens:
    """Return the last token of each row, and the guesses after it.

    Args:
        answers: As for `stack_tokens`.
        drafts: Maximum number of guesses for a row. There are none under a constraint, which allows other tokens after each one.
    """
    starts = [each.position if each else _next_position(row) for each, row in zip(answers, rows, strict=True)]
    tokens = [[] if each is None else [each.tokens[-1].token, *_guess(each, drafts)] for each in answers]
    return DraftedTokens(
        _host([[*row, *[0] * (drafts + 1 - len(row))] for row in tokens], np.int32),
        _host(starts, np.int32),
        _host([len(row) for row in tokens], np.int32),
        _host(any(each.request.sampling.top_log_probabilities for each in answers if each), bool),
    )


def _guess(answer: PendingAnswer, drafts: int) -> list[int]:
    # The last token of an answer needs no guess after it.
    room = answer.request.sampling.tokens - len(answer.tokens) - 1
    if answer.lookup is None or answer.constraint is not None or room < 1:
        return []
    return answer.lookup.guess(min(drafts, room))


def stack_settings(answers: Sequence[PendingAnswer | None], constraints: ConstraintCompiler) -> RowSettings:
    """Return the settings of rows; those of rows without an answer have no effect."""
    sampling = [_NO_SAMPLING if each is None else each.request.sampling for each in answers]

    def column(name: str, dtype: Any) -> Any:
        return _host([getattr(each, name) for each in sampling], dtype)

    return RowSettings(
        column("temperature", np.float32),
        column("top_k", np.int32),
        column("top_p", np.float32),
        column("min_p", np.float32),
        column("repetition_penalty", np.float32),
        column("presence_penalty", np.float32),
        column("frequency_penalty", np.float32),
        _host([each.seed + (of.sample if of else 0) for each, of in zip(sampling, answers, strict=True)], np.uint32),
        _host([len(of.tokens) if of else 0 for of in answers], np.int32),
        constraints.stack([of.constraint if of else None for of in answers]),
    )


def read_scores(tokens: Sequence[int], scores: PromptScores, place: int) -> list[GeneratedToken]:
    """Return the tokens of a prompt with their scores.

    Args:
        place: Index of the prompt among those that were run together.
    """
    of_prompt = [values[place, : len(tokens)].tolist() for values in scores]
    return [
        GeneratedToken(token, log_probability, 0.0, ((likeliest, best),))
        for token, log_probability, likeliest, best in zip(tokens, *of_prompt, strict=True)
    ]


def read_token(drawn: DrawnTokens, row: int | tuple[int, int], sampling: Sampling) -> GeneratedToken:
    """Return the token that a row has drawn, or with drafts that of one of its places."""
    count = sampling.top_log_probabilities
    top = zip(drawn.top_tokens[row][:count].tolist(), drawn.top_log_probabilities[row][:count].tolist())
    return GeneratedToken(
        int(drawn.token[row]),
        float(drawn.log_probability[row]),
        float(drawn.sampling_log_probability[row]),
        tuple(top),
    )


def _next_position(row: EngineRow) -> int:
    """Return the position to which a row without a token writes: one that a prompt will overwrite before anything
    attends to it."""
    return len(row.prefix) if row.answer is None else row.answer.filled


def _host(value: Any, dtype: Any) -> Any:
    return np.array(value, dtype)
