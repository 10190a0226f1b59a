"""Bytes of text per target: the factor that converts a loss to bits per byte, which is independent of the
tokenizer."""

import math
from collections.abc import Iterable

import numpy as np

from .packing import Documents
from .tokenizer import Tokenizer

MEASURED_TOKENS = 2**20
"""Number of tokens of each part to measure; the first documents with these tokens stand for the others."""


def bytes_per_target(parts: Iterable[Documents], tokenizer: Tokenizer) -> float | None:
    """Return the UTF-8 bytes of text per target that carries loss; None if there is no target.

    A document's first token is never a target, so its bytes don't count; its end is a target without bytes.
    """
    num_bytes = num_targets = 0.0
    for documents in parts:
        found_bytes, found_targets, share = _measure(documents, tokenizer)
        num_bytes += found_bytes / share
        num_targets += found_targets / share
    return num_bytes / num_targets if num_targets else None


def _measure(documents: Documents, tokenizer: Tokenizer) -> tuple[int, int, float]:
    """Measure the first documents; return (bytes, targets, share of the tokens measured)."""
    store = documents.store
    store.check()
    num_bytes = num_targets = num_tokens = 0
    for start, length in zip(documents.starts.tolist(), documents.lengths.tolist(), strict=True):
        targets = store.tokens[start + 1 : start + length]
        if store.loss_mask is not None:
            targets = targets[store.loss_mask[start + 1 : start + length] != 0]
        text = tokenizer.decode(targets[~np.isin(targets, tokenizer.end_ids)])
        num_bytes += len(text.encode("utf-8", "replace"))
        num_targets += len(targets)
        num_tokens += length
        if num_tokens >= MEASURED_TOKENS:
            break
    return num_bytes, num_targets, num_tokens / documents.num_tokens


def bits_per_byte(nats_per_target: float, bytes_per_target: float) -> float:
    """Convert a loss to bits per byte of text.

    >>> round(bits_per_byte(math.log(2) * 6, bytes_per_target=3.0), 3)
    2.0
    """
    return nats_per_target / math.log(2) / bytes_per_target
