"""Bodies of requests in OpenAI's interface, as requests of the engine. Unknown or unsupported fields are refused by name."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ...core.errors import RecipeError, suggest_name
from ...data.text.tokenizer import Tokenizer
from ..constraints import Constraint, Grammar, JsonSchema, Regex
from ..prompts import encode_conversation, encode_prompt
from ..requests import GenerationRequest
from ..sampling import Sampling
from ..tools import OfferedTools, read_tools
from .messages import read_messages

_NUMBERS = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty", "repetition_penalty": "repetition_penalty", "seed": "seed", "n": "n",
}  # fmt: skip
"""Fields that are settings of `Sampling`."""

_SHARED = {
    *_NUMBERS,
    "model",
    "max_tokens",
    "stop",
    "stream",
    "stream_options",
    "logit_bias",
    "user",
    "response_format",
}
COMPLETION_FIELDS = {*_SHARED, "prompt", "logprobs", "echo"}
CHAT_FIELDS = {
    *_SHARED, "messages", "max_completion_tokens", "logprobs", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls",
}  # fmt: skip

_DEFAULT_TOKENS = 16
"""Of completions, as OpenAI has it."""

_DEFAULT_CHAT_TOKENS = 512

MAX_ANSWERS = 128
"""Maximum number of answers to one request: prompts times `n`."""


@dataclasses.dataclass(frozen=True)
class ServedRequest:
    """A request as read from a body.

    Attributes:
        requests: One for each prompt.
        log_probabilities: Number of likely tokens to return beside each; None returns no log-probabilities.
        echo: Return the prompt before the answer.
        answers: False for `max_tokens` 0, which scores a prompt alone.
        tools: Tools that the model may call.
    """

    requests: list[GenerationRequest]
    stream: bool
    includes_usage: bool
    log_probabilities: int | None = None
    echo: bool = False
    answers: bool = True
    tools: OfferedTools | None = None


def read_completion(body: Any, tokenizer: Tokenizer, model: str) -> ServedRequest:
    """Read the body of /v1/completions.

    Raises:
        RecipeError: A field is unknown, of a wrong type or out of range.
    """
    _check_fields(body, COMPLETION_FIELDS, model)
    tokens = _integer(body, "max_tokens", _DEFAULT_TOKENS)
    if _flag(body, "stream") and _flag(body, "echo") and body.get("logprobs") is not None:
        raise RecipeError("stream with echo and logprobs is not supported; ask for the whole answer (stream=false)")
    echo, logprobs = _flag(body, "echo"), body.get("logprobs")
    if logprobs is not None:
        logprobs = _integer(body, "logprobs", 0)
    if echo and logprobs is not None and logprobs > 1:
        raise RecipeError(
            f"logprobs={logprobs} with echo; expected at most 1: the likeliest token in place of each prompt token"
        )
    if tokens == 0 and not echo:
        raise RecipeError("max_tokens=0; expected 1 or more, or echo=true to score the prompt alone")
    sampling = dataclasses.replace(
        _sampling(body, max(tokens, 1)),
        top_log_probabilities=logprobs or 0,
        prompt_log_probabilities=echo and logprobs is not None,
        # A client that scores a prompt drops the one token after it, also if it ends the answer.
        ignore_end=echo and logprobs is not None and tokens == 1,
    )
    requests = [GenerationRequest(tuple(ids), sampling) for ids in _prompts(body.get("prompt"), tokenizer)]
    _check_answers(len(requests), sampling.n)
    return ServedRequest(requests, *_streaming(body), logprobs, echo, tokens > 0)


def read_chat(body: Any, tokenizer: Tokenizer, model: str) -> ServedRequest:
    """Read the body of /v1/chat/completions.

    Raises:
        RecipeError: A field is unknown, of a wrong type or out of range; or the chat template fails.
    """
    _check_fields(body, CHAT_FIELDS, model)
    name = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    sampling = _sampling(body, _integer(body, name, _DEFAULT_CHAT_TOKENS))
    wants = _flag(body, "logprobs")
    top = _integer(body, "top_logprobs", 0)
    if top and not wants:
        raise RecipeError("top_logprobs needs logprobs=true; pass that too, or remove it")
    _check_answers(1, sampling.n)
    messages, tools = read_messages(body.get("messages")), read_tools(body, tokenizer)
    if tools is not None and sampling.constraint is not None:
        raise RecipeError("response_format with tools is not supported; pass one of them, or tool_choice='none'")
    ids = encode_conversation(tokenizer, messages, () if tools is None else tools.tools)
    constraint = sampling.constraint if tools is None else tools.grammar
    sampling = dataclasses.replace(sampling, top_log_probabilities=top, constraint=constraint)
    return ServedRequest(
        [GenerationRequest(tuple(ids), sampling)], *_streaming(body), top if wants else None, tools=tools
    )


def _check_answers(prompts: int, n: int) -> None:
    if prompts * n > MAX_ANSWERS:
        raise RecipeError(
            f"{prompts} prompts with n={n} are {prompts * n} answers; expected at most {MAX_ANSWERS} at once"
        )


def _check_fields(body: Any, known: set[str], model: str) -> None:
    if not isinstance(body, Mapping):
        raise RecipeError("the body is not a JSON object; expected one with the fields of the interface")
    for name, value in body.items():
        if name not in known and value is not None:
            raise RecipeError(f"unknown or unsupported field {name!r}; {suggest_name(str(name), known)}")
    asked = body.get("model", model)
    if asked != model:
        raise RecipeError(f"the model {asked!r} is not served here; expected {model!r}, or no model")


def _sampling(body: Mapping[str, Any], tokens: int) -> Sampling:
    settings = {ours: body[name] for name, ours in _NUMBERS.items() if body.get(name) is not None}
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RecipeError(f"{name}={value!r}; expected a number")
    bias = body.get("logit_bias") or {}
    if not isinstance(bias, Mapping) or not all(
        str(token).isdecimal() and isinstance(value, int | float) and not isinstance(value, bool)
        for token, value in bias.items()
    ):
        raise RecipeError(f"logit_bias={bias!r}; expected an object of token ids and numbers")
    stop = body.get("stop") or ()
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list | tuple) or not all(isinstance(each, str) for each in stop):
        raise RecipeError(f"stop={stop!r}; expected a text or a list of texts")
    return Sampling(
        tokens=tokens,
        bias={int(token): float(value) for token, value in bias.items()},
        stop=tuple(stop),
        constraint=_read_format(body.get("response_format")),
        **settings,
    )


def _read_format(form: Any) -> Constraint | None:
    """Read `response_format`: OpenAI's types, and `regex` with a `pattern` and `grammar` with `rules`."""
    kind = form.get("type") if isinstance(form, Mapping) else None
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        return JsonSchema({"type": "object"})
    if kind == "json_schema" and isinstance(inner := form.get("json_schema"), Mapping):
        known = ("name", "description", "schema", "strict")
        if unknown := [name for name in inner if name not in known]:
            raise RecipeError(
                f"response_format.json_schema: unknown field {unknown[0]!r}; {suggest_name(unknown[0], known)}"
            )
        if isinstance(schema := inner.get("schema"), Mapping):
            return JsonSchema(schema)
        raise RecipeError("response_format.json_schema.schema: expected a JSON schema, which is an object")
    if kind == "regex" and isinstance(pattern := form.get("pattern"), str):
        return Regex(pattern)
    if kind == "grammar" and isinstance(rules := form.get("rules"), str):
        return Grammar(rules)
    raise RecipeError(
        f"response_format={str(form)[:80]}; expected the type 'text', 'json_object', 'json_schema' with json_schema.schema, "
        f"'regex' with a pattern, or 'grammar' with rules"
    )


def _prompts(prompt: Any, tokenizer: Tokenizer) -> list[list[int]]:
    """Return the ids of a prompt, or of a list of prompts: each a text or a list of ids."""
    if isinstance(prompt, str):
        return [encode_prompt(tokenizer, prompt)]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(each, int) and not isinstance(each, bool) for each in prompt):
            return [prompt]
        if all(isinstance(each, str) for each in prompt):
            return [encode_prompt(tokenizer, each) for each in prompt]
        if all(isinstance(each, list) and each and all(type(token) is int for token in each) for each in prompt):
            return prompt
    raise RecipeError("prompt: expected a text, a list of token ids, or a list of either; each with a token at least")


def _streaming(body: Mapping[str, Any]) -> tuple[bool, bool]:
    options = body.get("stream_options") or {}
    if not isinstance(options, Mapping):
        raise RecipeError(f"stream_options={options!r}; expected an object")
    return _flag(body, "stream"), _flag(options, "include_usage")


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise RecipeError(f"{name}={value!r}; expected true or false")
    return bool(value)


def _integer(body: Mapping[str, Any], name: str, default: int) -> int:
    value = body.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise RecipeError(f"{name}={value!r}; expected an integer, 0 or more")
    return value
