"""Recommenders: their parts against brute force and scikit-learn, and every layout against one device."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.recommenders import ITEMS, LENGTH, TASKS, clicks, dlrm, histories, hstu, sasrec, tables, towers, visits

from panax.core import DataFacts, RocHistogram
from panax.core.errors import DataError, RecipeError
from panax.core.measures import merge_measures
from panax.layers import FeatureConfig, TableConfig, TablesConfig
from panax.layers.attention.pointwise_attention import attend_pointwise, time_buckets
from panax.layers.perceptron import dot_interaction
from panax.layers.tables.ranking import ranking_metrics, target_ranks
from panax.models import DlrmConfig, DlrmTask, SequenceTask, item_vectors, retrieval_metrics, write_vectors
from panax.models.in_batch_softmax import in_batch_scores
from panax.models.recommenders.dlrm_task import click_metrics
from panax.testing import check_task

DEFAULT = {"dlrm"}
SLOW_LAYOUTS = [{"replica": 2, "fsdp": 2}, {"expert": 2, "tensor": 2}, {"fsdp": 4, "tensor": 2}]


@pytest.mark.parametrize(
    "name", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in TASKS]
)
def test_a_layout_trains_like_one_device(name):
    task, batch = TASKS[name]
    check_task(task(), batch(), layouts=[{"fsdp": 2, "tensor": 2}])


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_other_layouts_train_like_one_device(name):
    task, batch = TASKS[name]
    check_task(task(), batch(), layouts=SLOW_LAYOUTS)


def with_rows(batch):
    rows = np.arange(len(next(iter(batch.values()))), dtype=np.int32)
    return {name: jnp.array(leaf) for name, leaf in {**batch, "row": rows}.items()}


def drawn(task):
    return jax.jit(lambda key: task.init(key)[0])(jax.random.key(0))


def evaluated(task, batch, train=False, params=None):
    params = drawn(task) if params is None else params
    return jax.jit(lambda params, batch: task.loss(params, {}, batch, jax.random.key(1), train))(
        params, with_rows(batch)
    )


def test_the_area_is_scikit_learns_within_its_bound():
    from sklearn.metrics import roc_auc_score

    rng = np.random.default_rng(0)
    label = jnp.array(rng.integers(0, 2, 20_000), jnp.float32)
    score = jax.nn.sigmoid(jnp.array(rng.standard_normal(20_000), jnp.float32) + label)
    mask = jnp.array(rng.random(20_000) < 0.9, jnp.float32)
    for bins in (16, 2**16):
        halves = [
            RocHistogram.of(score[half], label[half], mask[half], bins) for half in (slice(9000), slice(9000, None))
        ]
        statistics = merge_measures({"auc": halves[0]}, {"auc": halves[1]})["auc"].statistics()
        error = abs(statistics[""] - roc_auc_score(label, np.asarray(score), sample_weight=mask))
        assert error <= statistics["_error_bound"] < (0.05 if bins == 16 else 1e-4)
    # Sixteen bins are wrong by something, or the bound would say nothing.
    nobody = RocHistogram.of(score[:3], jnp.ones(3), jnp.ones(3), 8).statistics()
    assert np.isnan(nobody[""])


def test_the_area_counts_each_example_by_its_weight():
    from sklearn.metrics import roc_auc_score

    rng = np.random.default_rng(1)
    label = rng.integers(0, 2, 5000)
    weight = np.where(label == 1, 1.0, rng.choice([0.0, 0.25, 3.0], 5000)).astype(np.float32)
    score = 1 / (1 + np.exp(-(rng.standard_normal(5000) * (1 + weight) + label)))
    result = RocHistogram.of(
        jnp.array(score, jnp.float32), jnp.array(label, jnp.float32), jnp.array(weight), 2**16
    ).statistics()
    assert result[""] == pytest.approx(
        roc_auc_score(label, score, sample_weight=weight), abs=result["_error_bound"] + 1e-6
    )
    assert abs(result[""] - roc_auc_score(label, score, sample_weight=weight > 0)) > 0.01
    lacking = RocHistogram.of(
        jnp.array([0.1, np.nan, 0.3], jnp.float32), jnp.array([0.0, 1.0, 1.0]), jnp.ones(3), 8
    ).statistics()
    assert np.isnan(lacking[""])


def test_rare_clicks_are_distinguished():
    from sklearn.metrics import roc_auc_score

    rng = np.random.default_rng(2)
    for shift in (-11.0, 11.0):
        label = (rng.random(20_000) < 0.5).astype(np.float32)
        logits = (shift + rng.standard_normal(20_000) + label).astype(np.float32)
        found = click_metrics(*map(jnp.array, (logits, label, np.ones_like(label))))["auc"].statistics()
        assert abs(found[""] - roc_auc_score(label, logits)) <= found["_error_bound"] < 1e-3


def test_a_score_that_is_not_finite_has_no_rank():
    catalog = jnp.array([[1.0], [3.0], [np.nan], [2.0]])
    assert np.isnan(target_ranks(jnp.ones((2, 1)), jnp.array([2, 3]), catalog, 4)).all()
    found = ranking_metrics(jnp.array([jnp.nan, 1.0]), jnp.ones(2), (1,))
    assert np.isnan(float(found["mrr"].value))


def test_metrics_of_clicks_are_those_of_scikit_learn():
    from sklearn.metrics import log_loss, roc_auc_score

    task, batch = dlrm(), clicks(3, rows=64)
    params = drawn(task)
    evaluation = evaluated(task, batch, params=params)
    counted = batch["loss_mask"] > 0
    probability = np.asarray(jax.nn.sigmoid(params(with_rows(batch), jnp.float32)), np.float64)[counted]
    label = batch["label"][counted]
    loss = evaluation.losses["log_loss"]
    assert float(loss.mean) == pytest.approx(log_loss(label, probability), rel=1e-5)
    assert float(evaluation.metrics["calibration"].value) == pytest.approx(probability.sum() / label.sum(), rel=1e-5)
    area = evaluation.metrics["auc"].statistics()
    assert abs(area[""] - roc_auc_score(label, probability)) <= area["_error_bound"] + 1e-12


def test_inner_products_and_their_gradient():
    vectors = jax.random.normal(jax.random.key(0), (3, 4, 5))

    def plain(vectors):
        pairs = [(vectors[:, i] * vectors[:, j]).sum(-1) for i in range(4) for j in range(i)]
        return jnp.stack(pairs, axis=1)

    weights = jax.random.normal(jax.random.key(1), (3, 6))
    actual, expected = (
        jax.value_and_grad(lambda v, f=f: (f(v) * weights).sum())(vectors) for f in (dot_interaction, plain)
    )
    np.testing.assert_allclose(actual[1], expected[1], rtol=1e-5)
    assert float(actual[0]) == pytest.approx(float(expected[0]), rel=1e-5)


@pytest.mark.parametrize("chunk", [4, 7, 100])
def test_ranks_are_those_of_a_sort(chunk):
    rng = np.random.default_rng(0)
    # Whole numbers tie.
    table, queries = rng.integers(-2, 3, (33, 3)).astype(np.float32), rng.integers(-2, 3, (9, 3)).astype(np.float32)
    targets = rng.integers(0, 30, 9)
    scores = (queries @ table.T)[:, :30]
    target_scores = scores[np.arange(9), targets][:, None]
    expected = 1 + (scores > target_scores).sum(1) + 0.5 * ((scores == target_scores).sum(1) - 1)
    actual = target_ranks(jnp.array(queries), jnp.array(targets), jnp.array(table), 30, chunk=chunk)
    assert actual.tolist() == expected.tolist() and (expected % 1).any()
    figures = ranking_metrics(actual, jnp.ones(9), (5,))
    assert float(figures["ndcg@5"].value) == pytest.approx(
        np.mean(np.where(expected <= 5, 1 / np.log2(expected + 1), 0))
    )
    assert float(figures["mrr"].value) == pytest.approx(np.mean(1 / expected))


def test_a_collapsed_model_is_not_right():
    ranks = target_ranks(jnp.zeros((2, 3)), jnp.array([0, 5]), jnp.ones((101, 3)), 101)
    assert ranks.tolist() == [51.0, 51.0]


def test_an_evaluation_ranks_the_last_target():
    task, batch = sasrec(), histories()
    params = drawn(task)
    actual = evaluated(task, batch, params=params).metrics
    context = task.context(with_rows(batch), jax.random.key(0), False)
    hidden = jax.jit(lambda items: params(items, context, dtype=jnp.float32)[0])(
        jnp.maximum(jnp.array(batch["items"]), 0)
    )
    scores = np.asarray(hidden @ params.embedding.table[:ITEMS].T)
    expected = []
    for row in range(1, len(scores)):  # the first one is masked
        last = (batch["targets"][row] >= 0).sum() - 1
        target_scores = scores[row, last]
        expected.append(1 + (target_scores > target_scores[batch["targets"][row, last]]).sum())
    assert float(actual["hit_rate@10"].value) == pytest.approx(np.mean(np.array(expected) <= 10))
    assert float(actual["mrr"].value) == pytest.approx(np.mean(1 / np.array(expected)), rel=1e-5)


@pytest.mark.parametrize("make", [sasrec, hstu])
def test_an_event_changes_nothing_before_it(make):
    task, batch = make(), histories()
    params = drawn(task)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: leaf + jnp.array(0.1 * rng.standard_normal(leaf.shape), leaf.dtype), params)

    @jax.jit
    def run(batch):
        context = task.context(batch, jax.random.key(0), False)
        return params(jnp.maximum(batch["items"], 0), context, dtype=jnp.float32)[0]

    def hidden(batch):
        return np.asarray(run(with_rows(batch)))

    changed = {**batch, "items": batch["items"].copy(), "times": batch["times"].copy()}
    changed["items"][:, 5] = (changed["items"][:, 5] + 1) % ITEMS
    a, b = hidden(batch), hidden(changed)
    np.testing.assert_allclose(a[:, :5], b[:, :5], rtol=1e-5)
    assert np.abs(a[:, 5:] - b[:, 5:]).max() > 1e-2
    # Each position knows its own event's time, and nothing later.
    changed["times"][:, 6:] += 10**6
    np.testing.assert_allclose(hidden(changed)[:, :5], b[:, :5], rtol=1e-5)


def test_pointwise_attention_by_hand():
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 3, 1, 2)) for i in range(3))
    bias = np.arange(9.0, dtype=np.float32).reshape(1, 3, 3)
    found = attend_pointwise(q, k, v, jnp.array(bias), q.shape[1])
    for at in range(3):
        scores = np.array([q[0, at, 0] @ k[0, j, 0] + bias[0, at, j] for j in range(at + 1)])
        weights = scores / (1 + np.exp(-scores)) / 3
        np.testing.assert_allclose(found[0, at, 0], weights @ v[0, : at + 1, 0], rtol=1e-5)


def test_the_sampled_softmax_is_the_whole_one_in_the_mean():
    batch = histories()
    full_softmax = evaluated(dataclasses.replace(sasrec(), negatives=0), batch, True)
    model = dataclasses.replace(sasrec().model, dropout=0.0)
    task, plain = SequenceTask(model=model, negatives=40), SequenceTask(model=model)
    params = drawn(task)
    run = jax.jit(lambda key: task.loss(params, {}, with_rows(batch), key, True).losses["cross_entropy"].mean)
    actual = np.mean([float(run(jax.random.key(seed))) for seed in range(50)])
    expected = float(evaluated(plain, batch, True, params).losses["cross_entropy"].mean)
    assert actual == pytest.approx(expected, abs=0.01) and float(full_softmax.losses["cross_entropy"].weight) > 0


def test_scores_in_a_batch_are_corrected_and_leave_the_same_item_out():
    query = items = jnp.eye(3)
    scores = in_batch_scores(
        query, items, jnp.arange(3), jnp.array([7, 8, 7]), jnp.log(jnp.array([0.5, 0.25, 0.5])), 0.5
    )
    assert np.isneginf(np.array([scores[0, 2], scores[2, 0]])).all()
    np.testing.assert_allclose(scores[1], [-np.log(0.5), 2 - np.log(0.25), -np.log(0.5)], rtol=1e-6)


def test_vectors_of_a_catalogue_are_those_of_training():
    task, batch = towers(), visits()
    params = drawn(task)
    parts = [
        {"item": np.arange(begin, min(begin + 20, ITEMS), dtype=np.int32)[:, None]} for begin in range(0, ITEMS, 20)
    ]
    catalog = item_vectors(task, params, parts)
    assert catalog.shape == (ITEMS, 4)
    np.testing.assert_allclose(
        params.vectors(with_rows(batch), jnp.float32)[1], catalog[batch["item"][:, 0]], rtol=1e-5
    )


def test_a_catalogue_is_searched_whole():
    rng = np.random.default_rng(0)
    items, queries = (rng.integers(-2, 3, (count, 3)).astype(np.float32) for count in (40, 25))
    targets = rng.integers(0, 40, 25)
    found = retrieval_metrics(queries, items, targets, (5,), chunk=7)
    ranks = np.asarray(target_ranks(jnp.array(queries), jnp.array(targets), jnp.array(items), 40))
    assert found["hit_rate@5"] == np.mean(ranks <= 5) and found["mrr"] == pytest.approx(np.mean(1 / ranks))


def test_vectors_are_written_with_their_names(tmp_path):
    vectors = np.arange(6.0, dtype=np.float32).reshape(3, 2)
    write_vectors(tmp_path / "index", vectors, ["x", "y", "z"])
    assert (np.load(tmp_path / "index" / "vectors.npy") == vectors).all()
    assert json.loads((tmp_path / "index" / "ids.json").read_text()) == ["x", "y", "z"]
    with pytest.raises(DataError, match="3 vectors and 2 different ids"):
        write_vectors(tmp_path, vectors, ["x", "y", "x"])
    vectors[1, 0] = np.nan
    with pytest.raises(DataError, match="the vector of item 'y' is not finite"):
        write_vectors(tmp_path, vectors, ["x", "y", "z"])


def test_tasks_take_the_datas_ids():
    open_tables = TablesConfig(tables=(TableConfig(name="a", rows=0, width=4, features=(FeatureConfig(leaf="a"),)),))
    task = DlrmTask(model=DlrmConfig(interaction="cross", tables=open_tables, top=(4,)))
    assert task.adapt_to_data(DataFacts(num_ids={"a": 9})).model.tables.tables[0].rows == 9
    with pytest.raises(RecipeError, match="the data does not state how many 'a' may hold"):
        task.adapt_to_data(DataFacts())
    with pytest.raises(RecipeError, match=r"rows=5, and the data's 'city' may hold 6 ids"):
        dlrm().adapt_to_data(DataFacts(num_ids={"city": 6}))
    open_items = dataclasses.replace(sasrec(), model=dataclasses.replace(sasrec().model, vocab_size=0))
    assert open_items.adapt_to_data(DataFacts(num_ids={"items": 77})).model.vocab_size == 77
    with pytest.raises(RecipeError, match="less than the data's 51 items"):
        sasrec().adapt_to_data(DataFacts(num_ids={"items": 51}))
    with pytest.raises(RecipeError, match="negatives=50 of 50 items"):
        sasrec(negatives=50).adapt_to_data(DataFacts())


def test_what_does_not_fit_is_refused():
    with pytest.raises(RecipeError, match=r"the tables have \[4, 8\]"):
        wide = dataclasses.replace(tables(a=9).tables[0], width=8, name="b", features=(FeatureConfig(leaf="b"),))
        DlrmConfig(tables=TablesConfig(tables=(*tables(a=9).tables, wide)))
    with pytest.raises(RecipeError, match=r"the batch has 2 columns of numbers, and model\.numeric=3"):
        evaluated(dlrm(), {**clicks(), "numeric": np.zeros((16, 2), np.float32)})
    with pytest.raises(RecipeError, match="both towers read the batch leaf 'item'"):
        dataclasses.replace(towers().model, query=tables(item=5))
    with pytest.raises(RecipeError, match="rows are 9 events long, the model is for at most 8"):
        evaluated(
            sasrec(),
            {name: np.pad(leaf, ((0, 0), (0, 1))) if leaf.ndim > 1 else leaf for name, leaf in histories().items()},
        )
    assert LENGTH == 8


def test_the_time_of_the_last_event_is_its_own_whatever_fills_the_row():
    times = np.array([[0, 10, 1000, 100_000, 100_060]], np.int32)
    filled = np.concatenate([times, np.zeros((1, 3), np.int32)], axis=1)
    wanted = time_buckets(jnp.array(times))[0, 4].tolist()
    assert wanted == sorted(wanted, reverse=True) and wanted[-1] == 0
    assert time_buckets(jnp.array(filled))[0, 4, :5].tolist() == wanted
    # The target's time, where the batch has it: each event is further off.
    known = time_buckets(jnp.array(times), jnp.array(times) + 60)[0, 4].tolist()
    assert known[-1] == time_buckets(jnp.array([[0, 60]]))[0, 1, 0]
