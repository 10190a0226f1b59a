"""Evaluation data, opened whole: read like the data that a model was trained on, with its tokenizer, classes
and ids."""

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..core import DataFacts, Source, Task
from ..core.errors import RecipeError
from ..data import (
    BytePairTokenizer,
    Chats,
    ExampleData,
    ExampleSource,
    ImageFolder,
    PackedSource,
    PretrainedTokenizer,
    TextData,
    TokenFile,
    make_corpus,
)
from ..data.images.encoded_images import Images
from ..data.loading.batch_conversion import convert_batches
from ..data.loading.class_agreement import align_held_out, align_ids, find_examples, replace_examples, unwrap_source
from ..data.text.tokenizer import Tokenizer
from .opened_data import LogFn, OpenedData, to_source

MAX_SHAPES = 8
"""Number of batch shapes allowed in batches from the caller: each shape is compiled."""

_FIELDS = ("text", "prompt", "answer")


def open_full(
    data: Any,
    like: Any,
    tokenizer: Tokenizer | None,
    *,
    source: Source | None = None,
    classes: tuple[str, ...] = (),
    fields: Mapping[str, str] | None = None,
    say: LogFn = lambda line: None,
) -> OpenedData:
    """Open all of the given data, for one epoch, as a run opens its held-out data.

    Args:
        data: Paths, which are read like the training data; settings of data; a source; or batches.
        like: The settings of the data that the model was trained on; None if they are not known.
        tokenizer: The tokenizer of the training data.
        source: The training data, if it is open.
        classes: Class names of the training data's labels; () if they are not known, or `source` has them.
        fields: The fields of records in paths with the `text`, or the `prompt` and the `answer`; None for
            those of training.

    Raises:
        RecipeError: The run does not define how paths are read, or the data has no end.
        DataError: A class or an id would mean something else than in training.
    """
    if isinstance(data, str | Path) or (
        isinstance(data, list | tuple) and data and all(isinstance(each, str | Path) for each in data)
    ):
        data = _of_paths([data] if isinstance(data, str | Path) else list(data), like, tokenizer, fields)
    if isinstance(data, TextData):
        return _whole_text(data, tokenizer, say)
    if isinstance(data, ExampleData):
        opened = align_ids(dataclasses.replace(data, held_out=0, split="hash", augmentation=None), like).open()
        for line in opened.account:
            say(line)
        full_source: Source = ExampleSource(opened.examples, batch_size=data.batch_size, epochs=1)
        facts = DataFacts(num_classes=opened.num_classes, num_ids=opened.num_ids)
    else:
        full_source, facts = to_source(data, epochs=1), DataFacts()
    examples = find_examples(full_source)
    if source is not None:
        full_source, notes = align_held_out(full_source, source)
        for note in notes:
            say(note)
    elif classes and isinstance(examples, Images) and isinstance(full_source, ExampleSource):
        full_source = replace_examples(
            full_source, examples.with_classes(classes, "those that the model was trained on")
        )
    if facts.num_classes is not None:
        facts = facts._replace(num_classes=getattr(find_examples(full_source), "num_classes", None))
    shapes = 1 if isinstance(data, ExampleData) else max(MAX_SHAPES, len(getattr(full_source, "buckets", ())))
    return OpenedData(full_source, full_source, facts, shapes=shapes)


def _of_paths(
    paths: list[str | Path], like: Any, tokenizer: Tokenizer | None, fields: Mapping[str, str] | None
) -> TextData | ExampleData:
    names = tuple(map(str, paths))
    if fields and not isinstance(like, TextData):
        raise RecipeError(f"{', '.join(fields)}: names a field of records of text, and this run has other data")
    if isinstance(like, TextData):
        run_chats = _find_chats(like.corpus)
        corpus: Any = make_corpus(*names, **(fields or {}), chats=run_chats is not None)
        if run_chats is not None and isinstance(corpus, Chats):
            # The tokenizer was saved with the template that the run used.
            corpus = dataclasses.replace(run_chats, paths=corpus.paths, template=None)
        run_fields = _fields_of(like.corpus)
        if run_fields and not fields and hasattr(corpus, "answer"):
            corpus = dataclasses.replace(corpus, **run_fields)
        # Stands in for the run's tokenizer until the corpus is opened.
        stand_in = None if tokenizer is None or isinstance(corpus, TokenFile) else BytePairTokenizer()
        return dataclasses.replace(like, corpus=corpus, tokenizer=stand_in)
    if isinstance(like, ExampleData):
        examples: Any = like.examples
        if isinstance(examples, ImageFolder) and len(names) == 1:
            label = examples.label if examples.label in ("folder", "none") else "folder"
            return dataclasses.replace(like, examples=dataclasses.replace(examples, path=names[0], label=label))
        if hasattr(examples, "paths"):
            return dataclasses.replace(like, examples=dataclasses.replace(examples, paths=names))
    kind = "data that can't be read from its settings" if like is None else f"{type(like).__name__}"
    of = f" of {type(like.examples).__name__}" if isinstance(like, ExampleData) else ""
    raise RecipeError(
        f"paths are read as the run's own data is, text or one folder of images; this run has {kind}{of}, and records and "
        f"tables are read by a run's own fields and columns: in Python, pass a source or batches"
    )


