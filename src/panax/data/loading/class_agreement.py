"""Consistency of ids between two data sources: classes and ids that are assigned by counting differ between
two folders."""

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

from panax.core.errors import DataError
from panax.core.protocols import Source

from ..images.encoded_images import Images
from ..tables.bags import CountVocabulary
from ..tables.criteo import HASHES, Criteo
from ..tables.sequences import Sequences
from ..tables.table import Table
from .example_data import ExampleData
from .example_source import ExampleSource
from .examples import Examples


def find_examples(source: Any) -> Examples | None:
    """Return the examples that a source draws from, also through wrappers; None if it has none."""
    found = next((each for each in unwrap_source(source) if isinstance(each, ExampleSource)), None)
    return None if found is None else found.examples


def unwrap_source(source: Any) -> Iterator[Any]:
    """Yield a source, the source that it wraps, and so on."""
    seen: set[int] = set()
    while source is not None and id(source) not in seen:
        seen.add(id(source))
        yield source
        source = getattr(source, "_source", None) or getattr(source, "source", None)


def _check_tokenizers(held_out: Any, train: Any) -> None:
    """Check that token ids mean the same: tokenizers that were trained on different texts assign different
    ids.

    Raises:
        DataError: Different tokenizers produced the tokens.
    """
    mine, theirs = (
        next((each.tokenizers for each in unwrap_source(source) if hasattr(each, "tokenizers")), frozenset())
        for source in (train, held_out)
    )
    if mine and theirs and mine != theirs:
        raise DataError(
            "the held-out text was tokenized by another tokenizer than the training text, so its ids mean other tokens. "
            "Give the held-out text as TextData, which takes the tokenizer of the training text, or name one for both with "
            "PretrainedTokenizer(path=...)"
        )


def find_class_names(source: Any) -> tuple[str, ...]:
    """Return the class names of a source's labels, by class index; () if unknown."""
    return tuple(getattr(find_examples(source), "classes", ()))


def align_held_out(held_out: Source, train: Any) -> tuple[Source, tuple[str, ...]]:
    """Return a source to evaluate on, with class indices that mean the same as in the training data, and
    notes on the changes.

    Images get the classes of the training data. Ids that were counted in files can't be reassigned.

    Raises:
        DataError: A class occurs in the held-out data alone, or ids were counted in other files.
    """
    _check_tokenizers(held_out, train)
    mine, theirs = find_examples(train), find_examples(held_out)
    if mine is None or theirs is None:
        return held_out, ()
    check_same_id_sets(theirs, mine)
    classes = find_class_names(train)
    if not classes or not isinstance(theirs, Images) or theirs.classes == classes:
        return held_out, ()
    shared = theirs.with_classes(classes, "those of the training data")
    if not isinstance(held_out, ExampleSource):
        raise DataError(
            f"the held-out data numbers its classes otherwise than the training data ({', '.join(theirs.classes[:8])} "
            f"instead of {', '.join(classes[:8])}); name them in both: classes={classes[:8]!r}"
        )
    note = f"the held-out data has {len(theirs.classes)} classes and uses indices of the training data's {len(classes)}"
    return replace_examples(held_out, shared), (note,)


def replace_examples(source: ExampleSource, examples: Examples) -> ExampleSource:
    """Return a copy of a source over other examples, of the same number."""
    changed = copy.copy(source)
    changed.examples = examples
    return changed


def check_same_id_sets(evaluated: Any, trained: Any) -> None:
    """Check that ids assigned by counting were counted over the same values.

    Raises:
        DataError: The ids were counted over other values, so that an id means another value than in training.
    """
    trained_sets, evaluated_sets = getattr(trained, "id_sets", {}), getattr(evaluated, "id_sets", {})
    for leaf in trained_sets.keys() & evaluated_sets.keys():
        if trained_sets[leaf] != evaluated_sets[leaf]:
            raise DataError(
                f"the ids of {leaf!r} are assigned by counts, and were counted in other files than the training data, so an "
                f"id means another value; count them in the same files: CountVocabulary(counted_in=(the paths of the training "
                f"data,)), or Sequences(items_from=...)"
            )


def align_ids(data: ExampleData, like: Any) -> ExampleData:
    """Return data to evaluate on, with counted ids taken from the data that a model was trained on.

    Args:
        like: The training data; None if unknown.
    """
    mine, theirs = data.examples, getattr(like, "examples", None)
    if isinstance(mine, Sequences) and isinstance(theirs, Sequences) and not mine.items_from:
        paths = theirs.items_from or theirs.paths
        return dataclasses.replace(data, examples=dataclasses.replace(mine, items_from=paths))
    if isinstance(mine, Criteo) and isinstance(theirs, Criteo):
        each = mine.ids if isinstance(mine.ids, tuple) else (mine.ids,) * HASHES
        if not any(isinstance(kind, CountVocabulary) for kind in each):
            return data
        ids = tuple(
            dataclasses.replace(kind, counted_in=theirs.paths)
            if isinstance(kind, CountVocabulary) and not kind.counted_in
            else kind
            for kind in each
        )
        return dataclasses.replace(data, examples=dataclasses.replace(mine, ids=ids))
    if not (isinstance(mine, Table) and isinstance(theirs, Table)):
        return data
    counted = {
        bag.name: bag.ids.counted_in or theirs.paths for bag in theirs.bags if isinstance(bag.ids, CountVocabulary)
    }
    bags = tuple(
        dataclasses.replace(bag, ids=dataclasses.replace(bag.ids, counted_in=counted[bag.name]))
        if isinstance(bag.ids, CountVocabulary) and not bag.ids.counted_in and bag.name in counted
        else bag
        for bag in mine.bags
    )
    return dataclasses.replace(data, examples=dataclasses.replace(mine, bags=bags))
