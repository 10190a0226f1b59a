"""Engines that record the experts of each position, those of copied beginnings too."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawing import drawn
from test_engine_on_meshes import create, place

from panax.generate import GenerationEngine, GenerationRequest, Sampling
from panax.generate.batching import Batching
from panax.layers import MoE
from panax.models import DecoderConfig, DecoderTask, HybridConfig, PolicyGradient

SIZES = {"vocab_size": 96, "max_length": 64, "embed": 32, "num_layers": 3, "heads": 4, "ffn": 32}
MIXTURE = MoE(experts=4, active=2, ffn=16, first_dense=1)
CONFIGS = {
    "attention": DecoderConfig(**SIZES, feed_forward=MIXTURE),
    "mamba": HybridConfig(**SIZES, attention_layers=(1,), feed_forward=MIXTURE),
}
OBJECTIVE = PolicyGradient(replay_experts=True)
START = tuple(np.random.default_rng(0).integers(0, 96, 17).tolist())


def build(name, objective=OBJECTIVE):
    task = DecoderTask(model=CONFIGS[name], objective=objective)
    params, state = drawn(task.init)
    return task, jax.tree.map(lambda leaf: leaf * 3.0 if leaf.ndim > 2 else leaf, params), state


def requests():
    """Prompts with a common beginning of two chunks, one of another, and one of a single token."""
    prompts = START, (*START, 3), (*START, 4, 5), START[::-1], (7,), START
    return [GenerationRequest(prompt, Sampling(tokens=5 + n, seed=n)) for n, prompt in enumerate(prompts)]


def run_at_once(model, completion, prompt):
    """The experts of all positions of an answer, run as one part of an empty row."""
    ids = [*prompt, *(token.token for token in completion.actions)][:-1]
    tokens = jnp.asarray([ids], jnp.int32)
    cache = model.empty_cache(1, len(ids))
    length = jnp.full(1, len(ids), jnp.int32)
    _, cache = jax.jit(lambda model, cache: model.extend(tokens, jnp.zeros(1, jnp.int32), length, cache))(model, cache)
    return np.asarray(model.read_experts(cache))[0]


def check(name, **settings):
    task, params, state = build(name)
    model = task.incremental_model(params, state)
    engine = GenerationEngine(model, rows=3, chunk=8, **settings)
    completions = engine.generate(requests())
    assert any(each.reused for each in completions) == (name == "attention")
    for completion, request in zip(completions, requests(), strict=True):
        size = len(request.prompt) + len(completion.actions) - 1
        assert completion.experts is not None and completion.experts.shape == (size, 2, 2)
        assert np.array_equal(completion.experts, run_at_once(model, completion, request.prompt))
    used = np.concatenate([each.experts for each in completions])
    assert set(np.unique(used)) == set(range(4))
    return task, params, state, completions


def test_answers_have_the_experts_of_their_whole_text():
    check("attention")


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "settings"),
    [("attention", {"drafts": 2}), ("mamba", {}), ("attention", {"batching": Batching(prompts=2, samples=2, steps=3)})],
)
def test_other_engines_record_the_same(name, settings):
    check(name, **settings)


@pytest.mark.full
def test_records_change_no_answer():
    task, params, state, completions = check("attention")
    plain_task = dataclasses.replace(task, objective=PolicyGradient())
    plain = GenerationEngine(plain_task.incremental_model(params, state), rows=3, chunk=8)
    others = plain.generate(requests())
    assert [each.tokens for each in others] == [each.tokens for each in completions]
    assert all(each.experts is None for each in others)


@pytest.mark.full
@pytest.mark.parametrize("shape", [{"expert": 2, "tensor": 2}, {"fsdp": 2, "context": 2}])
def test_meshes_record_what_one_device_does(shape):
    task, params, state = build("attention")
    one = GenerationEngine(task.incremental_model(params, state), rows=4, chunk=8).generate(requests())
    engine = create(task, params, state, place(task, params, shape), rows=4)
    for here, there in zip(engine.generate(requests()), one, strict=True):
        assert here.ids == there.ids and np.array_equal(here.experts, there.experts)
