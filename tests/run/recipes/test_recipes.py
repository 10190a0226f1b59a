"""The recipes that come with Panax: what they promise of each other, and that they train."""

import dataclasses

import pytest
import tiny_recipe

from panax import fit
from panax.models import count_active_parameters, count_parameters
from panax_recipes.moe_dense import moe_dense
from panax_recipes.moe_quickstart import moe_quickstart
from panax_recipes.quickstart import quickstart

VOCAB = 4096


def of_recipe(experiment):
    return dataclasses.replace(experiment.task.model, vocab_size=VOCAB)


def test_the_mixture_has_the_active_parameters_of_the_dense_decoder():
    dense, mixture = of_recipe(moe_dense()), of_recipe(moe_quickstart())
    # A router's weights and biases.
    routers = mixture.num_layers * (mixture.embed + 1) * mixture.feed_forward.experts
    assert count_active_parameters(mixture) == count_active_parameters(dense) + routers
    assert routers < 0.01 * count_active_parameters(dense)
    assert count_parameters(mixture) > 2 * count_parameters(dense)


def test_nothing_but_the_feed_forward_differs():
    dense, mixture = moe_dense(), moe_quickstart()
    model = dataclasses.replace(mixture.task.model, feed_forward=None)
    task = dataclasses.replace(mixture.task, model=model)
    assert dataclasses.replace(mixture, name=dense.name, task=task) == dense


@pytest.mark.parametrize("recipe", [quickstart, moe_quickstart])
def test_a_narrow_one_on_little_text_learns(recipe, cache, tmp_path):
    full, tiny = recipe(), tiny_recipe.tiny()
    narrow = {"embed": 32, "ffn": 64, "num_layers": 2, "heads": 2}
    model = dataclasses.replace(full.task.model, **narrow)
    if model.feed_forward is not None:
        model = dataclasses.replace(model, feed_forward=dataclasses.replace(model.feed_forward, ffn=16, shared=32))
    result = fit(
        dataclasses.replace(
            full,
            task=dataclasses.replace(full.task, model=model),
            data=dataclasses.replace(tiny.data, cache_dir=cache),
            optimizer=dataclasses.replace(
                full.optimizer, schedule=dataclasses.replace(full.optimizer.schedule, warmup_steps=5)
            ),
            num_steps=30,
            hooks=(),
            evaluate=tiny.evaluate,
            directory=str(tmp_path / "run"),
        ),
        say=lambda line: None,
    )
    # An untrained model guesses among 300 tokens: log(300) = 5.70 nats.
    assert result.step == 30 and result.evaluation["loss"] < 5.2