def _fields_of(corpus: Any) -> dict[str, str]:
    """Return the fields of records that a corpus is set to read, also through corpora that contain it."""
    if all(hasattr(corpus, name) for name in _FIELDS):
        # A name that was not chosen is the format's default: other formats have others.
        usual = (
            {field.name: field.default for field in dataclasses.fields(corpus)}
            if dataclasses.is_dataclass(corpus)
            else {}
        )
        return {name: value for name in _FIELDS if (value := getattr(corpus, name)) != usual.get(name)}
    contained = getattr(corpus, "corpora", None) or [part.corpus for part in getattr(corpus, "parts", ())]
    contained = contained or ([corpus.corpus] if hasattr(corpus, "corpus") else [])
    return next((fields for each in contained if (fields := _fields_of(each))), {})


def _find_chats(corpus: Any) -> Chats | None:
    """Return the corpus of conversations among those that a corpus contains; None without one."""
    if isinstance(corpus, Chats):
        return corpus
    contained = [part.corpus for part in getattr(corpus, "parts", ())] or [getattr(corpus, "corpus", None)]
    return next((chats for each in contained if each is not None and (chats := _find_chats(each)) is not None), None)


def _whole_text(data: TextData, tokenizer: Tokenizer | None, say: LogFn) -> OpenedData:
    with set_tokenizer(dataclasses.replace(data, held_out=0), tokenizer) as ours:
        opened = ours.open()
    if not isinstance(opened.train, PackedSource):
        raise RecipeError("a Mixture has no end; evaluate on one corpus at a time")
    for line in opened.account:
        say(line)
    source = PackedSource(opened.train.rows, batch_size=data.batch_size, epochs=1)
    facts = DataFacts(opened.vocab_size, data.sequence_length)
    shapes = 1 if data.packing else len({*data.buckets, data.sequence_length})
    return OpenedData(source, source, facts, opened.tokenizer, shapes, bytes_per_target=opened.bytes_per_target)


@contextlib.contextmanager
def set_tokenizer(data: TextData, tokenizer: Tokenizer | None) -> Iterator[TextData]:
    """Yield the data with the tokenizer that the model was trained with: one trained again on other texts has
    other tokens."""
    if tokenizer is None:
        yield dataclasses.replace(data, tokenizer=None)
        return
    with tempfile.TemporaryDirectory(prefix="panax-tokenizer-") as folder:
        tokenizer.save(folder)
        yield dataclasses.replace(data, tokenizer=PretrainedTokenizer(path=folder))


def rename_leaves(opened: OpenedData, task: Task) -> OpenedData:
    """Rename the leaves of data to the task's names, if they have those of another library."""
    held_out = None if opened.held_out is None else convert_batches(opened.held_out, task)
    return dataclasses.replace(opened, train=convert_batches(opened.train, task), held_out=held_out)


def is_endless(source: Source) -> bool:
    """Return True if a source starts again when its data ends."""
    for each in unwrap_source(source):
        if hasattr(each, "endless"):
            return each.endless
        if hasattr(each, "num_batches"):
            return each.num_batches is None
    return False


def check_same_classes(evaluated: DataFacts, trained: DataFacts) -> None:
    """Raise a RecipeError if two data sets have different numbers of classes."""
    if None not in (evaluated.num_classes, trained.num_classes) and evaluated.num_classes != trained.num_classes:
        raise RecipeError(
            f"the data has {evaluated.num_classes} classes, the run's has {trained.num_classes}: "
            "a number would mean another class"
        )
