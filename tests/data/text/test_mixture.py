"""A mixture's batches: proportions as scheduled, each part in its own order, exact resume, a clear end."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from panax.core import DataError, RecipeError, Source
from panax.data import (
    Accounting,
    BytePairTokenizer,
    ConcatRows,
    Documents,
    MixedSource,
    Mixture,
    MixtureComponent,
    PackedRows,
    PackedSource,
    PaddedRows,
    PretrainedTokenizer,
    RowSource,
    TextData,
    TextFiles,
    TokenFile,
    split,
)
from panax.data.mixtures.mixture_source import derive_part_seed

NOWHERE = TextFiles(paths=("nowhere",))
NAMES = ("code", "web", "books")


@pytest.fixture
def documents(make_store) -> dict[str, Documents]:
    """Three corpora with disjoint tokens: 0 to 299, 300 to 599, 600 to 899."""
    found = {}
    for part, name in enumerate(NAMES):
        draw = np.random.default_rng(part)
        lengths = [*draw.integers(1, 40, 30 + 7 * part), 7]
        lengths[0] += -sum(n + 1 for n in lengths) % 240 + 8  # the last window, of 15 or 16, is not an end alone
        texts = [(draw.integers(0, 300, n) + 300 * part).tolist() for n in lengths]
        found[name] = split(make_store(texts), 0)[0]
    return found


def mixed(documents, weights=(1.0, 1.0, 1.0), epochs=(None, None, None), *, batch_size=8, seed=0, padded=False):
    parts = tuple(
        MixtureComponent(name=name, corpus=NOWHERE, weight=weight, epochs=limit)
        for name, weight, limit in zip(documents, weights, epochs, strict=True)
    )
    rows = [
        PaddedRows(of, sequence_length=32, seed=derive_part_seed(seed, name), buckets=(8, 16))
        if padded
        else PackedRows(of, sequence_length=16, seed=derive_part_seed(seed, name))
        for name, of in documents.items()
    ]
    return MixedSource(Mixture(parts=parts), rows, batch_size=batch_size, seed=seed)


def take(source, count, position=None):
    return list(itertools.islice(source.batches(position), count))


def parts_of(batch) -> np.ndarray:
    """Return the part of each row, by its tokens."""
    ids = np.where((batch["segment"] > 0) & (batch["tokens"] < 900), batch["tokens"], -1).max(axis=1)
    return ids // 300


def assert_equal(ours, theirs):
    assert len(ours) == len(theirs)
    for (a, position_a), (b, position_b) in zip(ours, theirs, strict=True):
        assert position_a == position_b and a.keys() == b.keys()
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


def test_a_mixture_is_a_source_with_the_leaves_of_others(documents):
    source = mixed(documents)
    assert isinstance(source, Source) and isinstance(source, RowSource) and isinstance(source, Accounting)
    (batch, position), *_ = take(source, 1)
    lone = PackedSource(PackedRows(documents["web"], sequence_length=16, seed=0), batch_size=8)
    (other, _), *_ = take(lone, 1)
    assert {n: (v.shape, v.dtype) for n, v in batch.items()} == {n: (v.shape, v.dtype) for n, v in other.items()}
    assert json.loads(json.dumps(position)) == position


def test_rows_follow_the_weights_to_less_than_a_row(documents):
    counts = np.zeros(3)
    for number, (batch, position) in enumerate(take(mixed(documents, (7.0, 2.0, 0.3)), 80), 1):
        counts += np.bincount(parts_of(batch), minlength=3)
        assert list(position["rows"].values()) == counts.tolist()
        assert np.abs(counts - 8 * number * np.array([7, 2, 0.3]) / 9.3).max() < 1


def test_weights_change_in_a_straight_line_between_steps(documents):
    weights = (1.0, ((10, 0.0), (50, 1.0)), 0.0)
    counts, due = np.zeros(3), np.zeros(3)
    for step, (batch, _) in enumerate(take(mixed(documents, weights), 80)):
        counts += np.bincount(parts_of(batch), minlength=3)
        web = min(max(step - 10, 0) / 40, 1.0)
        due += 8 * np.array([1.0, web, 0.0]) / (1 + web)
        assert np.abs(counts - due).max() < 1 + 1e-6


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (0.2, ((0, 0.1), (40, 3.0)), 1.0)])
@pytest.mark.parametrize("most", [None, 1.0])
def test_each_part_comes_in_its_own_order_whatever_the_others_do(documents, weights, most):
    rows = PackedRows(documents["web"], sequence_length=16, seed=derive_part_seed(0, "web"))
    begin = 0
    for batch, position in take(mixed(documents, weights, (most, None, None)), 60):
        end = position["rows"]["web"]
        made = [rows.row(*divmod(number, rows.num_rows)).tokens for number in range(begin, end)]
        expected = [np.pad(tokens, (0, 16 - len(tokens))) for tokens in made]
        ours = batch["tokens"][parts_of(batch) == 1]
        assert sorted(map(bytes, ours)) == sorted(map(bytes, expected))
        begin = end
    assert begin > 2 * rows.num_rows


def test_the_places_of_parts_in_a_batch_are_shuffled(documents):
    orders = {tuple(parts_of(batch)) for batch, _ in take(mixed(documents), 40)}
    assert len(orders) > 20
    assert any(order != tuple(sorted(order)) for order in orders)


@pytest.mark.parametrize("padded", [False, True])
def test_resuming_at_any_position_continues_as_if_never_stopped(documents, padded):
    def make():
        return mixed(documents, (1.0, ((0, 0.1), (20, 2.0)), 0.5), (None, None, 1.5), padded=padded)

    whole = take(make(), 50)
    for stop in range(0, 50, 4):
        assert_equal(take(make(), 49 - stop, json.loads(json.dumps(whole[stop].position))), whole[stop + 1 :])


def test_a_part_is_used_up_after_its_epochs_and_the_others_share_what_was_its(documents):
    source = mixed(documents, (2.0, 1.0, 1.0), (1.5, None, None))
    rows = PackedRows(documents["code"], sequence_length=16, seed=0).num_rows
    limit = round(1.5 * rows)
    before = after = np.zeros(3)
    for batch, position in take(source, 60):
        counts = np.bincount(parts_of(batch), minlength=3)
        if position["rows"]["code"] < limit:
            before = before + counts
        elif counts[0] == 0:
            after = after + counts
    assert position["rows"]["code"] == limit
    assert np.abs(before - before.sum() * np.array([0.5, 0.25, 0.25])).max() < 1
    assert after.sum() > 100 and np.abs(after - after.sum() * np.array([0, 0.5, 0.5])).max() < 2


def test_when_all_parts_are_used_up_the_error_names_them_and_the_step(documents):
    source = mixed(documents, (1.0, 1.0, 1.0), (1.0, 2.0, 0.5))
    rows = [PackedRows(of, sequence_length=16, seed=0).num_rows for of in documents.values()]
    total = rows[0] + 2 * rows[1] + round(rows[2] / 2)
    batches, rows_seen = source.batches(), []
    with pytest.raises(DataError, match=rf"used up at step {total // 8}: 'code' after 1 epochs .*raise epochs"):
        rows_seen.extend(batches)
    with pytest.raises(DataError, match=rf"{8 - total % 8} of the 8 rows"):
        next(source.batches(take(source, total // 8)[-1].position))
    late = mixed(documents, (1.0, 0.0, 0.0), (1.0, None, None))
    with pytest.raises(DataError, match="no part with a weight is left"):
        list(late.batches())


def test_weights_and_epochs_may_change_between_two_runs_and_nothing_else(documents):
    position = take(mixed(documents), 9)[-1].position
    (_, after), *_ = take(mixed(documents, (0.0, 1.0, 0.0)), 1, position)
    assert after["rows"]["web"] >= position["rows"]["web"] + 7
    for other, says in (
        (mixed(documents, seed=1), "another seed: seed 0 was saved, this source has 1"),
        (mixed(documents, batch_size=4), "another batch size"),
        (mixed(documents | {"web": documents["code"]}), "another parts"),
    ):
        with pytest.raises(DataError, match=says):
            other.batches(position)


@pytest.mark.parametrize(
    "wrong", [{"batch": -1}, {"rows": {"code": 1}}, {"rows": {"code": 1, "web": 1, "books": 1}}, {"owed": None}]
)
def test_a_damaged_position_is_refused(documents, wrong):
    (_, position), *_ = take(mixed(documents), 1)
    with pytest.raises(DataError, match="expected 8 rows for each batch"):
        mixed(documents).batches({**position, **wrong})


def test_joined_rows_hold_every_row_of_each_part_once(documents):
    parts = [PackedRows(of, sequence_length=15, seed=3) for of in documents.values()]
    source = PackedSource(ConcatRows(parts, seed=0), batch_size=7, epochs=1)
    met = [batch["tokens"][batch["segment"] > 0] for batch, _ in source.batches()]
    assert sorted(np.concatenate(met)) == sorted(np.concatenate([of.store.tokens for of in documents.values()]))
    first = np.bincount(parts_of(next(source.batches()).batch), minlength=3)
    assert (first > 0).sum() > 1  # the first batches are of more than one part
    for index in range(0, source.rows.num_rows, 5):
        width = source.rows.width(0, np.array([index]))
        row = source.rows.read_rows(0, np.array([index]), width)
        np.testing.assert_array_equal(source.rows.row(0, index).tokens, row.tokens[0, : (row.segment > 0).sum()])


@pytest.fixture
def texts(tmp_path) -> dict[str, TextFiles]:
    words = {"fruit": ["apple", "pear", "plum", "fig"], "trees": ["oak", "ash", "elm", "yew"]}
    draw = np.random.default_rng(0)
    for name, of in words.items():
        (tmp_path / name).mkdir()
        for i in range(20):
            (tmp_path / name / f"{i:02}.txt").write_text(" ".join(draw.choice(of, draw.integers(5, 60))))
    return {name: TextFiles(paths=(str(tmp_path / name),)) for name in words}


@pytest.fixture
def data(texts, tmp_path) -> TextData:
    fruit, trees = (MixtureComponent(name=name, corpus=corpus) for name, corpus in texts.items())
    return TextData(
        corpus=Mixture(parts=(fruit, dataclasses.replace(trees, weight=3.0))),
        tokenizer=BytePairTokenizer(vocab_size=300),
        sequence_length=32,
        batch_size=4,
        held_out=0.1,
        cache_dir=str(tmp_path / "cache"),
    )


def test_a_mixture_opens_with_one_tokenizer_and_documents_held_out_of_each_part(data):
    opened = data.open()
    assert {name: len(part.held_out.starts) for name, part in opened.parts.items()} == {"fruit": 2, "trees": 2}
    held_out = [opened.tokenizer.decode(batch["tokens"].ravel()) for batch, _ in opened.held_out.batches()]
    assert "apple" in "".join(held_out) and "oak" in "".join(held_out)
    texts = [opened.tokenizer.decode(row) for batch, _ in take(opened.train, 40) for row in batch["tokens"]]
    assert sum("apple" in text for text in texts) == pytest.approx(40, abs=12)  # a window may hold no apple
    assert opened.num_tokens == sum(part.training.num_tokens for part in opened.parts.values())
    assert 0 < opened.unigram_entropy_nats < np.log(opened.vocab_size)


def test_token_files_and_texts_mix_with_the_tokenizer_that_made_them(data, texts, tmp_path):
    opened = data.open()
    opened.tokenizer.save(tmp_path / "tokenizer")
    cached = next(path for path in sorted((tmp_path / "cache").glob("tokens-*")))
    parts = (
        MixtureComponent(name="fruit", corpus=texts["fruit"]),
        MixtureComponent(name="made", corpus=TokenFile(path=str(cached))),
    )
    pretrained = PretrainedTokenizer(path=str(tmp_path / "tokenizer"))
    with pytest.raises(RecipeError, match="no tokenizer can be trained on it"):
        dataclasses.replace(data, corpus=Mixture(parts=parts))
    both = dataclasses.replace(data, corpus=Mixture(parts=parts), tokenizer=pretrained).open()
    assert take(both.train, 3)[-1].position["rows"] == {"fruit": 6, "made": 6}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": "a b"}, "name='a b' of a part"),
        ({"name": ""}, "name='' of a part"),
        ({"weight": -1.0}, "expected 0 or more"),
        ({"weight": ((5, 1.0), (5, 2.0))}, "with rising steps"),
        ({"weight": ()}, "with rising steps"),
        ({"epochs": 0.0}, "expected more than 0"),
    ],
)
def test_parts_that_can_not_be_are_refused(change, says):
    with pytest.raises(RecipeError, match=says):
        MixtureComponent(**({"name": "code", "corpus": NOWHERE} | change))


def test_mixtures_that_can_not_be_are_refused():
    part = MixtureComponent(name="code", corpus=NOWHERE)
    with pytest.raises(RecipeError, match="expected one or more"):
        Mixture(parts=())
    with pytest.raises(RecipeError, match="each with a unique name"):
        Mixture(parts=(part, part))
    with pytest.raises(RecipeError, match="weight 0 at step 9"):
        Mixture(parts=(dataclasses.replace(part, weight=((0, 1.0), (9, 0.0))),))
