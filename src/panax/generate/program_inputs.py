"""An engine's requests as the arrays that its programs take, and the programs' results as its tokens.

Arrays are on the host; a program takes all of them in one transfer.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .constraints.matchers import ConstraintCompiler
from .decode_steps import RowEnds
from .draw import DrawnTokens, RowSettings
from .programs import DraftedTokens, NextTokens, PromptChunk, PromptScores
from .requests import GeneratedToken
from .rows import EngineRow, PendingAnswer
from .sampling import Sampling

STOP_IDS = 4
"""Stop tokens of a request that a program of several steps knows."""

_NO_SAMPLING = Sampling(temperature=0.0)
"""Settings of rows without an answer."""


def stack_chunks(
    answers: Sequence[PendingAnswer | None], rows: Sequence[Sequence[int]], chunk: int, vocab_size: int
) -> PromptChunk:
    """Return the next parts of prompts.

    Args:
        answers: Equally many for each group; None for those without an incomplete prompt.
        rows: Indices, in their groups, of the rows that get each prompt.
        chunk: Size of a part.
    """
    prompts = [() if each is None else each.request.prompt[each.filled : each.filled + chunk + 1] for each in answers]
    in_prompt, bias = np.zeros((len(answers), vocab_size), bool), np.zeros((len(answers), vocab_size), np.float32)
    for place, each in enumerate(answers):
        if each is not None:
            in_prompt[place, list(each.request.prompt)] = True
            for token, value in each.request.sampling.bias.items():
                bias[place, token] = value
    sampling = [each.request.sampling for each in answers if each is not None]

    def pad(tokens: Sequence[int]) -> list[int]:
        return [*tokens, *[0] * (chunk - len(tokens))]

    return PromptChunk(
        _host([pad(prompt[:chunk]) for prompt in prompts], np.int32),
        _host([pad(prompt[1 : chunk + 1]) for prompt in prompts], np.int32),
        _host(rows, np.int32),
        _host([0 if each is None else each.filled for each in answers], np.int32),
        _host([len(prompt[:chunk]) for prompt in prompts], np.int32),
        _host(in_prompt, bool),
        _host(bias, np.float32),
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


def stack_ends(answers: Sequence[PendingAnswer | None], end_ids: Sequence[int]) -> RowEnds:
    """Return when rows end, as far as a program knows: it may draw more, which the host drops.

    Args:
        answers: As for `stack_tokens`.
        end_ids: Tokens that end every answer.
    """
    # The host knows what may follow under a constraint.
    room = [
        0 if each is None else 1 if each.constraint else each.request.sampling.tokens - len(each.tokens)
        for each in answers
    ]
    ends = np.full((len(answers), len(end_ids) + STOP_IDS), -1, np.int32)
    for place, each in enumerate(answers):
        if each is not None:
            stops = each.request.sampling.stop_ids[:STOP_IDS]
            known = [*stops] if each.request.sampling.ignore_end else [*stops, *end_ids]
            ends[place, : len(known)] = known
    return RowEnds(_host(room, np.int32), _host(ends, np.int32))


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
        _host([of.request.seed(of.sample) if of else 0 for of in answers], np.uint32),
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
    top = (
        zip(drawn.top_tokens[row][:count].tolist(), drawn.top_log_probabilities[row][:count].tolist()) if count else ()
    )
    return GeneratedToken(
        int(drawn.token[row]),
        float(drawn.log_probability[row]),
        float(drawn.sampling_log_probability[row]),
        tuple(top),
        tuple(drawn.kept[row].tolist()) if drawn.kept.shape[-1] else (),
        int(drawn.kept_count[row]),
    )


def _next_position(row: EngineRow) -> int:
    """Return the position to which a row without a token writes: one that a prompt will overwrite before anything
    attends to it."""
    return len(row.prefix) if row.answer is None else row.answer.filled


def _host(value: Any, dtype: Any) -> Any:
    return np.array(value, dtype)
