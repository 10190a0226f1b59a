"""What recipes name can be changed on the command line."""

import dataclasses

import pytest
import tiny_recipe
import tyro

from panax import Experiment
from panax.data import (
    ArrayRecord,
    Arrow,
    ExampleData,
    ImageFolder,
    Mds,
    MegatronTokens,
    ParquetImages,
    Table,
    WebDataset,
    WebDatasetImages,
)


def changed(data, *arguments: str):
    base = dataclasses.replace(tiny_recipe.tiny(), data=data)
    return tyro.cli(Experiment, default=base, args=arguments, config=(tyro.conf.AvoidSubcommands,)).data


@pytest.mark.parametrize(
    ("corpus", "arguments", "expected"),
    [
        (Arrow(paths=("a",)), ("--data.corpus.paths", "b", "c"), Arrow(paths=("b", "c"))),
        (ArrayRecord(paths=("a",)), ("--data.corpus.record", "json"), ArrayRecord(paths=("a",), record="json")),
        (WebDataset(paths=("a",)), ("--data.corpus.text", "json.body"), WebDataset(paths=("a",), text="json.body")),
        (Mds(path="a"), ("--data.corpus.path", "s3://b/c"), Mds(path="s3://b/c")),
        (
            MegatronTokens(path="a"),
            ("--data.corpus.end-of-document", "3"),
            MegatronTokens(path="a", end_of_document=3),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_corpora(corpus, arguments, expected):
    tokenizer = {"tokenizer": None} if isinstance(corpus, MegatronTokens) else {}
    data = dataclasses.replace(tiny_recipe.tiny().data, corpus=corpus, **tokenizer)
    assert changed(data, *arguments).corpus == expected


@pytest.mark.parametrize(
    ("examples", "arguments", "expected"),
    [
        (ImageFolder(path="a"), ("--data.examples.size", "32"), ImageFolder(path="a", size=32)),
        (ParquetImages(paths=("a",)), ("--data.examples.label", "None"), ParquetImages(paths=("a",), label=None)),
        (WebDatasetImages(paths=("a",)), ("--data.examples.channels", "1"), WebDatasetImages(paths=("a",), channels=1)),
        (
            Table(paths=("a",), numeric=("x",)),
            ("--data.examples.missing", "-1.5"),
            Table(paths=("a",), numeric=("x",), missing=-1.5),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_examples(examples, arguments, expected):
    found = changed(ExampleData(examples=examples), *arguments, "--data.held-out", "0.1")
    assert found == ExampleData(examples=expected, held_out=0.1)
