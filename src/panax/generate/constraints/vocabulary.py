"""A tokenizer's vocabulary as llguidance reads it: the bytes of each token."""

import contextlib
import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...core.errors import RecipeError
from ...core.install_hints import install_command
from ...data.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def create_vocabulary(tokenizer: Tokenizer, size: int) -> "llguidance.LLTokenizer":
    """Read the bytes of each token.

    Args:
        size: Size of the model's vocabulary; ids without a token are never allowed.

    Raises:
        RecipeError: llguidance is not installed, or the bytes of tokens depend on other tokens.
    """
    if importlib.util.find_spec("llguidance") is None:
        raise RecipeError(
            f"an answer's constraint needs llguidance, which is not installed; install it with: "
            f"{install_command('structured')}"
        )
    import llguidance

    ends, size = list(tokenizer.end_ids), max(size, tokenizer.vocab_size)
    # Tokenizers of bytes, which are nearly all. llguidance refuses others.
    with contextlib.suppress(ValueError):
        return llguidance.LLTokenizer(tokenizer.to_json(), n_vocab=size, eos_token=ends)
    return llguidance.LLTokenizer(_Texts(tokenizer), n_vocab=size, eos_token=ends)  # pyright: ignore[reportArgumentType]


class _Texts:
    """A tokenizer with texts as tokens, in the form that llguidance calls.

    Raises:
        RecipeError: A text is not that of its tokens, one after the other.
    """

    bos_token_id = None
    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer):
        texts = [tokenizer.decode([number]) for number in range(tokenizer.vocab_size)]
        if tokenizer.decode(range(tokenizer.vocab_size)) != "".join(texts) or any(
            REPLACEMENT in text for text in texts
        ):
            raise RecipeError(
                "a constraint can't be used with this tokenizer: the text of a token depends on the tokens beside it (as in "
                "WordPiece), or is not a whole character; use a tokenizer of bytes or of characters"
            )
        self.eos_token_id = tokenizer.end_of_document
        self.special_token_ids = sorted({*tokenizer.all_special_ids, *tokenizer.end_ids})
        self.tokens = [text.encode() for text in texts]
        special = set(self.special_token_ids)
        self._ids = {text: number for number, text in enumerate(self.tokens) if text and number not in special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: bytes | str) -> Sequence[int]:
        """Split bytes into the longest tokens; return none if they can't be split."""
        data, ids, place = text.encode() if isinstance(text, str) else text, [], 0
        while place < len(data):
            sizes = range(min(self._longest, len(data) - place), 0, -1)
            size = next((size for size in sizes if data[place : place + size] in self._ids), 0)
            if not size:
                return []
            ids.append(self._ids[data[place : place + size]])
            place += size
        return ids
