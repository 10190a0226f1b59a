"""Attention split over devices: cases, how they are run, their references, and the traffic of a program."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from panax.core import Target
from panax.core.protocols import RowOrder
from panax.kernels.attention.attention import AttentionOptions, attention
from panax.kernels.attention.mask import MaskRule
from panax.kernels.attention.operands import ScoreRule
from panax.kernels.attention.reference import reference_attention
from panax.parallel.context import ContextAxis, zigzag_order
from panax.parallel.ring import ring_attention
from panax.parallel.ulysses import ulysses_attention

BATCH, HEAD_DIM = 2, 8
CPU = Target("cpu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    context: int = 4
    fsdp: int = 1
    length: int = 64
    heads: int = 4
    kv_heads: int = 2
    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None
    packed: bool = False
    rows_are: RowOrder = "zigzag"

    def __str__(self) -> str:
        return self.name

    @property
    def mesh(self) -> Mesh:
        devices = jax.devices()[: self.fsdp * self.context]
        types = (AxisType.Auto,) * 2
        return jax.make_mesh((self.fsdp, self.context), ("fsdp", "context"), axis_types=types, devices=devices)

    @property
    def rows(self) -> P:
        return P("fsdp", "context")

    def inputs(self, dtype=jnp.float32) -> tuple[jax.Array, ...]:
        """q, k, v, the cotangent of the output, and the segments: in the order of the rows."""
        generator = np.random.default_rng(1)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        arrays = [jnp.asarray(generator.normal(size=(BATCH, self.length, n, HEAD_DIM)), dtype) for n in heads]
        n = self.length
        first = [1] * (n // 2 + 3) + [2] * (n // 4) + [0] * (n - n // 2 - 3 - n // 4)
        second = [1] * 5 + [0] * 2 + [3] * (n - 7)
        return *arrays, jnp.asarray([first, second], jnp.int32)

    def of_rows(self, q, k, v, segments, kernel):
        """The definition, or another kernel, on whole rows."""
        return kernel(q, k, v, segments if self.packed else None, scores=self.scores)

    @property
    def scores(self) -> ScoreRule:
        mask = MaskRule(causal=self.causal, window=self.window)
        return ScoreRule(mask=mask, scale=1 / math.sqrt(HEAD_DIM), soft_cap=self.soft_cap)

    def local(self, name: str, target: Target = CPU, sinks: jax.Array | None = None):
        """Ring or Ulysses attention of one device's shards."""
        options = AttentionOptions(causal=self.causal, window=self.window, soft_cap=self.soft_cap)
        axis = ContextAxis("context", self.context, self.rows_are)
        if name == "ring":
            return functools.partial(ring_attention, axis=axis, options=options._replace(sinks=sinks), target=target)
        static = {key: value for key, value in options._asdict().items() if key != "sinks"}
        kernel = functools.partial(attention, target=target, **static)
        return functools.partial(ulysses_attention, axis=axis, sinks=sinks, kernel=kernel)

    def split(self, name: str, *, target: Target = CPU, gradients: bool = True):
        """Output and cotangents as a function of (q, k, v, cotangent of the output, segments), rows as devices hold them."""

        def on_device(q, k, v, d_out, segments):
            attend = functools.partial(self.local(name, target), segments=segments if self.packed else None)
            if not gradients:
                return (attend(q, k, v),)
            out, pull = jax.vjp(attend, q, k, v)
            return out, *pull(d_out)

        outputs = 4 if gradients else 1
        return jax.shard_map(
            on_device, mesh=self.mesh, in_specs=(self.rows,) * 5, out_specs=(self.rows,) * outputs, check_vma=False
        )

    def run(self, name: str, dtype=jnp.float32) -> tuple[np.ndarray, ...]:
        """The output and the gradients of q, k and v, in the order of the rows."""
        order = zigzag_order(self.length, self.context)
        order = np.arange(self.length) if self.rows_are == "contiguous" else order
        inverse = np.argsort(order)
        outputs = jax.jit(self.split(name))(*(x[:, order] for x in self.inputs(dtype)))
        return tuple(np.asarray(x, np.float32)[:, inverse] for x in outputs)

    def expected(self, dtype=jnp.float32, kernel=reference_attention) -> tuple[np.ndarray, ...]:
        """Results of a kernel for whole rows."""

        @jax.jit
        def run(q, k, v, d_out, segments):
            out, pull = jax.vjp(lambda q, k, v: self.of_rows(q, k, v, segments, kernel), q, k, v)
            return out, *pull(d_out)

        return tuple(np.asarray(x, np.float32) for x in run(*self.inputs(dtype)))

    def shapes(self, dtype=jnp.float32) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.inputs(dtype)]


# Chunks hold 8 of 64 tokens at context=4, 16 at 2 and 4 at 8. Every option is met by some case at each size of the axis.
CASES = [
    Case(name="two_devices", context=2, packed=True),
    Case(name="causal_beside_fsdp", fsdp=2),
    Case(name="eight_devices_one_kv_head", context=8, heads=8, kv_heads=1),
    Case(name="window_below_a_chunk", window=5, packed=True, fsdp=2),
    Case(name="window_above_a_chunk", window=21, soft_cap=2.0),
    Case(name="window_of_whole_chunks", context=2, window=16, kv_heads=1),
    Case(name="eight_devices_window", context=8, heads=8, kv_heads=2, window=9, packed=True, soft_cap=2.0),
    Case(name="five_devices_no_common_divisor", context=5, length=60, heads=10, kv_heads=2, window=40),
    Case(name="everything_visible", causal=False, packed=True, soft_cap=2.0),
    Case(name="bidirectional_window", causal=False, window=11, kv_heads=4),
]


def difference(actual: np.ndarray, expected: np.ndarray) -> float:
    """The norm of the difference, of that of the expected."""
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def equations(jaxpr, times: int = 1):
    """(equation, how often it runs) of a program and of all programs in it; one of several branches counts as each."""
    for equation in jaxpr.eqns:
        yield equation, times
        inner = times * equation.params["length"] if equation.primitive.name == "scan" else times
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inside = getattr(value, "jaxpr", value)
            if hasattr(inside, "eqns"):
                yield from equations(inside, inner)


def program(case: Case, name: str, *, dtype=jnp.float32, target: Target = CPU, gradients: bool = True):
    """`equations` of a device's program."""
    split = case.split(name, target=target, gradients=gradients)
    return list(equations(jax.make_jaxpr(split)(*case.shapes(dtype)).jaxpr))


def sent_bytes(executions, axis_size: int) -> int:
    """What each device sends, from the arrays that the collectives of a program take."""
    sent = 0
    for equation, times in executions:
        operand_bytes = sum(x.aval.size * x.aval.dtype.itemsize for x in equation.invars)
        # Of what it exchanges a device keeps its own part; what is gathered it hands on to all others.
        share = {
            "ppermute": (1, 1),
            "all_to_all": (axis_size - 1, axis_size),
            "all_gather": (axis_size - 1, 1),
        }.get(equation.primitive.name)
        assert share or equation.primitive.name not in {"psum", "pmax", "reduce_scatter", "psum_invariant"}
        if share:
            sent += times * operand_bytes * share[0] // share[1]
    return sent


def product_flops(executions) -> int:
    """Twice the multiplications of all matrix products."""
    flops = 0
    for equation, times in executions:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            flops += times * 2 * equation.outvars[0].aval.size * math.prod(left[dim] for dim in contracted)
    return flops
