"""Attention cases, their inputs, and the one tolerance they are all compared with."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from panax.kernels.attention.mask import MaskRule
from panax.kernels.attention.operands import ScoreRule
from panax.kernels.attention.reference import reference_attention


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    heads: int = 4
    kv_heads: int = 2
    query_seq: int = 40
    key_seq: int | None = None
    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None
    packed: bool = False
    sinks: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def options(self) -> dict:
        mask = MaskRule(causal=self.causal, window=self.window)
        return {"scores": ScoreRule(mask=mask, scale=0.4, soft_cap=self.soft_cap)}

    def inputs(self, dtype=jnp.float32) -> tuple[jax.Array, ...]:
        """q, k, v and the cotangent of the output."""
        keys = self.key_seq or self.query_seq
        shapes = [
            (self.query_seq, self.heads),
            (keys, self.kv_heads),
            (keys, self.kv_heads),
            (self.query_seq, self.heads),
        ]
        generator = np.random.default_rng(0)
        return tuple(jnp.asarray(generator.normal(size=(2, seq, heads, 8)), dtype) for seq, heads in shapes)

    @property
    def sink_scores(self) -> jax.Array | None:
        """A score of each head, from one that takes nearly all of its softmax to one that takes nothing."""
        return jnp.linspace(4.0, -8.0, self.heads, dtype=jnp.float32) if self.sinks else None

    @property
    def segments(self) -> jax.Array | None:
        """Two rows of packed documents; the first ends in padding, the second has some in its middle too."""
        if not self.packed:
            return None
        n = self.query_seq
        first = [1] * (n // 2) + [2] * (n - n // 2 - 3) + [0] * 3
        second = [1] * 5 + [0] * 2 + [3] * (n - 7)
        return jnp.asarray([first, second], jnp.int32)


CASES = [
    Case(name="causal_grouped"),
    Case(name="multi_query_window", kv_heads=1, window=7),
    Case(name="bidirectional_soft_cap", causal=False, soft_cap=2.0, kv_heads=4),
    Case(name="packed_everything", packed=True, window=9, soft_cap=2.0),
    Case(name="packed_bidirectional_window", packed=True, causal=False, window=5),
    Case(name="cross_lengths", query_seq=24, key_seq=40, causal=False),
    Case(name="sinks", sinks=True),
    Case(name="packed_sinks_window", packed=True, window=9, soft_cap=2.0, sinks=True),
]


def outputs_and_gradients(attend: Callable, case: Case, dtype=jnp.float32) -> tuple[np.ndarray, ...]:
    """The output and the gradients of q, k, v and the sinks, if there are any, compiled once, as float32."""

    @jax.jit
    def run(q, k, v, d_out):
        def call(q, k, v, sinks):
            sinks_option = {} if sinks is None else {"sinks": sinks}
            return attend(q, k, v, case.segments, **case.options, **sinks_option)

        out, pull = jax.vjp(call, q, k, v, case.sink_scores)
        return out, *(gradient for gradient in pull(d_out) if gradient is not None)

    return tuple(np.asarray(x, np.float32) for x in run(*case.inputs(dtype)))


def reference(case: Case, dtype=jnp.float32) -> tuple[np.ndarray, ...]:
    """Results of the definition in float32 for inputs that were rounded to `dtype`."""

    def attend(q, k, v, segments, **options):
        return reference_attention(*(x.astype(jnp.float32) for x in (q, k, v)), segments, **options)

    rounded = dataclasses.replace(case)
    object.__setattr__(rounded, "inputs", lambda _: tuple(x.astype(jnp.float32) for x in case.inputs(dtype)))
    return outputs_and_gradients(attend, rounded)


def assert_close(actual: tuple[np.ndarray, ...], expected: tuple[np.ndarray, ...], dtype=jnp.float32) -> None:
    """Equal up to rounding.

    An entry is a sum of at most 80 products of rounded factors (40 positions, two heads of a group), each off by a few
    roundings of at most the largest entry: independent errors grow as the root of their number, 9, and 4 roundings (a
    score, a weight, a product, the result) meet in each. So 36 units of the dtype, of the largest entry.
    In 16 bits the sums are kept in float32: only the 4 roundings remain.
    """
    units = 36 if dtype == jnp.float32 else 4
    assert len(actual) == len(expected)
    for name, left, right in zip(("out", "d_q", "d_k", "d_v", "d_sinks"), actual, expected):
        allowed = units * float(jnp.finfo(dtype).eps) * np.abs(right).max()
        np.testing.assert_allclose(left, right, rtol=0, atol=allowed, err_msg=name)
