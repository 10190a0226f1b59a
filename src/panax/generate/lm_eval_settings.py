"""Settings of generation in lm-eval's tasks, as those of the engine."""

from collections.abc import Mapping
from typing import Any

from ..core.errors import RecipeError, suggest_name
from .sampling import MAX_SEED, Sampling

_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the maximum number of tokens; the first that is set counts."""

_DRAWS = ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""Settings that have the same name in `Sampling`."""

_KNOWN = {*_LENGTHS, *_DRAWS, "until", "do_sample", "temperature", "seed"}


def read_settings(settings: Mapping[str, Any], default_tokens: int, seed: int) -> Sampling:
    """Return the settings of a request's answer.

    Args:
        settings: A task's `generation_kwargs`. Without `do_sample`, an answer is sampled if `temperature` is above 0; with
            `do_sample` false, it is the likeliest one.
        default_tokens: Maximum number of tokens if none is set.
        seed: Seed of the draws unless set.

    Raises:
        RecipeError: A setting is unknown or out of range.

    >>> read_settings({"until": ["\\n", ""], "max_gen_toks": 8}, 256, 0).stop
    ('\\n',)
    >>> read_settings({"do_sample": False, "temperature": 0.7}, 256, 0).temperature
    0.0
    """
    unknown = [name for name in settings if name not in _KNOWN]
    if unknown:
        raise RecipeError(
            f"the task's generation_kwargs has {unknown[0]!r}, which is not supported; {suggest_name(unknown[0], _KNOWN)}"
        )
    until = settings.get("until") or ()
    until = (until,) if isinstance(until, str) else tuple(until)
    if not all(isinstance(each, str) for each in until):
        raise RecipeError(f"the task's generation_kwargs has until={until!r}; expected texts")
    lengths = [settings[name] for name in _LENGTHS if settings.get(name) is not None]
    do_sample, temperature = settings.get("do_sample"), settings.get("temperature")
    if do_sample is False or (do_sample is None and temperature is None):
        temperature = 0.0
    return Sampling(
        tokens=int(lengths[0]) if lengths else default_tokens,
        temperature=1.0 if temperature is None else float(temperature),
        stop=tuple(text for text in until if text),
        seed=(int(settings.get("seed") or 0) + seed) & MAX_SEED,
        **{name: settings[name] for name in _DRAWS if settings.get(name) is not None},
    )
