"""Data of a run, opened: its sources, and the facts that a task takes from them."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..core import Axes, DataFacts, Source, Task
from ..core.errors import RecipeError, describe_type
from ..data import IterableSource
from ..data.text.text_bytes import bits_per_byte
from ..data.text.tokenizer import Tokenizer
from ..rollouts.rollout_data import OpenedRollouts
from ..rollouts.rows import rollout_axes

LogFn = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class OpenedData:
    """Sources, and the facts that a task may take from them.

    Attributes:
        shapes: Number of different batch shapes that `train` may have.
        unigram_entropy: Nats per held-out token of a model of token frequencies alone: the value that a loss
            must fall below.
        bytes_per_target: Bytes of text for each held-out token; None if the data is not text.
        rollouts: Prompts and settings, if the model makes its batches itself; the sources then yield prompts.
    """

    train: Source
    held_out: Source | None
    facts: DataFacts
    tokenizer: Tokenizer | None = None
    shapes: int = 1
    unigram_entropy: float | None = None
    bytes_per_target: float | None = None
    rollouts: OpenedRollouts | None = None

    def batch_axes(self, task: Task) -> Mapping[str, Axes]:
        """Return the logical axes of the leaves of the batches that a step takes."""
        return self.train.axes if self.rollouts is None else rollout_axes(task)

    def add_bits_per_byte(self, evaluation: Mapping[str, float]) -> Mapping[str, float]:
        """Add the cross-entropy in bits per byte to held-out figures: it does not depend on the tokenizer."""
        nats = evaluation.get("loss/cross_entropy")
        if nats is None or not self.bytes_per_target:
            return evaluation
        return {**evaluation, "bits_per_byte": bits_per_byte(nats, self.bytes_per_target)}


def to_source(data: Any, epochs: int | None = None) -> Source:
    """Return a source as it is; wrap any other iterable as one.

    Args:
        epochs: Number of epochs of evaluation data: its short last batch counts too. None: for training data.
    """
    if isinstance(data, IterableSource):
        return data if epochs is None else data.with_short_batch()
    if isinstance(data, Source):
        return data
    if isinstance(data, Mapping):
        raise RecipeError(
            f"data is one batch ({describe_type(data)} with {', '.join(map(str, list(data)[:4]))}); expected batches: for this "
            f"one alone write data=[batch]"
        )
    if isinstance(data, Iterable):
        return IterableSource(data, epochs=epochs, keep_short_batch=epochs is not None)
    raise RecipeError(
        f"data is {describe_type(data)}; expected TextData, ExampleData, a Source, a DataLoader or another iterable"
    )
