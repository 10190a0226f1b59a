"""A loader may fill the same memory again for its next batch: every border copies first, wherever batches are drawn ahead."""

from types import MappingProxyType

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import panax
from panax.core.protocols import SourcedBatch
from panax.data import Arrays, ExampleSource, IterableSource, prefetch
from panax.data.loading.iterable import as_batch
from panax.data.loading.overfit import FirstBatches
from panax.mesh import MeshShape
from panax.optim import AdamW, Schedule

COUNT, ROWS = 6, 8


class Line(eqx.Module):
    w: jax.Array

    def __init__(self, key):
        self.w = jnp.full((4,), 0.1)


def squares(model, batch):
    return jnp.mean((batch["x"] @ model.w - batch["y"]) ** 2)


def task():
    return panax.adapters.equinox.task(lambda key: Line(key), squares)


def fresh(rows=ROWS):
    rng = np.random.default_rng(1)
    made = []
    for _ in range(COUNT):
        x = rng.normal(size=(rows, 4)).astype(np.float32)
        made.append({"x": x, "y": x[:, 0] * 2 - x[:, 1]})
    return made


class Reused:
    """One mapping of arrays, filled again for each batch; `kind` makes them."""

    def __init__(self, kind, rows=ROWS):
        self.kind, self.rows = kind, rows
        self.held = {"x": kind((rows, 4)), "y": kind((rows,))}

    def __iter__(self):
        for batch in fresh(self.rows):
            for name, value in batch.items():
                self.held[name][...] = torch.from_numpy(value) if self.kind is torch.zeros else value
            yield self.held


class ReusedSource:
    """The same as a source of a user's own, which no wrapper of ours copies."""

    resume = "replay"
    axes = MappingProxyType({"x": ("batch", None), "y": ("batch",)})

    def __init__(self, endless=True):
        self.endless = endless

    def batches(self, position=None):
        while True:
            for batch in Reused(aligned):
                yield SourcedBatch(batch, {})
            if not self.endless:
                return


def aligned(shape):
    """Memory that a CPU device takes as it is, without a copy."""
    size = int(np.prod(shape))
    raw = np.zeros(size + 64, np.float32)
    offset = (-raw.ctypes.data % 256) // 4
    return raw[offset : offset + size].reshape(shape)


def losses(data, tmp_path, name, **settings):
    seen = []

    class Watch(panax.hooks.Hook):
        def after_step(self, run):
            seen.append(run.read()["train/loss"])

    panax.fit(
        panax.Experiment(
            name=name,
            task=task(),
            data=data,
            optimizer=AdamW(schedule=Schedule(peak=1e-2)),
            num_steps=COUNT,
            log_every=1,
            directory=str(tmp_path / name),
            hooks=(Watch(),),
            mesh=MeshShape(),
            **settings,
        ),
        quiet=True,
        devices=jax.devices()[:1],
    )
    return seen


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return losses(fresh(), tmp_path_factory.mktemp("fresh"), "fresh")


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(lambda: Reused(torch.zeros), id="torch"),
        pytest.param(lambda: Reused(aligned), id="numpy"),
        pytest.param(ReusedSource, id="source"),
    ],
)
def test_a_run_trains_on_each_batch_as_it_was_given(tmp_path, expected, data):
    assert losses(data(), tmp_path, "reused") == expected


def test_the_first_batches_of_a_source_are_kept_as_they_were():
    first = FirstBatches(ReusedSource(), 3)
    drawn = [batch["y"].copy() for batch, _ in first.without_repeats.batches()]
    for batch, y in zip(fresh(), drawn, strict=False):
        np.testing.assert_array_equal(batch["y"], y)


def test_held_out_batches_are_evaluated_as_they_were(tmp_path):
    def loss(held_out):
        experiment = panax.Experiment(
            name="held", task=task(), data=fresh(), held_out=held_out, num_steps=1, directory=str(tmp_path / "held")
        )
        return panax.fit(experiment, quiet=True, fresh=True, devices=jax.devices()[:1]).evaluation["loss"]

    expected = loss(fresh())
    assert loss(Reused(aligned)) == expected
    assert loss(ReusedSource(endless=False)) == expected


@pytest.mark.parametrize("kind", [torch.zeros, aligned], ids=["torch", "numpy"])
def test_a_loop_of_ones_own_may_fill_the_next_batch_while_a_step_runs(kind):
    def found(batches):
        step = panax.compile_step(task(), fresh(4096)[0], num_steps=10, devices=jax.devices()[:1])
        state, scalars = step.init(seed=0), []
        for batch in batches:
            state, values = step(state, batch)
            scalars.append(values["loss"])
        return [float(value) for value in scalars], step.evaluate(state, batches)["loss"]

    assert found(Reused(kind, 4096)) == found(fresh(4096))


def test_a_step_copies_what_it_is_sent_unless_it_owns_it():
    step = panax.compile_step(task(), fresh()[0], num_steps=10, devices=jax.devices()[:1]).compiled
    batch = {"x": aligned((ROWS, 4)), "y": aligned((ROWS,))}
    sent = step.put(batch)
    batch["x"][...] = 7.0
    assert not np.asarray(sent["x"]).any()


def test_prefetched_items_have_memory_of_their_own():
    with prefetch(Reused(aligned), 2) as items:
        drawn = list(items)
    for item, batch in zip(drawn, fresh(), strict=True):
        np.testing.assert_array_equal(item["x"], batch["x"])
    held = [np.zeros(2)]
    with prefetch(iter([(held, "a")])) as items:
        ((taken, word),) = items
    assert taken[0] is not held[0] and word == "a"


def test_a_batch_is_a_copy_whatever_its_type():
    array = np.ones((2, 3), np.float32)
    tensor = torch.ones(2, 3)
    batch = as_batch({"a": array, "b": tensor, "c": np.ones((2, 2), np.int64)})
    array[...], tensor[...] = 5, 5
    assert batch["a"].max() == batch["b"].max() == 1 and batch["c"].dtype == np.int32
    peeked = IterableSource(Reused(aligned))
    first = peeked.first_batch()["y"].copy()
    np.testing.assert_array_equal(next(peeked.batches()).batch["y"], first)


class OneBuffer:
    """Examples of a user's own, which are read into the same memory each time, and given as they are kept."""

    num_examples, fingerprint = 5, "one buffer"
    axes = MappingProxyType({"x": ("batch",)})

    def __init__(self):
        self.held = np.zeros(2, np.float32)

    def read(self, numbers):
        self.held[...] = numbers
        return {"x": self.held}


def test_examples_that_are_read_into_one_buffer_are_copied_and_left_as_they_are():
    examples = OneBuffer()
    source = ExampleSource(examples, batch_size=2, epochs=1)
    found = [batch["x"].tolist() for batch, _ in list(source.batches())]
    assert sorted([*found[0], *found[1], found[2][0]]) == [0, 1, 2, 3, 4] and found[2][1] == 0
    # The row that fills up the last batch was set to zero in the copy alone.
    assert examples.held.tolist() == [found[2][0]] * 2


def test_an_augmentation_may_give_the_same_array_for_each_example():
    out = np.zeros(1, np.float32)

    def augment(example, generator):
        out[...] = example["x"] + 10
        return {"x": out}

    source = ExampleSource(Arrays({"x": np.arange(4.0)[:, None]}), batch_size=4, epochs=1, augment=augment)
    (batch, _), *_ = source.batches()
    assert sorted(batch["x"][:, 0].tolist()) == [10, 11, 12, 13]
