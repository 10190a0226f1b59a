"""The chunked cross-entropy of a linear head: against optax on whole logits, its memory, and its places of use."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from panax.core import Target
from panax.kernels import (
    CrossEntropySettings,
    chunk_tokens_within,
    cross_entropy_sums,
    cross_entropy_sums_and_gradients,
    linear_cross_entropy,
)

TOKENS, EMBED, VOCAB = 48, 16, 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    soft_cap: float | None = None
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    vocab_size: int | None = None
    chunk_tokens: int | None = None

    def __str__(self) -> str:
        return ",".join(f"{k}={v}" for k, v in dataclasses.asdict(self).items() if v) or "plain"

    def as_dict(self, vocab_axis: str | None = None) -> dict:
        """The arguments of the functions."""
        terms = dataclasses.asdict(self)
        chunk_tokens = terms.pop("chunk_tokens")
        settings = CrossEntropySettings(**terms, vocab_axis=vocab_axis)
        return {"settings": settings, "target": Target("cpu"), "chunk_tokens": chunk_tokens}


EVERYTHING = Options(soft_cap=4.0, z_loss=1e-2, label_smoothing=0.1, vocab_size=37, chunk_tokens=20)
CASES = [Options(), Options(z_loss=1e-2, chunk_tokens=16), EVERYTHING]


def inputs(dtype=jnp.float32, head_dtype=None):
    generator = np.random.default_rng(0)
    x = jnp.asarray(generator.normal(size=(TOKENS, EMBED)), dtype)
    head = jnp.asarray(generator.normal(size=(VOCAB, EMBED)), head_dtype or dtype)
    targets = generator.integers(0, 37, TOKENS)
    mask = generator.uniform(size=TOKENS)
    # What ignored tokens hold is of no consequence.
    targets[[3, 7, 47]], mask[[3, 7, 47]] = [-100, VOCAB, 10**6], 0.0
    return x, head, jnp.asarray(targets, jnp.int32), jnp.asarray(mask, jnp.float32)


def dense(x, head, targets, mask, options):
    """The sums by optax, from whole logits."""
    logits = jnp.einsum("ce,ve->cv", x, head)
    if options.soft_cap is not None:
        logits = options.soft_cap * jnp.tanh(logits / options.soft_cap)
    logits = logits[:, : options.vocab_size]
    targets = jnp.where(mask > 0, targets, 0)
    labels = optax.smooth_labels(jax.nn.one_hot(targets, logits.shape[1]), options.label_smoothing)
    z_loss = (options.z_loss * mask * jax.nn.logsumexp(logits, axis=-1) ** 2).sum()
    loss = (mask * optax.softmax_cross_entropy(logits, labels)).sum() + z_loss
    correct = (mask * (logits.argmax(axis=-1) == targets).astype(mask.dtype)).sum()
    return loss, (loss, mask.sum(), correct, z_loss)


def dense_with_gradients(x, head, targets, mask, options):
    function = jax.value_and_grad(functools.partial(dense, options=options), (0, 1), has_aux=True)
    (_, sums), (d_x, d_head) = jax.jit(function)(x, head, targets, mask)
    return *sums, d_x, d_head


def assert_close(actual, expected, dtype=jnp.float32):
    """Equal up to rounding.

    An entry sums at most 48 products (tokens; or the vocabulary, or the embedding): rounding errors of at most the
    largest entry grow as the root of that, 7, and 4 roundings meet in each: 28 units of the dtype. In 16 bits sums are
    kept in float32, and only the 4 remain.
    """
    units = 28 if dtype == jnp.float32 else 4
    for left, right in zip(actual, expected):
        left, right = np.asarray(left, np.float32), np.asarray(right, np.float32)
        np.testing.assert_allclose(left, right, rtol=0, atol=units * float(jnp.finfo(dtype).eps) * np.abs(right).max())


@pytest.mark.parametrize("options", CASES, ids=str)
def test_equals_optax_on_whole_logits(options):
    arrays = inputs()
    expected = dense_with_gradients(*arrays, options)
    sums, d_x, d_head = jax.jit(functools.partial(cross_entropy_sums_and_gradients, **options.as_dict()))(*arrays)
    assert_close((*sums, d_x, d_head), expected)
    assert not np.asarray(d_x)[[3, 7, 47]].any()
    assert_close(jax.jit(functools.partial(cross_entropy_sums, **options.as_dict()))(*arrays), expected[:4])

    def loss(x, head):
        sums = linear_cross_entropy(x, head, *arrays[2:], **options.as_dict())
        return 3.0 * sums.loss_sum + sums.correct_sum, sums

    (_, sums), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(*arrays[:2])
    assert_close((*sums, *(gradient / 3.0 for gradient in gradients)), expected)


def test_bfloat16_with_a_float32_head():
    arrays = inputs(jnp.bfloat16, head_dtype=jnp.float32)
    x, head = (array.astype(jnp.bfloat16).astype(jnp.float32) for array in arrays[:2])
    sums, d_x, d_head = jax.jit(functools.partial(cross_entropy_sums_and_gradients, **EVERYTHING.as_dict()))(*arrays)
    assert d_x.dtype == jnp.bfloat16
    assert d_head.dtype == jnp.float32
    expected = dense_with_gradients(x, head, *arrays[2:], EVERYTHING)
    assert_close((*sums, d_x, d_head), expected, jnp.bfloat16)
    # In one chunk, too, where XLA sees the products and the transpositions around them without a loop between.
    one_chunk = Options()

    def loss(x, head):
        return linear_cross_entropy(x, head, *arrays[2:], **one_chunk.as_dict()).loss_sum

    gradients = jax.jit(jax.grad(loss, (0, 1)))(*arrays[:2])
    assert_close(gradients, dense_with_gradients(x, head, *arrays[2:], one_chunk)[4:], jnp.bfloat16)
    assert [gradient.dtype for gradient in gradients] == [jnp.bfloat16, jnp.float32]


def test_logits_are_never_whole():
    tokens, vocab, chunk = 2048, 2048, 128
    logits_bytes = 4 * tokens * vocab

    def temporary_bytes(chunk_tokens):
        def loss(x, head, targets, mask):
            return linear_cross_entropy(
                x, head, targets, mask, target=Target("cpu"), chunk_tokens=chunk_tokens
            ).loss_sum

        shapes = ((tokens, 32), (vocab, 32), (tokens,), (tokens,))
        dtypes = (jnp.float32, jnp.float32, jnp.int32, jnp.float32)
        arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes)]
        compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*arrays).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    # A chunk's logits, exponentials and gradient, and copies of x and the head, which are far smaller than the logits.
    assert temporary_bytes(chunk) < logits_bytes / 3
    assert temporary_bytes(tokens) > logits_bytes


def test_chunks_fit_the_budget():
    for tokens, vocab, budget in [(4096, 1000, 2**20), (100, 50, 2**30), (1000, 10**6, 2**20), (8191, 512, 2**20)]:
        chunk = chunk_tokens_within(budget, tokens=tokens, vocab=vocab)
        assert chunk == 1 or chunk * vocab * 4 <= budget
        assert 1 <= chunk <= tokens


@pytest.mark.parametrize("vocab_axis", [None, "tensor"])
def test_inside_a_checked_shard_map(vocab_axis):
    """Tokens split over one axis, and the vocabulary whole or split over another: same loss, same gradients."""
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    arrays = inputs()
    specs = (P("data"), P(vocab_axis), P("data"), P("data"))
    options = EVERYTHING.as_dict(vocab_axis)

    def local_loss(*arrays):
        sums = linear_cross_entropy(*arrays, **options)
        return jax.tree.map(lambda part: jax.lax.psum(part, "data"), sums)

    def loss(*arrays):
        sums = jax.shard_map(local_loss, in_specs=specs, out_specs=P(), check_vma=True)(*arrays)
        return sums.loss_sum, sums

    with jax.set_mesh(mesh):
        sharded = [jax.device_put(array, spec) for array, spec in zip(arrays, specs)]
        (_, sums), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(*sharded)
    assert_close((*sums, *gradients), dense_with_gradients(*arrays, EVERYTHING))


def test_refuses_what_makes_no_sense():
    arrays = inputs()
    for options, message in [
        (Options(label_smoothing=1.0), "at least 0 and below 1"),
        (Options(chunk_tokens=0), "at least 1"),
        (Options(vocab_size=41), "between 1 and the head's 40 rows"),
    ]:
        with pytest.raises(ValueError, match=message):
            cross_entropy_sums(*arrays, **options.as_dict())


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_a_model_that_has_collapsed_is_not_right(value):
    """All logits are alike: no target has the highest one."""
    _, head, targets, mask = inputs()
    head = jnp.full_like(head, value)
    sums = cross_entropy_sums(
        jnp.ones((TOKENS, EMBED)), head, jnp.clip(targets, 0, VOCAB - 1), mask, target=Target("cpu")
    )
    assert sums.correct_sum == 0.0
    # One that is alone at the top is.
    head = head.at[5].add(1.0)
    sums = cross_entropy_sums(jnp.ones((TOKENS, EMBED)), head, jnp.full(TOKENS, 5), mask, target=Target("cpu"))
    assert sums.correct_sum == pytest.approx(float(mask.sum()))
