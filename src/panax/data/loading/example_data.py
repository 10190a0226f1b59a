"""Example data of a recipe: its config, and the sources that opening it returns."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from panax.core.errors import RecipeError
from panax.core.validation import Validated

from ..files.cache import cache_directory
from ..images.augmentation import Augmentation
from ..images.digits import Digits
from ..images.images import ImageFolder, ParquetImages, WebDatasetImages
from ..tables.click_arrays import ClickArrays
from ..tables.criteo import Criteo
from ..tables.sequences import SequenceExamples, Sequences
from ..tables.synthetic_clicks import SyntheticClicks
from ..tables.table import Table
from .example_source import ExampleSource
from .examples import ExampleFiles, Examples, split_by_hash, split_by_time


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExampleData(Validated):
    """Images, rows of tables or arrays to train on.

    Attributes:
        examples: The examples: `Arrays`, or any config with `open`.
        batch_size: Examples in a global batch, over all devices.
        seed: Seed of the order.
        held_out: Approximate fraction held out from training, by a hash of each example's name: independent
            of the seed, and unchanged for existing examples if others are added. 0 for none.
        split: How held-out examples are chosen: by that hash; the latest by a table's `time` column; or the
            last event of each of `Sequences`, in which case `held_out` must not be set.
        augmentation: Random augmentation of training images; None for none. Held-out images are not
            augmented.
        max_bad_records: Up to this many unusable examples are skipped; more are an error.
        cache_dir: Directory of cached tables and copies. None: $PANAX_CACHE, else ~/.cache/panax.
    """

    examples: (
        ImageFolder
        | ParquetImages
        | WebDatasetImages
        | Digits
        | Table
        | Criteo
        | ClickArrays
        | SyntheticClicks
        | Sequences
        | ExampleFiles
    )
    batch_size: int = 32
    seed: int = 0
    held_out: float | int = 0
    split: Literal["hash", "time", "last"] = "hash"
    augmentation: Augmentation | None = None
    max_bad_records: int = 0
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("max_bad_records", 0)):
            if getattr(self, name) < least:
                raise RecipeError(f"{name}={getattr(self, name)}; expected at least {least}")
        if not 0 <= self.held_out < 1:
            raise RecipeError(f"held_out={self.held_out}; expected a fraction of the examples, from 0 to below 1")
        if self.split == "last" and self.held_out:
            raise RecipeError(
                f'held_out={self.held_out} has no effect with split="last", which holds one event a user out'
            )

    def open(self) -> "OpenedExamples":
        """Open the examples, or their cached copy, and build the sources.

        Raises:
            DataError: Examples can't be read, there are none, too many are bad, or too few to hold some out.
        """
        examples = self.examples.open(cache_directory(self.cache_dir), self.max_bad_records)
        training, held_out = self._divided(examples)
        return OpenedExamples(
            train=ExampleSource(training, batch_size=self.batch_size, seed=self.seed, augmentation=self.augmentation),
            held_out=None
            if held_out is None
            else ExampleSource(
                held_out, batch_size=self.batch_size, epochs=1, augmentation=self._held_out_augmentation
            ),
            examples=examples,
        )

    def _divided(self, examples: Examples) -> tuple[Examples, Examples | None]:
        match self.split:
            case "hash":
                return split_by_hash(examples, self.held_out)
            case "time":
                return split_by_time(examples, self.held_out)
            case "last":
                if not isinstance(examples, SequenceExamples):
                    raise RecipeError(f'split="last" is for Sequences; {type(examples).__name__} has no last events')
                return examples.split_last()

    @property
    def _held_out_augmentation(self) -> Augmentation | None:
        """Return the augmentation of held-out images, which adds the leaves of mixed images but mixes none."""
        mixing = None if self.augmentation is None else self.augmentation.mixing
        if mixing is None:
            return None
        return Augmentation(crop=None, flip=0.0, mixing=dataclasses.replace(mixing, probability=0.0))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OpenedExamples:
    """Open examples.

    Attributes:
        train: Endless batches, which resume exactly.
        held_out: One pass over the held-out examples, its last batch padded; None if there are none.
        examples: All examples.
    """

    train: ExampleSource
    held_out: ExampleSource | None
    examples: Examples

    @property
    def num_classes(self) -> int | None:
        """Return the number of classes of the examples' labels; None if unknown."""
        return getattr(self.examples, "num_classes", None)

    @property
    def account(self) -> tuple[str, ...]:
        """Return notes for the user on how the examples were read: what is skipped, truncated, or spelled in
        two ways.
        """
        return tuple(getattr(self.examples, "notes", ()))

    @property
    def num_ids(self) -> Mapping[str, int]:
        """Return the number of ids of each leaf of ids, if known."""
        return getattr(self.examples, "num_ids", {})
