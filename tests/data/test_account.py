"""How often each document has been seen, computed from a position alone, is what counting the tokens finds."""

import dataclasses
import itertools

import numpy as np
import pytest

from panax.data import (
    Documents,
    MixedSource,
    Mixture,
    MixtureComponent,
    PackedRows,
    PackedSource,
    PaddedRows,
    TextFiles,
)


@pytest.fixture
def documents(many_documents) -> Documents:
    """Documents in which each token, the ends included, encodes its position in the file."""
    tokens = np.arange(len(many_documents.store.tokens), dtype=np.uint16)
    return dataclasses.replace(many_documents, store=dataclasses.replace(many_documents.store, tokens=tokens))


def times_whole(documents: Documents, counts: np.ndarray) -> list[int]:
    pairs = zip(documents.starts, documents.lengths, strict=True)
    return [int(counts[start : start + length].min()) for start, length in pairs]


def count(batch, counts: np.ndarray) -> np.ndarray:
    return counts + np.bincount(batch["tokens"][batch["segment"] > 0], minlength=len(counts))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("batch_size", [3, 7, 90])
def test_of_one_corpus(documents, packed, batch_size):
    kind = PackedRows if packed else PaddedRows
    source = PackedSource(kind(documents, sequence_length=16 if packed else 40, seed=2), batch_size=batch_size)
    counts = np.zeros(len(documents.store.tokens), np.int64)
    for batch, position in itertools.islice(source.batches(), 25):
        counts = count(batch, counts)
        (seen,) = source.count_documents(position).values()
        assert seen.times.tolist() == times_whole(documents, counts)
        assert source.epochs(position) == {"": seen.epochs}
        assert seen.times.min() <= seen.epochs <= seen.times.max() + 1
        if packed:
            assert seen.epochs == pytest.approx(counts.sum() / len(counts), abs=16 / len(counts))
    assert seen.documents.tolist() == documents.starts.tolist()


def test_of_a_mixture_by_part(documents):
    half = len(documents.starts) // 2
    parts = {
        "front": dataclasses.replace(documents, starts=documents.starts[:half], lengths=documents.lengths[:half]),
        "back": dataclasses.replace(documents, starts=documents.starts[half:], lengths=documents.lengths[half:]),
    }
    mixture = Mixture(
        parts=tuple(
            MixtureComponent(name=name, corpus=TextFiles(paths=("nowhere",)), weight=w)
            for name, w in (("front", 3.0), ("back", 1.0))
        )
    )
    rows = [PackedRows(of, sequence_length=16, seed=4) for of in parts.values()]
    source = MixedSource(mixture, rows, batch_size=6, seed=0)
    counts = np.zeros(len(documents.store.tokens), np.int64)
    for batch, position in itertools.islice(source.batches(), 40):
        counts = count(batch, counts)
        for name, seen in source.count_documents(position).items():
            assert seen.times.tolist() == times_whole(parts[name], counts)
    epochs = source.epochs(position)
    assert epochs["front"] > 2 * epochs["back"] > 0
    assert epochs[""] == pytest.approx(240 / sum(r.num_rows for r in rows))
