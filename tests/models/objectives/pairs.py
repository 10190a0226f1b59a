"""Batches of preference pairs, random and in rows of several."""

import dataclasses
from typing import Any

import numpy as np
import tiny

from panax.models.objectives.preference import REFERENCE_LEAF

ADAMW = tiny.ADAMW
MODEL = dataclasses.replace(tiny.CONFIG, num_layers=2, windows=(0,), dropout=0.0)
ROWS, LENGTH = 8, 32


def lay(answers: list[list[tuple[list[int], list[int]]]], length: int = LENGTH) -> dict[str, np.ndarray]:
    """Lay rows of (prompt, answer), which are chosen and rejected in turn."""
    batch: dict[str, Any] = {
        name: np.zeros((len(answers), length), np.int32) for name in ("tokens", "targets", "segment", "position")
    }
    batch["loss_mask"] = np.zeros((len(answers), length), np.float32)
    for row, texts in enumerate(answers):
        at = 0
        for number, (prompt, answer) in enumerate(texts):
            ids = [*prompt, *answer]
            here = slice(at, at + len(ids))
            batch["tokens"][row, here], batch["segment"][row, here] = ids, number + 1
            batch["position"][row, here] = np.arange(len(ids))
            batch["targets"][row, at : at + len(ids) - 1] = ids[1:]
            batch["loss_mask"][row, at + len(prompt) - 1 : at + len(ids) - 1] = 1.0
            at += len(ids)
    return batch


def random_answers(
    seed: int = 0, rows: int = ROWS, prompt: tuple[int, int] = (1, 4)
) -> list[list[tuple[list[int], list[int]]]]:
    """Rows with 0 to 2 pairs of uneven lengths."""
    rng = np.random.default_rng(seed)

    def ids(least: int, most: int) -> list[int]:
        return rng.integers(1, MODEL.vocab_size, rng.integers(least, most)).tolist()

    counts = [1, 2, 1, 2, 0, 2, 1, 1][:rows]
    texts = []
    for count in counts:
        row = []
        for _ in range(count):
            start = ids(*prompt)
            row += [(start, ids(1, 5)), (start, ids(1, 5))]
        texts.append(row)
    return texts


def batch(seed: int = 0, **changes: Any) -> dict[str, np.ndarray]:
    """Rows of pairs, with random log-probabilities of a reference model."""
    made = lay(random_answers(seed, **changes))
    rng = np.random.default_rng(seed + 1)
    made[REFERENCE_LEAF] = (-rng.uniform(3.0, 6.0, made["tokens"].shape)).astype(np.float32)
    return made
