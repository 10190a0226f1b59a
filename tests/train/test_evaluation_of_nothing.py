"""A figure that is taken over nothing is not reported: 0.0 would be the best loss there can be."""

import types

import jax.numpy as jnp
import pytest

from panax.core.measures import Loss, Mean, MeanWithInterval, Sum
from panax.train.evaluation import evaluate_sent


def figures(losses, metrics=()):
    measures = {"losses": losses, "metrics": dict(metrics)}
    config = types.SimpleNamespace(ema_decay=None)
    program = types.SimpleNamespace(config=config, has_average=False)
    step = types.SimpleNamespace(program=program, evaluate=lambda state, batch: measures)
    return evaluate_sent(step, None, [{}, {}])


def loss(total, weight):
    return Loss(jnp.float32(total), jnp.float32(weight))


NOTHING = {"accuracy": Mean(jnp.float32(0), jnp.float32(0)), "tokens": Sum(jnp.float32(0))}


def test_no_figure_where_no_target_counts():
    assert figures({"cross_entropy": loss(0, 0)}, NOTHING) == {}


def test_terms_that_only_steer_the_training_are_no_judgement():
    steering = Loss(jnp.float32(1), jnp.float32(4), 0.01)
    assert figures({"cross_entropy": loss(0, 0), "balance": steering}, NOTHING) == {}
    found = figures({"cross_entropy": loss(2, 4), "balance": Loss(jnp.float32(0), jnp.float32(0), 0.01)})
    assert found == {"loss": 0.5, "loss/cross_entropy": 0.5}
    # Of two objectives one may have no labels in the held-out data.
    assert figures({"a": loss(0, 0), "b": loss(3, 4)}) == {"loss": 0.75, "loss/b": 0.75}


def test_what_counts_is_reported_and_an_average_over_nothing_left_out():
    found = figures({"cross_entropy": loss(3, 4)}, NOTHING)
    assert found == {"loss": 0.75, "loss/cross_entropy": 0.75, "tokens": 0}
    sampled = {"return": MeanWithInterval.of(jnp.array([1.0, 3.0]), jnp.ones(2))}
    assert figures({}, sampled)["return"] == 2 and figures({"value": loss(0, 0)}, sampled)["return"] == 2


def test_a_weight_that_is_no_number_is_not_nothing():
    assert figures({"cross_entropy": loss(1, float("nan"))})["loss"] != figures({"cross_entropy": loss(1, 1)})["loss"]
    assert figures({"cross_entropy": loss(0, 4)}) == pytest.approx({"loss": 0, "loss/cross_entropy": 0})
