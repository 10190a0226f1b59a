"""Conversion of batches with transformers' names (`input_ids`, `labels`, `attention_mask`) to a decoder's
batches.

In transformers, labels are the tokens themselves, which the model shifts; -100 masks a position. Here,
targets are already shifted.

Source: transformers' `ForCausalLMLoss` and its causal models' forward passes, version 5.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...core.batch_checks import MASK_LEAF
from ...core.errors import DataError
from ...core.protocols import Axes

IGNORED = -100
_THEIRS = {
    "input_ids": ("tokens",),
    "labels": ("targets", MASK_LEAF),
    "attention_mask": ("segment",),
    "position_ids": ("position",),
}
_OURS = frozenset(name for names in _THEIRS.values() for name in names)


def to_decoder_axes(axes: Mapping[str, Axes], known: Mapping[str, Axes]) -> Mapping[str, Axes]:
    """Return the axes of a decoder's leaves from those of an unconverted batch.

    Args:
        known: The axes of all leaves that a decoder accepts.
    """
    if not _is_theirs(axes):
        return axes
    _check_names(axes)
    return {new: known[new] if new in known else axes[name] for name in axes for new in _THEIRS.get(name, (name,))}


def to_decoder_batch(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert a batch to `tokens`, `targets`, `loss_mask`, and, if possible, `segment` and `position`.

    Raises:
        DataError: The batch mixes both naming schemes, lacks a leaf, or has an unmasked label that would be
            predicted from a position masked by `attention_mask`.

    >>> batch = {"input_ids": np.array([[5, 6, 7]]), "labels": np.array([[-100, 6, 7]])}
    >>> {name: leaf.tolist() for name, leaf in to_decoder_batch(batch).items()}
    {'tokens': [[5, 6, 7]], 'targets': [[6, 7, 0]], 'loss_mask': [[1.0, 1.0, 0.0]]}
    """
    if not _is_theirs(batch):
        return batch
    _check_names(batch)
    decoder_batch: dict[str, Any] = {name: leaf for name, leaf in batch.items() if name not in _THEIRS}
    tokens, labels = np.asarray(batch["input_ids"]), np.asarray(batch["labels"])
    if labels.shape != tokens.shape or labels.ndim != 2:
        raise DataError(
            f"the batch's leaf 'labels' has the shape {labels.shape}, and 'input_ids' {tokens.shape}; expected one label for "
            f"each token, (batch, seq)"
        )
    if labels.dtype.kind != "i":
        raise DataError(
            f"the batch's leaf 'labels' holds {labels.dtype}; expected signed integers, as {IGNORED} is one"
        )
    # The last position has no target within the row.
    following = np.concatenate([labels[:, 1:], np.full_like(labels[:, :1], IGNORED)], axis=1)
    counts = following != IGNORED
    decoder_batch |= {"tokens": tokens, "targets": np.where(counts, following, 0), MASK_LEAF: counts.astype(np.float32)}
    if "attention_mask" in batch:
        decoder_batch["segment"] = _segments(np.asarray(batch["attention_mask"]), counts)
    if "position_ids" in batch:
        position = np.asarray(batch["position_ids"])
        if (np.diff(position, axis=-1) < 0).any():
            raise DataError(
                "the batch's leaf 'position_ids' begins again within a row, so the row holds several documents; give their "
                "segments as well: tokens, targets, loss_mask, segment and position"
            )
        decoder_batch["position"] = np.broadcast_to(position, tokens.shape)
    return decoder_batch


def _is_theirs(names: Mapping[str, Any]) -> bool:
    return not _THEIRS.keys().isdisjoint(names)


def _check_names(names: Mapping[str, Any]) -> None:
    theirs = [name for name in _THEIRS if name in names]
    ours = [name for name in ("tokens", "targets", MASK_LEAF, "segment", "position") if name in names and name in _OURS]
    if ours:
        raise DataError(
            f"the batch has {', '.join(theirs)} as well as {', '.join(ours)}, and only one can be meant; pass either "
            "input_ids and "
            f"labels (unshifted, {IGNORED} ignored), or tokens, targets (shifted by one) and {MASK_LEAF}"
        )
    if not {"input_ids", "labels"} <= names.keys():
        raise DataError(
            f"the batch has {', '.join(theirs)}; expected input_ids and labels, unshifted, with {IGNORED} where nothing is "
            f'learned: for a causal model {{"input_ids": ids, "labels": ids}}'
        )


def _segments(attention_mask: np.ndarray, counts: np.ndarray) -> np.ndarray:
    if attention_mask.shape != counts.shape or not np.isin(attention_mask, (0, 1)).all():
        raise DataError(
            f"the batch's leaf 'attention_mask' has the shape {attention_mask.shape}; expected {counts.shape} of 0 and 1"
        )
    blind = counts & (attention_mask == 0)
    if blind.any():
        row, position = np.argwhere(blind)[0].tolist()
        raise DataError(
            f"the batch's label at {[row, position + 1]} is to be predicted from position {position}, which its attention_mask "
            f"masks; set the labels of padding to {IGNORED}"
        )
    return attention_mask.astype(np.int32)
