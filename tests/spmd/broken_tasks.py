"""Small tasks in the SPMD language that are right, and the same ones with a mistake each."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from panax.core import Evaluation, Loss, Maximum, Mean, Sum, Task, current_layout
from panax.spmd import (
    add_bias,
    all_gather_sequence,
    contract,
    gather,
    gather_weight,
    local_sequence,
    reduce_scatter_sequence,
    split_cotangent,
    sum_over_sequence,
)

EMBED, FFN, VOCAB, ROWS, LENGTH = 16, 32, 24, 8, 8
AXES = {"tokens": ("batch", "seq"), "y": ("batch", "seq", None), "weight": ("batch", "seq")}
UP, DOWN = "batch seq embed, embed ffn -> batch seq ffn", "batch seq ffn, ffn embed -> batch seq embed"


def batch() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(7), 3)
    return {
        "tokens": jax.device_get(jax.random.randint(keys[0], (ROWS, LENGTH), 0, VOCAB)),
        "y": jax.device_get(jax.random.normal(keys[1], (ROWS, LENGTH, EMBED))),
        "weight": jax.device_get(jax.random.uniform(keys[2], (ROWS, LENGTH))),
    }


def on_mesh() -> bool:
    return current_layout() is not None


@dataclasses.dataclass(frozen=True)
class Split(Task):
    """An embedding and a feed-forward layer, its residual stream split along the sequence. Each step may be overridden."""

    mesh_axes = frozenset({"replica", "fsdp", "tensor"})
    names_axes = True

    def init(self, key):
        keys = jax.random.split(key, 3)
        return {
            "bias": jnp.zeros((EMBED,)),
            "down": jax.random.normal(keys[0], (FFN, EMBED)) / 4,
            "scale": jnp.ones((EMBED,)),
            "table": jax.random.normal(keys[1], (VOCAB, EMBED)),
            "up": jax.random.normal(keys[2], (EMBED, FFN)) / 4,
        }, {}

    def parameter_axes(self, params):
        return {
            "bias": ("norm",),
            "down": ("ffn", "embed"),
            "scale": ("norm",),
            "table": ("vocab", "embed"),
            "up": ("embed", "ffn"),
        }

    def embedded(self, table, tokens):
        table = gather_weight(table, "vocab embed", jnp.float32).value
        rows = table.shape[0]
        first = lax.axis_index("tensor") * rows if on_mesh() else 0
        own = (tokens >= first) & (tokens < first + rows)
        part = jnp.where(own[..., None], table[jnp.where(own, tokens - first, 0)], 0.0)
        return self.joined(part)

    def joined(self, part):
        return reduce_scatter_sequence(part)

    def normed(self, x, scale):
        return (
            x * lax.rsqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6) * gather(scale, "norm", jnp.float32)[None, None]
        )

    def layer(self, x, params):
        hidden = jnp.tanh(contract(UP, all_gather_sequence(self.normed(x, params["scale"])), params["up"]))
        return x + add_bias(contract(DOWN, hidden, params["down"]), params["bias"], "norm")

    def loss(self, params, state, batch, key, train):
        x = self.layer(self.embedded(params["table"], batch["tokens"]), params)
        y, weight = local_sequence(batch["y"]), local_sequence(batch["weight"])
        squares = ((x - y) ** 2).sum(axis=-1)
        losses = {"squares": self.measured(squares, weight)}
        return Evaluation(losses, state, self.metrics(squares, weight))

    def measured(self, squares, weight):
        return Loss(self.total((squares * weight).sum()), self.total(weight.sum()))

    def total(self, x):
        return sum_over_sequence(x)

    def metrics(self, squares, weight):
        largest = lax.stop_gradient(squares.max())
        return {
            "mean": Mean(self.total(squares.sum()), self.total(weight.sum())),
            "tokens": Sum(self.total(jnp.float32(weight.size))),
            "largest": Maximum(lax.pmax(largest, "tensor") if on_mesh() else largest),
        }


@dataclasses.dataclass(frozen=True)
class Whole(Split):
    """The same with a residual stream that is whole on every device of the tensor axis."""

    splits_residual = False

    def joined(self, part):
        return _summed_shares(part) if on_mesh() else part

    def loss(self, params, state, batch, key, train):
        x = self.shares(self.layer(self.embedded(params["table"], batch["tokens"]), params))
        squares = ((x - batch["y"]) ** 2).sum(axis=-1)
        return Evaluation({"squares": self.measured(squares, batch["weight"])}, state, {})

    def shares(self, x):
        return split_cotangent(x)

    def total(self, x):
        return x


def _summed_shares(part):
    from panax.spmd import psum_both

    return psum_both(part, ("tensor",))


class NoSumOverTensor(Split):
    """A layer of its own that multiplies, and never adds the devices' terms up."""

    def layer(self, x, params):
        up, down = (gather_weight(params[n], a, x.dtype).value for n, a in (("up", "embed ffn"), ("down", "ffn embed")))
        hidden = jnp.tanh(all_gather_sequence(self.normed(x, params["scale"])) @ up)
        return x + local_sequence(hidden @ down)


