"""Answers in the form of OpenAI's interface: of texts, and of chats."""

from collections.abc import Sequence
from typing import Any, Protocol

from ...data.text.tokenizer import Tokenizer
from ..requests import Completion, GeneratedToken, StreamEvent
from .bodies import ServedRequest

_FINISH = {"end": "stop", "stop": "stop", "length": "length"}


class ResponseForm(Protocol):
    """How answers are written.

    Attributes:
        prefix: Of the answer's id.
        whole, part: Names of a whole answer and of a part of a stream.
    """

    prefix: str
    whole: str
    part: str

    def choice(
        self, index: int, completion: Completion, served: ServedRequest, tokenizer: Tokenizer, prompt: Sequence[int]
    ) -> dict[str, Any]:
        """Return a whole answer."""
        ...

    def first(self, index: int, served: ServedRequest, tokenizer: Tokenizer) -> list[dict[str, Any]]:
        """Return the parts of a stream before the first token."""
        ...

    def delta(
        self, index: int, event: StreamEvent, served: ServedRequest, tokenizer: Tokenizer
    ) -> dict[str, Any] | None:
        """Return the part of a stream for an event; None if it has nothing new."""
        ...


class _Text:
    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def choice(
        self, index: int, completion: Completion, served: ServedRequest, tokenizer: Tokenizer, prompt: Sequence[int]
    ) -> dict[str, Any]:
        tokens = completion.tokens if served.answers else ()
        text = completion.text if served.answers else ""
        logprobs = None
        if served.log_probabilities is not None:
            scored = [None, *completion.prompt_tokens] if served.echo else []
            logprobs = _text_log_probabilities([*scored, *tokens], prompt, served, tokenizer)
        return {
            "index": index,
            "text": (tokenizer.decode(prompt) if served.echo else "") + text,
            "logprobs": logprobs,
            "finish_reason": _FINISH[completion.finish],
        }

    def first(self, index: int, served: ServedRequest, tokenizer: Tokenizer) -> list[dict[str, Any]]:
        if not served.echo:
            return []
        prompt = served.requests[index // served.requests[0].sampling.n].prompt
        return [{"index": index, "text": tokenizer.decode(prompt), "logprobs": None, "finish_reason": None}]

    def delta(
        self, index: int, event: StreamEvent, served: ServedRequest, tokenizer: Tokenizer
    ) -> dict[str, Any] | None:
        finish = None if event.completion is None else _FINISH[event.completion.finish]
        scored = served.log_probabilities is not None and served.answers
        # Characters may be incomplete after a token, whose log-probability is sent all the same.
        if not event.text and finish is None and not scored:
            return None
        logprobs = None
        if scored and event.token is not None:
            logprobs = _text_log_probabilities([event.token], (), served, tokenizer)
        text = event.text if served.answers else ""
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


class _Chat:
    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(
        self, index: int, completion: Completion, served: ServedRequest, tokenizer: Tokenizer, prompt: Sequence[int]
    ) -> dict[str, Any]:
        logprobs = None
        if served.log_probabilities is not None:
            logprobs = {"content": [_chat_log_probability(each, tokenizer) for each in completion.tokens]}
        return {
            "index": index,
            "message": {"role": "assistant", "content": completion.text},
            "logprobs": logprobs,
            "finish_reason": _FINISH[completion.finish],
        }

    def first(self, index: int, served: ServedRequest, tokenizer: Tokenizer) -> list[dict[str, Any]]:
        return [
            {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        ]

    def delta(
        self, index: int, event: StreamEvent, served: ServedRequest, tokenizer: Tokenizer
    ) -> dict[str, Any] | None:
        finish = None if event.completion is None else _FINISH[event.completion.finish]
        scored = served.log_probabilities is not None and served.answers
        # Characters may be incomplete after a token, whose log-probability is sent all the same.
        if not event.text and finish is None and not scored:
            return None
        logprobs = None
        if scored and event.token is not None:
            logprobs = {"content": [_chat_log_probability(event.token, tokenizer)]}
        delta = {"content": event.text} if event.text else {}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


TEXT: ResponseForm = _Text()
CHAT: ResponseForm = _Chat()


def usage(served: ServedRequest, completions: Sequence[Completion]) -> dict[str, int]:
    """Return the numbers of tokens of a request and its answers."""
    prompt = sum(len(each.prompt) for each in served.requests)
    answer = sum(len(each.tokens) for each in completions) if served.answers else 0
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


def _text_log_probabilities(
    tokens: Sequence[GeneratedToken | None], prompt: Sequence[int], served: ServedRequest, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Return the log-probabilities of tokens; None stands for a prompt's first token, which has none."""
    texts, values, top, offsets, length = [], [], [], [], 0
    for token in tokens:
        text = tokenizer.decode([prompt[0] if token is None else token.token])
        texts.append(text)
        values.append(None if token is None else token.log_probability)
        likely = None
        if token is not None and served.log_probabilities:
            likely = {tokenizer.decode([each]): value for each, value in token.top} | {text: token.log_probability}
        top.append(likely)
        offsets.append(length)
        length += len(text)
    return {"tokens": texts, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}


def _chat_log_probability(token: GeneratedToken, tokenizer: Tokenizer) -> dict[str, Any]:
    def one(number: int, value: float) -> dict[str, Any]:
        text = tokenizer.decode([number])
        return {"token": text, "logprob": value, "bytes": list(text.encode())}

    return one(token.token, token.log_probability) | {"top_logprobs": [one(*each) for each in token.top]}
