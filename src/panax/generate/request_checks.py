"""Checks of a request against the engine that is to answer it."""

from ..core.errors import DataError, RecipeError
from ..core.protocols import IncrementalModel
from .requests import GenerationRequest
from .sampling import MAX_SEED


def check_request(request: GenerationRequest, model: IncrementalModel, *, limit: int, has_tokenizer: bool) -> None:
    """Check that an engine can answer a request, whatever its constraint.

    Args:
        limit: Maximum positions of prompt and answer together.
        has_tokenizer: True if the engine has a tokenizer.

    Raises:
        DataError: The prompt is empty, or has a token outside of the vocabulary.
        RecipeError: Prompt and answer are longer than a row, or a setting needs a tokenizer or another token.
    """
    prompt, sampling, vocab = request.prompt, request.sampling, model.vocab_size
    if not prompt:
        raise DataError("the prompt has no token; pass at least one to continue")
    if bad := [token for token in prompt if not 0 <= token < vocab]:
        raise DataError(
            f"the prompt holds the token {bad[0]}; the model has tokens 0 to {vocab - 1}: encode it with the model's own "
            f"tokenizer"
        )
    if len(prompt) + sampling.tokens > limit:
        raise RecipeError(
            f"{len(prompt)} prompt tokens and {sampling.tokens} new ones are {len(prompt) + sampling.tokens}; this engine has "
            f"{limit} positions for both (the model is for at most {model.max_length}): shorten the prompt, or ask for fewer"
        )
    if request.seeds and (len(request.seeds) != sampling.n or not all(0 <= each <= MAX_SEED for each in request.seeds)):
        raise RecipeError(
            f"seeds={request.seeds}; expected one for each of the n={sampling.n} answers, from 0 to {MAX_SEED}"
        )
    if sampling.stop and not has_tokenizer:
        raise RecipeError("stop texts need a tokenizer; pass one to the engine, or use stop_ids")
    if bad := [token for token in [*sampling.bias, *sampling.stop_ids] if not 0 <= token < vocab]:
        raise RecipeError(f"bias or stop_ids name the token {bad[0]}; the model has tokens 0 to {vocab - 1}")
