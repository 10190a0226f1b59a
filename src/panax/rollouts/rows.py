"""Rows of answers, as a policy-gradient objective reads them: one answer after its prompt in each row."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float

from ..core import Axes, Task
from ..core.batch_checks import (
    ADVANTAGE_LEAF,
    BEHAVIOR_LEAF,
    EXPERTS_LEAF,
    KEPT_COUNT_LEAF,
    KEPT_LEAF,
    MASK_LEAF,
    OLD_LEAF,
    OLD_VALUE_LEAF,
    REFERENCE_LEAF,
    RETURN_LEAF,
)
from ..data.teacher.teacher_rows import TEACHER_LEAVES
from .answers import SampledAnswer

ID_LEAVES = ("tokens", "targets", "segment", "position")
LEAVES = (*ID_LEAVES, MASK_LEAF, ADVANTAGE_LEAF, BEHAVIOR_LEAF)
AXES: Mapping[str, Axes] = dict.fromkeys(LEAVES, ("batch", "seq"))

RATED_AXES: Mapping[str, Axes] = dict.fromkeys((*ID_LEAVES, MASK_LEAF), ("batch", "seq"))
"""Leaves of the rows of actions that a teacher rates."""

TEXT_AXES: Mapping[str, Axes] = dict.fromkeys(("tokens", "segment", "position", MASK_LEAF), ("batch", "seq"))
"""Leaves of the rows of whole texts that reward models rate."""

TEACHER_AXES: Axes = ("batch", "seq", "candidate")

KEPT_AXES: Mapping[str, Axes] = {KEPT_LEAF: ("batch", "seq", "candidate"), KEPT_COUNT_LEAF: ("batch", "seq")}
"""Leaves of the tokens among which actions were drawn, if the loss is of the probabilities among these."""

EXPERTS_AXES: Axes = ("batch", "seq", None, None)


def rollout_axes(task: Task) -> dict[str, Axes]:
    """Return the logical axes of the leaves of the batch from which a task learns."""
    needs = task.rollout_needs
    further = (
        ()
        if needs is None
        else [
            name
            for name, reads in (
                (OLD_LEAF, needs.old),
                (REFERENCE_LEAF, needs.reference),
                (RETURN_LEAF, needs.values),
                (OLD_VALUE_LEAF, needs.old_values),
            )
            if reads
        ]
    )
    axes = {
        **AXES,
        **dict.fromkeys(further, ("batch", "seq")),
        **(KEPT_AXES if needs is not None and needs.kept else {}),
    }
    if needs is not None and needs.teacher:
        read = {name: axes[name] for name in (*ID_LEAVES, MASK_LEAF)}
        return {**read, **dict.fromkeys(TEACHER_LEAVES, TEACHER_AXES)}
    return axes if needs is None or needs.experts is None else {**axes, EXPERTS_LEAF: EXPERTS_AXES}


def split_updates(
    batch: Mapping[str, np.ndarray], *, epochs: int, minibatches: int, seeds: Sequence[int]
) -> Iterator[dict[str, np.ndarray]]:
    """Yield the batches of a rollout's updates: in each epoch all answers, in another random order.

    Args:
        batch: Leaves of all answers of the rollout, in numbers divisible by `minibatches`.
        seeds: Seeds of the orders.

    >>> parts = split_updates({"x": np.arange(4)}, epochs=1, minibatches=2, seeds=[0, 1])
    >>> sorted(np.concatenate([part["x"] for part in parts]).tolist())
    [0, 1, 2, 3]
    """
    count = len(next(iter(batch.values())))
    if epochs * minibatches == 1:
        yield dict(batch)
        return
    for epoch in range(epochs):
        draws = np.random.Generator(np.random.Philox(np.random.SeedSequence([*seeds, epoch])))
        for rows in np.split(draws.permutation(count), minibatches):
            yield {name: leaf[rows] for name, leaf in batch.items()}


def make_rows(
    answers: Sequence[SampledAnswer],
    advantages: Float[np.ndarray, " answers"],
    counted: Bool[np.ndarray, " answers"],
    length: int,
    kept: int = 0,
) -> dict[str, np.ndarray]:
    """Return the leaves of a batch, (answers, length); if experts were recorded, also (answers, length, layer, active), and if
    kept tokens were, (answers, length, candidate).

    The loss mask is 1 where an action is the target, and 0 at tokens of an environment. Answers that are not counted have
    none.

    Args:
        length: Positions of a row, at least those of each prompt and its answer but one.
        kept: Number of tokens that are recorded of each action; 0 for none.
    """
    rows = {name: np.zeros((len(answers), length), np.int32 if name in ID_LEAVES else np.float32) for name in LEAVES}
    for row, answer in enumerate(answers):
        ids = [*answer.prompt, *answer.tokens]
        size, drawn = len(ids) - 1, len(answer.prompt) - 1 + np.flatnonzero(answer.is_action)
        rows["tokens"][row, :size], rows["targets"][row, :size] = ids[:-1], ids[1:]
        rows["segment"][row, :size], rows["position"][row, :size] = 1, np.arange(size)
        if counted[row]:
            rows[MASK_LEAF][row, drawn] = 1.0
            rows[ADVANTAGE_LEAF][row, drawn] = advantages[row]
            rows[BEHAVIOR_LEAF][row, drawn] = answer.log_probabilities
    if kept:
        rows |= _make_kept_rows(answers, counted, (length, kept))
    recorded = [answer.experts for answer in answers if answer.experts is not None]
    if recorded:
        rows[EXPERTS_LEAF] = np.full((len(answers), length, *recorded[0].shape[1:]), -1, np.int32)
        for row, experts in enumerate(recorded):
            rows[EXPERTS_LEAF][row, : len(experts)] = experts
    return rows


def _make_kept_rows(
    answers: Sequence[SampledAnswer], counted: Bool[np.ndarray, " answers"], shape: tuple[int, int]
) -> dict[str, np.ndarray]:
    """Return the leaves of `KEPT_AXES`; 0 but at actions.

    Args:
        shape: Positions of a row, and ids of each.
    """
    kept, counts = np.zeros((len(answers), *shape), np.int32), np.zeros((len(answers), shape[0]), np.int32)
    for row, answer in enumerate(answers):
        if counted[row]:
            drawn = len(answer.prompt) - 1 + np.flatnonzero(answer.is_action)
            kept[row, drawn], counts[row, drawn] = answer.kept, answer.kept_counts
    return {KEPT_LEAF: kept, KEPT_COUNT_LEAF: counts}


def make_text_rows(answers: Sequence[SampledAnswer], length: int) -> dict[str, np.ndarray]:
    """Return rows of whole texts, each a prompt with its answer up to the last token, for models that rate texts.

    The leaves are `tokens`, `segment`, `position` and `loss_mask` (1 for actions), each (answers, length).

    Args:
        length: Positions of a row, at least those of each prompt and its answer.
    """
    rows = {name: np.zeros((len(answers), length), np.int32 if name in ID_LEAVES else np.float32) for name in TEXT_AXES}
    for row, answer in enumerate(answers):
        size = len(answer.prompt) + len(answer.tokens)
        rows["tokens"][row, :size] = [*answer.prompt, *answer.tokens]
        rows["segment"][row, :size], rows["position"][row, :size] = 1, np.arange(size)
        rows[MASK_LEAF][row, len(answer.prompt) : size] = answer.is_action
    return rows
