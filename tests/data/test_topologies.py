"""The global batches are the same whoever makes them: 8, 6, 3 or 1 processes, and a change among those in mid-epoch."""

import hashlib
import itertools
import json

import jax
import numpy as np
import pytest

from panax.data import (
    BadRecord,
    BytePairTokenizer,
    Document,
    FilteredCorpus,
    Mixture,
    MixtureComponent,
    PackedSource,
    PaddedRows,
    RowSource,
    TextData,
    prefetch,
)
from panax.mesh import MeshShape, Placement
from panax.train.batch_transfer import find_held_rows, global_array

BATCH = 24
PROCESSES = (8, 6, 3, 1)
EACH = 5
"""Batches before the number of processes changes."""


class Words:
    """Documents of random words, some of them too short, and some bad records."""

    def __init__(self, name: str, count: int) -> None:
        self.name, self.count = name, count

    def documents(self):
        draw = np.random.default_rng(self.count)
        for i in range(self.count):
            words = draw.choice(["oak", "ash", "elm", "yew", "fir"], draw.integers(1, 60))
            yield BadRecord(f"{self.name}, line {i}", "torn") if i % 9 == 5 else Document(" ".join(words))

    def fingerprint(self) -> str:
        return f"words-{self.name}-{self.count}"


def opened(kind: str, cache: str) -> RowSource:
    corpus = FilteredCorpus(corpus=Words("a", 70), min_characters=12)
    if kind == "mixture":
        corpus = Mixture(
            parts=(
                MixtureComponent(name="filtered", corpus=corpus, weight=((0, 1.0), (15, 0.2)), epochs=3.0),
                MixtureComponent(name="plain", corpus=Words("b", 40), weight=0.7),
                MixtureComponent(name="rare", corpus=Words("c", 30), weight=0.03),
            )
        )
    data = TextData(
        corpus=corpus,
        tokenizer=BytePairTokenizer(vocab_size=280),
        sequence_length=40,
        batch_size=BATCH,
        seed=5,
        held_out=0,
        packing=kind != "padded",
        buckets=(16, 24, 32) if kind == "padded" else (),
        max_bad_records=100,
        cache_dir=cache,
    )
    source = data.open().train
    assert isinstance(source, RowSource)
    return source


def shares_of(processes: int, how: str) -> list[np.ndarray]:
    """Which rows of a batch each process makes: neighbors, every n-th, or any."""
    rows = np.arange(BATCH) if how != "any" else np.random.default_rng(processes).permutation(BATCH)
    parts = [rows[p::processes] for p in range(processes)] if how == "strided" else np.split(rows, processes)
    return [np.sort(part) for part in parts]


def together(source: RowSource, processes: int, how: str, position, count: int):
    """Batches put together from what each process makes; all processes report the same position."""
    shares = shares_of(processes, how)
    with_each = [itertools.islice(source.batches_of(rows.tolist(), position), count) for rows in shares]
    for made in zip(*with_each, strict=True):
        assert all(position == made[0].position for _, position in made)
        batch = {}
        for name, first in made[0].batch.items():
            assert len({part.batch[name].shape[1:] for part in made}) == 1
            batch[name] = np.empty((BATCH, *first.shape[1:]), first.dtype)
            for rows, part in zip(shares, made, strict=True):
                batch[name][rows] = part.batch[name]
        yield batch, made[0].position


def digests(batches) -> list[str]:
    return [
        hashlib.sha256(b"".join(leaf.tobytes() for leaf in batch.values()) + json.dumps(position).encode()).hexdigest()
        for batch, position in batches
    ]


@pytest.mark.parametrize("kind", ["packed", "padded", "mixture"])
@pytest.mark.parametrize("how", ["neighbors", "strided", "any"])
def test_the_sequence_survives_8_to_6_to_3_to_1_processes_bit_for_bit(kind, how, tmp_path):
    whole = digests(itertools.islice(opened(kind, str(tmp_path)).batches(), EACH * len(PROCESSES)))
    assert len(set(whole)) == len(whole)
    made, position = [], None
    for processes in PROCESSES:
        part = list(together(opened(kind, str(tmp_path)), processes, how, position, EACH))
        made += digests(part)
        position = json.loads(json.dumps(part[-1][1]))
    assert made == whole


@pytest.mark.parametrize("ahead", [1, 2, 7])
def test_how_far_batches_are_drawn_ahead_changes_nothing(ahead, tmp_path):
    source = opened("mixture", str(tmp_path))
    whole = digests(itertools.islice(source.batches(), 12))
    with prefetch(source.batches(), ahead) as items:
        assert digests(itertools.islice(items, 12)) == whole


@pytest.mark.parametrize(
    ("mesh", "processes", "rows_each"),
    [
        ({"fsdp": 8}, 4, 6),
        ({"fsdp": 8}, 8, 3),
        ({"replica": 2, "fsdp": 4}, 2, 12),
        ({"fsdp": 2, "context": 4}, 4, 12),  # two processes hold the halves of the same rows
        ({"fsdp": 4, "tensor": 2}, 4, 6),
        ({"stage": 2, "fsdp": 4}, 2, 24),  # each stage holds all rows
    ],
)
def test_a_process_makes_the_rows_that_its_devices_hold(mesh, processes, rows_each, many_documents):
    sizes = dict.fromkeys(("replica", "stage", "fsdp", "expert", "context", "tensor"), 1) | mesh
    placement = Placement.create(MeshShape(**sizes))
    rows = PaddedRows(many_documents, sequence_length=32, seed=1, buckets=(16, 24))
    source = PackedSource(rows, batch_size=BATCH)
    global_batch = next(source.batches()).batch
    sharding = placement.batch_shardings(global_batch, source.axes)["tokens"]
    by_row = placement.batch_shardings({"tokens": global_batch["tokens"][:, 0]}, {"tokens": ("batch",)})["tokens"]
    devices = placement.devices.devices.ravel().tolist()
    expected = jax.device_put(global_batch["tokens"], sharding)
    rows_seen = set()
    for process in range(processes):
        ours = devices[process * 8 // processes : (process + 1) * 8 // processes]
        held = find_held_rows(ours, by_row, BATCH)
        assert len(held.rows) == rows_each and held.batch_size == BATCH
        rows_seen |= set(held.rows.tolist())
        batch = next(source.batches_of(held.rows)).batch
        for shard in expected.addressable_shards:
            if shard.device in ours:
                first = np.searchsorted(held.rows, shard.index[0].start or 0)
                local = batch["tokens"][first : first + shard.data.shape[0], shard.index[1]]
                np.testing.assert_array_equal(local, shard.data)
    assert rows_seen == set(range(BATCH))


def test_an_array_is_made_of_rows_that_are_not_neighbours():
    placement = Placement.create(MeshShape(fsdp=8))
    sharding = placement.sharding("fsdp")
    held = find_held_rows(placement.devices.devices.ravel()[[0, 1, 5]].tolist(), sharding, BATCH)
    assert held.rows.tolist() == [0, 1, 2, 3, 4, 5, 15, 16, 17]
    whole = find_held_rows(jax.devices(), sharding, BATCH)
    leaf = np.arange(BATCH * 4, dtype=np.int32).reshape(BATCH, 4)
    np.testing.assert_array_equal(global_array(leaf, whole, sharding), leaf)
