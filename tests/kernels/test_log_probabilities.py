"""Log-probabilities of a linear head: against whole logits, values and gradients, and where the vocabulary is split."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from panax.core import Target
from panax.kernels import CrossEntropySettings, linear_log_probabilities

TOKENS, EMBED, VOCAB = 48, 16, 40
CASES = {
    "plain": (CrossEntropySettings(), None),
    "chunks": (CrossEntropySettings(), 20),
    "cap, padded vocabulary": (CrossEntropySettings(soft_cap=4.0, vocab_size=37), 16),
}


def inputs(dtype=jnp.float32):
    generator = np.random.default_rng(0)
    x = jnp.asarray(generator.normal(size=(TOKENS, EMBED)), dtype)
    head = jnp.asarray(generator.normal(size=(VOCAB, EMBED)), jnp.float32)
    targets, mask = generator.integers(0, 37, TOKENS), (generator.uniform(size=TOKENS) < 0.8).astype(np.float32)
    # What ignored tokens hold is of no consequence.
    targets[[3, 7, 47]], mask[[3, 7, 47]] = [-100, VOCAB, 10**6], 0.0
    cotangent = jnp.asarray(generator.normal(size=TOKENS), jnp.float32)
    return x, head, jnp.asarray(targets, jnp.int32), jnp.asarray(mask), cotangent


def from_logits(x, head, targets, mask, settings):
    logits = jnp.einsum("ce,ve->cv", x, head)
    if settings.soft_cap is not None:
        logits = settings.soft_cap * jnp.tanh(logits / settings.soft_cap)
    log = jax.nn.log_softmax(logits[:, : settings.vocab_size], axis=-1)
    return jnp.take_along_axis(log, jnp.where(mask > 0, targets, 0)[:, None], axis=1)[:, 0] * mask


def with_gradients(function, x, head, targets, mask, cotangent):
    @jax.jit
    def both(x, head):
        values, pull = jax.vjp(lambda x, head: function(x, head, targets, mask), x, head)
        return values, *pull(cotangent)

    return both(x, head)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_definition(name):
    settings, chunk = CASES[name]
    expected = with_gradients(functools.partial(from_logits, settings=settings), *inputs())
    ours = functools.partial(linear_log_probabilities, settings=settings, target=Target("cpu"), chunk_tokens=chunk)
    # Sums of at most 48 products: see test_cross_entropy.py.
    for actual, wanted in zip(with_gradients(ours, *inputs()), expected, strict=True):
        assert np.abs(actual - wanted).max() <= 28 * np.finfo(np.float32).eps * np.abs(wanted).max()


def test_bfloat16_accumulates_in_float32():
    x, head, *rest = inputs(jnp.bfloat16)
    rounded = (x.astype(jnp.float32), head.astype(jnp.bfloat16).astype(jnp.float32))
    expected = with_gradients(functools.partial(from_logits, settings=CrossEntropySettings()), *rounded, *rest)
    values, d_x, d_head = with_gradients(
        functools.partial(linear_log_probabilities, target=Target("cpu")), x, head, *rest
    )
    assert (values.dtype, d_x.dtype, d_head.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(values, expected[0], atol=28 * np.finfo(np.float32).eps * np.abs(expected[0]).max())
    for actual, wanted in zip((d_x, d_head), expected[1:], strict=True):
        assert np.abs(np.asarray(actual, np.float32) - wanted).max() <= 4 * 2.0**-8 * np.abs(wanted).max()


@pytest.mark.parametrize("vocab_axis", [None, "tensor"])
def test_inside_a_checked_shard_map(vocab_axis):
    """Tokens split over one axis, the vocabulary whole or split over another: the same values and gradients."""
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    settings = CASES["cap, padded vocabulary"][0]
    split = dataclasses.replace(settings, vocab_axis=vocab_axis)
    specs = (P("data"), P(vocab_axis), P("data"), P("data"))
    local = functools.partial(linear_log_probabilities, settings=split, target=Target("cpu"), chunk_tokens=9)
    arrays = inputs()
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(array, spec) for array, spec in zip(arrays, (*specs, P("data")), strict=True)]
        found = with_gradients(jax.shard_map(local, in_specs=specs, out_specs=P("data"), check_vma=True), *sharded)
    expected = with_gradients(functools.partial(from_logits, settings=settings), *arrays)
    for actual, wanted in zip(found, expected, strict=True):
        assert np.abs(np.asarray(actual) - wanted).max() <= 28 * np.finfo(np.float32).eps * np.abs(wanted).max()


def test_a_target_outside_of_the_vocabulary_is_nan_where_it_counts():
    x, head, targets, mask, _ = inputs()
    values = linear_log_probabilities(x, head, targets.at[0].set(VOCAB), mask.at[0].set(1.0), target=Target("cpu"))
    assert np.flatnonzero(np.isnan(values)).tolist() == [0]


@pytest.mark.parametrize("settings", [CrossEntropySettings(z_loss=0.1), CrossEntropySettings(label_smoothing=0.1)])
def test_terms_of_a_cross_entropy_are_refused(settings):
    with pytest.raises(ValueError, match="a log-probability has none: set it to 0"):
        linear_log_probabilities(*inputs()[:4], settings, target=Target("cpu"))


@pytest.mark.full
def test_logits_are_never_whole():
    tokens, vocab, chunk = 2048, 2048, 128

    def temporary_bytes(chunk_tokens):
        def loss(x, head, targets, mask):
            values = linear_log_probabilities(x, head, targets, mask, target=Target("cpu"), chunk_tokens=chunk_tokens)
            return jnp.sum(jnp.square(values))

        shapes = ((tokens, 32), (vocab, 32), (tokens,), (tokens,))
        dtypes = (jnp.float32, jnp.float32, jnp.int32, jnp.float32)
        arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes)]
        compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*arrays).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    # As in test_cross_entropy.py: a chunk's logits, exponentials and gradient, and copies of x and the head.
    assert temporary_bytes(chunk) < 4 * tokens * vocab / 3
    assert temporary_bytes(tokens) > 4 * tokens * vocab
