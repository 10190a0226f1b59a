"""Every held-out row counts: the last, shorter batch of an evaluation is evaluated too, or named as missing."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import panax
from panax.data import IterableSource
from panax.mesh import MeshShape

ROWS = 21


class Line(eqx.Module):
    w: jax.Array

    def __init__(self, key):
        self.w = jnp.full((4,), 0.1)


def squares(model, batch):
    return jnp.mean((batch["x"] @ model.w - batch["y"]) ** 2)


@pytest.fixture(scope="module")
def rows():
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
    # The rows that were left out are unlike the others.
    return {"x": x, "y": np.arange(ROWS, dtype=np.float32)}


def batches(rows, size=8):
    return [{name: leaf[at : at + size] for name, leaf in rows.items()} for at in range(0, ROWS, size)]


def trained(rows, tmp_path, held_out, devices=1):
    experiment = panax.Experiment(
        name="short",
        task=panax.adapters.equinox.task(lambda key: Line(key), squares),
        data=[batches(rows)[0]],
        held_out=held_out,
        num_steps=1,
        directory=str(tmp_path / "short"),
        mesh=MeshShape(replica=devices),
    )
    return panax.fit(experiment, quiet=True, fresh=True, devices=jax.devices()[:devices])


def over(rows, result, count=ROWS):
    w = np.asarray(
        result.state.params["w"] if isinstance(result.state.params, dict) else jax.tree.leaves(result.state.params)[0]
    )
    return np.mean((rows["x"][:count] @ w - rows["y"][:count]) ** 2)


@pytest.mark.parametrize(
    "source", [lambda given: given, lambda given: IterableSource(given, epochs=1)], ids=["list", "source"]
)
def test_the_short_batch_counts(rows, tmp_path, source):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = trained(rows, tmp_path, source(batches(rows)))
        assert result.evaluation["loss"] == pytest.approx(over(rows, result), rel=1e-5)
        given = panax.evaluate(result, data=source(batches(rows)))["loss"]
    assert given == pytest.approx(over(rows, result), rel=1e-5)


def test_one_that_the_devices_can_not_share_is_named_with_the_rows_that_count(rows, tmp_path):
    with pytest.warns(UserWarning, match=r"the evaluation covers 16 of 21 held-out rows: the last batch has 5"):
        result = trained(rows, tmp_path, batches(rows), devices=4)
    assert result.evaluation["loss"] == pytest.approx(over(rows, result, 16), rel=1e-5)


def test_training_still_drops_it_with_a_warning(rows):
    source = IterableSource(batches(rows), epochs=1)
    with pytest.warns(UserWarning, match="the last batch of each epoch is dropped: 5 rows, where others have 8"):
        assert len(list(source.batches())) == 2
    assert [len(batch["x"]) for batch, _ in source.with_short_batch().batches()] == [8, 8, 5]
