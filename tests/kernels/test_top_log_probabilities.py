"""Log-probabilities of k given ids and of all others together: against whole logits, and where the vocabulary is split."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from panax.core import Target
from panax.kernels import CrossEntropySettings
from panax.kernels.top_log_probabilities import (
    TopInputs,
    TopLogProbabilities,
    TopSettings,
    top_log_probabilities,
    top_log_probability_gradients,
)

TOKENS, EMBED, VOCAB, K = 48, 16, 40, 5
CASES = {
    "plain": TopSettings(),
    "chunks": TopSettings(chunk_tokens=20, temperature=2.0),
    "cap, padded vocabulary": TopSettings(
        vocabulary=CrossEntropySettings(soft_cap=4.0, vocab_size=37), temperature=0.7, chunk_tokens=16
    ),
}


def asked(dtype: jnp.dtype = jnp.float32, k: int = K) -> tuple[TopInputs, jax.Array, TopLogProbabilities]:
    generator = np.random.default_rng(0)
    x = jnp.asarray(generator.normal(size=(TOKENS, EMBED)), dtype)
    head = jnp.asarray(generator.normal(size=(VOCAB, EMBED)), jnp.float32)
    ids = np.stack([generator.permutation(37 if k < 37 else VOCAB)[:k] for _ in range(TOKENS)]).astype(np.int32)
    targets, mask = generator.integers(0, 37, TOKENS), (generator.uniform(size=TOKENS) < 0.8).astype(np.float32)
    # What ignored tokens hold is of no consequence.
    targets[[3, 7]], mask[[3, 7, 47]], ids[47] = [-100, VOCAB], 0.0, 10**6
    cotangent = [generator.normal(size=shape) for shape in ((TOKENS, k), TOKENS, TOKENS)]
    inputs = TopInputs(x, jnp.asarray(ids), jnp.asarray(targets, jnp.int32), jnp.asarray(mask))
    return inputs, head, TopLogProbabilities(*(jnp.asarray(leaf, jnp.float32) for leaf in cotangent))


def from_logits(x: jax.Array, head: jax.Array, inputs: TopInputs, settings: TopSettings) -> TopLogProbabilities:
    vocabulary = settings.vocabulary
    logits = jnp.einsum("ce,ve->cv", x, head)
    if vocabulary.soft_cap is not None:
        logits = vocabulary.soft_cap * jnp.tanh(logits / vocabulary.soft_cap)
    logits = logits[:, : vocabulary.vocab_size]
    counted = inputs.mask > 0
    ids = jnp.where(counted[:, None], inputs.ids, jnp.arange(inputs.ids.shape[1])[None])
    targets = jnp.where(counted, inputs.targets, 0)
    log = jax.nn.log_softmax(logits / settings.temperature, axis=-1)
    given = (ids[:, :, None] == jnp.arange(logits.shape[1])[None, None]).any(axis=1)
    tail = jax.nn.logsumexp(jnp.where(given, -jnp.inf, log), axis=-1)
    target = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), targets[:, None], axis=1)[:, 0]
    top = jnp.take_along_axis(log, ids, axis=1)
    return TopLogProbabilities(
        jnp.where(counted[:, None], top, 0), *(jnp.where(counted, leaf, 0) for leaf in (tail, target))
    )


def expected_of(inputs: TopInputs, head: jax.Array, cotangent: TopLogProbabilities, settings: TopSettings) -> tuple:
    values, pull = jax.vjp(lambda x, head: from_logits(x, head, inputs, settings), inputs.x, head)
    return *values, *pull(cotangent)


def found_of(inputs: TopInputs, head: jax.Array, cotangent: TopLogProbabilities, settings: TopSettings) -> tuple:
    values = top_log_probabilities(inputs, head, settings, target=Target("cpu"))
    return *values, *top_log_probability_gradients(inputs, head, cotangent, settings, target=Target("cpu"))


@pytest.mark.parametrize("name", CASES)
def test_equals_the_definition(name: str) -> None:
    inputs, head, cotangent = asked()
    found = jax.jit(found_of, static_argnums=3)(inputs, head, cotangent, CASES[name])
    for one, other in zip(found, expected_of(inputs, head, cotangent, CASES[name]), strict=True):
        assert np.abs(one - other).max() <= 60 * np.finfo(np.float32).eps * np.abs(other).max()


def test_a_whole_vocabulary_leaves_no_tail() -> None:
    inputs, head, cotangent = asked(k=VOCAB)
    values = top_log_probabilities(inputs, head, TopSettings(), target=Target("cpu"))
    assert (np.asarray(values.tail) == np.where(inputs.mask > 0, -np.inf, 0.0)).all()
    grads = top_log_probability_gradients(inputs, head, cotangent, TopSettings(), target=Target("cpu"))
    without = cotangent._replace(tail=jnp.zeros(TOKENS))
    _, pull = jax.vjp(lambda x, head: from_logits(x, head, inputs, TopSettings())[::2], inputs.x, head)
    for one, other in zip(grads, pull((without.top, without.target)), strict=True):
        assert np.abs(one - other).max() <= 60 * np.finfo(np.float32).eps * np.abs(other).max()


def test_a_tail_is_exact_however_small() -> None:
    """The others have e**-200 of the probability, of which 1 minus the rest knows nothing."""
    x, head = jnp.ones((1, 1)), jnp.asarray([[0.0], [-1.0], [-200.0], [-201.0]])
    inputs = TopInputs(x, jnp.asarray([[0, 1]]), jnp.zeros(1, jnp.int32), jnp.ones(1))
    found = top_log_probabilities(inputs, head, TopSettings(), target=Target("cpu"))
    assert float(found.tail[0]) == pytest.approx(-200.0 + np.log1p(np.exp(-1.0)) - np.log1p(np.exp(-1.0)), rel=1e-6)


def test_bfloat16_accumulates_in_float32() -> None:
    inputs, head, cotangent = asked(jnp.bfloat16)
    rounded = inputs._replace(x=inputs.x.astype(jnp.float32)), head.astype(jnp.bfloat16).astype(jnp.float32)
    found = found_of(inputs, head, cotangent, TopSettings())
    expected = expected_of(*rounded, cotangent, TopSettings())
    assert [leaf.dtype for leaf in found] == [jnp.float32] * 3 + [jnp.bfloat16, jnp.float32]
    for one, other in zip(found[:3], expected[:3], strict=True):
        np.testing.assert_allclose(one, other, atol=28 * np.finfo(np.float32).eps * np.abs(other).max())
    for one, other in zip(found[3:], expected[3:], strict=True):
        assert np.abs(np.asarray(one, np.float32) - other).max() <= 4 * 2.0**-8 * np.abs(other).max()


@pytest.mark.parametrize("vocab_axis", [None, "tensor"])
def test_inside_a_checked_shard_map(vocab_axis: str | None) -> None:
    """Tokens split over one axis, the vocabulary whole or split over another: the same values and gradients."""
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    settings = CASES["cap, padded vocabulary"]
    split = dataclasses.replace(settings, vocabulary=dataclasses.replace(settings.vocabulary, vocab_axis=vocab_axis))

    def local(inputs: TopInputs, head: jax.Array, cotangent: TopLogProbabilities) -> tuple:
        *values, d_x, d_head = found_of(inputs, head, cotangent, split)
        d_x = jax.lax.psum(d_x, vocab_axis) if vocab_axis else d_x
        return *values, d_x, jax.lax.psum(d_head, "data")

    inputs, head, cotangent = asked()
    token, vocab = P("data"), P(vocab_axis)
    shard = jax.shard_map(local, mesh=mesh, in_specs=(token, vocab, token), out_specs=(token,) * 4 + (vocab,))
    place = lambda tree, spec: jax.device_put(tree, jax.sharding.NamedSharding(mesh, spec))  # noqa: E731
    found = jax.jit(shard)(place(inputs, token), place(head, vocab), place(cotangent, token))
    for one, other in zip(found, expected_of(inputs, head, cotangent, settings), strict=True):
        assert np.abs(np.asarray(one) - other).max() <= 60 * np.finfo(np.float32).eps * np.abs(other).max()


@pytest.mark.parametrize("ids", [[[1, 1]], [[0, VOCAB]], [[-1, 3]]])
def test_ids_that_are_no_distinct_tokens_are_nan(ids: list[list[int]]) -> None:
    inputs = TopInputs(jnp.ones((1, EMBED)), jnp.asarray(ids), jnp.zeros(1, jnp.int32), jnp.ones(1))
    found = top_log_probabilities(inputs, jnp.ones((VOCAB, EMBED)), TopSettings(), target=Target("cpu"))
    assert np.isnan(found.top).all() and np.isnan(found.tail).all() and np.isfinite(found.target).all()


def test_settings_of_a_loss_are_refused() -> None:
    with pytest.raises(ValueError, match=r"z_loss=0.1; a log-probability has none"):
        TopSettings(vocabulary=CrossEntropySettings(z_loss=0.1))
    with pytest.raises(ValueError, match=r"temperature=0.0; expected a positive number"):
        TopSettings(temperature=0.0)
