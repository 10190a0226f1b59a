"""The recipes of recommenders: that they run and resume, and (slowly) that they reach their stated quality."""

import dataclasses
import json

import numpy as np
import pytest

import panax
from panax.core import named_leaves
from panax.data import SyntheticClicks
from panax.optim import LazyAdam, Schedule
from panax.run import EvaluateConfig
from panax.run.folder.description import deserialize_task, serialize_config
from panax_recipes.dlrm_criteo import dlrm_criteo
from panax_recipes.dlrm_flights import CATEGORIES, dlrm_flights
from panax_recipes.sequences_ml100k import hstu_ml100k, sasrec_ml100k


def small(directory, **changes) -> panax.Experiment:
    """Drawn clicks of three columns, in steps of 32."""
    recipe = dlrm_criteo()
    model = recipe.task.model
    tables = dataclasses.replace(model.tables, tables=model.tables.tables[:3])
    clicks = SyntheticClicks(num_examples=600, rows=(40, 300, 5), numeric=2, pairs=2)
    data = dataclasses.replace(recipe.data, examples=clicks, batch_size=32, held_out=0.2)
    return dataclasses.replace(
        recipe,
        directory=str(directory),
        data=data,
        task=dataclasses.replace(
            recipe.task, model=dataclasses.replace(model, tables=tables, numeric=2, bottom=(8,), top=(8,))
        ),
        embedding_optimizer=LazyAdam(schedule=Schedule(peak=0.01, decay="constant")),
        optimizer=dataclasses.replace(recipe.optimizer, schedule=Schedule(peak=0.01, decay="constant", warmup_steps=0)),
        evaluate=EvaluateConfig(every=0),
        log_every=2,
        **changes,
    )


@pytest.mark.slow
def test_a_run_that_was_stopped_is_the_one_that_was_not(tmp_path):
    uninterrupted = panax.fit(small(tmp_path / "whole", num_steps=4), quiet=True)
    panax.fit(small(tmp_path / "parts", num_steps=2), quiet=True)
    resumed = panax.fit(small(tmp_path / "parts", num_steps=4), quiet=True, accept_changes=True)
    expected = named_leaves(uninterrupted.state.params)
    for name, leaf in named_leaves(resumed.state.params).items():
        np.testing.assert_array_equal(leaf, expected[name], err_msg=name)
    assert uninterrupted.evaluation == resumed.evaluation
    assert 0 < uninterrupted.evaluation["auc"] < 1 and uninterrupted.evaluation["auc_error_bound"] < 0.1
    sizes = [table.rows for table in uninterrupted.prepared.task.model.tables.tables]
    assert sizes == [40, 300, 5]


@pytest.mark.parametrize("recipe", [dlrm_flights, dlrm_criteo, sasrec_ml100k, hstu_ml100k])
def test_a_run_folder_gives_its_task_back(recipe):
    task = recipe().task
    assert deserialize_task(json.dumps(serialize_config(task)), "here") == task


@pytest.mark.slow
def test_flights_are_ranked_better_than_by_logistic_regression(tmp_path):
    from scipy import sparse
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score

    recipe = dlrm_flights()
    opened = recipe.data.open()
    assert opened.held_out is not None
    parts = [part.read(np.arange(part.num_examples)) for part in (opened.train.examples, opened.held_out.examples)]
    mean, deviation = parts[0]["numeric"].mean(axis=0), parts[0]["numeric"].std(axis=0)

    def matrix(part):
        columns = [
            sparse.csr_matrix(
                (np.ones(len(part["label"])), (np.arange(len(part["label"])), part[leaf][:, 0])),
                (len(part["label"]), opened.num_ids[leaf]),
            )
            for leaf in CATEGORIES
        ]
        return sparse.hstack([*columns, sparse.csr_matrix((part["numeric"] - mean) / deviation)]).tocsr()

    x, held_out = map(matrix, parts)
    linear = max(
        roc_auc_score(
            parts[1]["label"],
            LogisticRegression(C=strength, max_iter=300).fit(x, parts[0]["label"]).decision_function(held_out),
        )
        for strength in (0.003, 0.03, 0.3, 3.0)
    )
    result = panax.fit(dataclasses.replace(recipe, directory=str(tmp_path)), quiet=True)
    assert result.evaluation["auc"] - result.evaluation["auc_error_bound"] > linear + 0.01


@pytest.mark.slow
def test_drawn_clicks_are_ranked_almost_as_well_as_can_be(tmp_path):
    recipe = dlrm_criteo()
    held_out = recipe.data.open().held_out
    assert held_out is not None
    result = panax.fit(dataclasses.replace(recipe, directory=str(tmp_path)), quiet=True)
    assert result.evaluation["auc"] > held_out.examples.bayes_auc() - 0.002