class NoEqualShares(Whole):
    def shares(self, x):
        return x


class DividedLocally(Split):
    """The mean of a device's own tokens, where sums are asked for."""

    def measured(self, squares, weight):
        mean = (squares * weight).sum() / weight.sum()
        return Loss(self.total(mean), self.total(jnp.float32(1.0)))


class MetricNotSummed(Split):
    def metrics(self, squares, weight):
        return {"mean": Mean(squares.sum(), weight.sum())}


class BiasBeforeTheSum(Split):
    """Every device adds the bias to its term."""

    def layer(self, x, params):
        up, down = (gather_weight(params[n], a, x.dtype).value for n, a in (("up", "embed ffn"), ("down", "ffn embed")))
        hidden = jnp.tanh(all_gather_sequence(self.normed(x, params["scale"])) @ up)
        return x + reduce_scatter_sequence(add_bias(hidden @ down, params["bias"], "norm"))


class NormOverTheSplitWidth(Split):
    """A mean over the hidden width, of which a device has a part."""

    def layer(self, x, params):
        hidden = contract(UP, all_gather_sequence(self.normed(x, params["scale"])), params["up"])
        hidden = hidden * lax.rsqrt((hidden * hidden).mean(axis=-1, keepdims=True) + 1e-6)
        return x + contract(DOWN, hidden, params["down"])


class EmbeddingNotSummed(Whole):
    """Each device looks its own words up, and takes the others' for zeros."""

    def joined(self, part):
        return part


class GatheredOverTheWrongAxis(Split):
    """Positions are split over tensor; fsdp splits the rows."""

    def layer(self, x, params):
        if on_mesh():
            x = lax.all_gather(x, "fsdp", axis=1, tiled=True)[:, : x.shape[1]]
        return super().layer(x, params)


class SummedTwice(Split):
    """The loss is added up over tokens, which the step does again."""

    def measured(self, squares, weight):
        from panax.spmd import psum_over_tokens

        found = super().measured(squares, weight)
        return Loss(psum_over_tokens(found.sum), psum_over_tokens(found.weight))


class NonlinearBeforeTheSum(Split):
    """The activation of a term, not of the sum."""

    def layer(self, x, params):
        up, down = (gather_weight(params[n], a, x.dtype).value for n, a in (("up", "embed ffn"), ("down", "ffn embed")))
        hidden = all_gather_sequence(self.normed(x, params["scale"])) @ up
        return x + reduce_scatter_sequence(jnp.tanh(hidden @ down))


class UnknownKernelOnATerm(Split):
    def layer(self, x, params):
        up, down = (gather_weight(params[n], a, x.dtype).value for n, a in (("up", "embed ffn"), ("down", "ffn embed")))
        hidden = jnp.tanh(all_gather_sequence(self.normed(x, params["scale"])) @ up)
        term = hidden @ down
        shape = jax.ShapeDtypeStruct(term.shape, term.dtype)
        return x + reduce_scatter_sequence(jax.pure_callback(lambda t: t, shape, lax.stop_gradient(term)))


class GradientOfAStoppedTerm(Whole):
    """A mask from a device's own term scales what all devices share."""

    def layer(self, x, params):
        up, down = (gather_weight(params[n], a, x.dtype).value for n, a in (("up", "embed ffn"), ("down", "ffn embed")))
        term = jnp.tanh(self.normed(x, params["scale"]) @ up) @ down
        return x * lax.stop_gradient(term) + contract(DOWN, jnp.tanh(contract(UP, x, params["up"])), params["down"])


BROKEN = {
    # Task: (mesh axis, what the message says, a line of this file that it shows, or "")
    NoSumOverTensor: ("tensor", "partial sum", "NoSumOverTensor.layer"),
    NoEqualShares: ("tensor", "split_cotangent", ""),
    DividedLocally: ("fsdp", "divides by a partial sum", "DividedLocally.measured"),
    MetricNotSummed: ("tensor", "partial sum over devices that is never reduced", ""),
    BiasBeforeTheSum: ("tensor", "counts once per device", "BiasBeforeTheSum.layer"),
    NormOverTheSplitWidth: ("tensor", "partial sum", "NormOverTheSplitWidth.layer"),
    EmbeddingNotSummed: ("tensor", "each device's own", ""),
    GatheredOverTheWrongAxis: ("fsdp", "gathers along dimension 1", "GatheredOverTheWrongAxis.layer"),
    SummedTwice: ("fsdp", "equal on every device", ""),
    NonlinearBeforeTheSum: ("tensor", "takes 'tanh' of a partial sum", "NonlinearBeforeTheSum.layer"),
    UnknownKernelOnATerm: ("tensor", "which has no known rule", "UnknownKernelOnATerm.layer"),
    GradientOfAStoppedTerm: ("tensor", "", "GradientOfAStoppedTerm.layer"),
}
