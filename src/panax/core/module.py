"""`Module`: a frozen pytree whose annotations say everything about its parameters.

    class FeedForward(Module):
        w_up: Float[Array, "embed ffn"] = parameter(normal("embed"))
        w_down: Float[Array, "ffn embed"] = parameter(normal("ffn"))

    feed_forward = FeedForward.create(key, {"embed": 256, "ffn": 1024})

The shape is written once. `create` takes the sizes of the logical axes and draws each array with the key that the
field's name gives, so adding a parameter changes no other one's initial value.
"""

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar, dataclass_transform

import equinox as eqx
import jax
import jax.numpy as jnp

from .axes import class_axes
from .protocols import Axes

Initializer = Callable[[jax.Array, tuple[int, ...], Axes], jax.Array]
"""(key, shape, logical axes) to a float32 array."""


def normal(*fan_in: str, gain: float = 1.0, std: float | None = None) -> Initializer:
    """Nearly normal with standard deviation `gain / sqrt(product of the fan-in axes)`, or `std` where given.

    The sum of four uniform 16-bit integers (Irwin-Hall: within 3.46 deviations, excess kurtosis -0.3), scaled by one product.
    Sums of integers are exact, so a value is bitwise the same on every mesh and backend; an inverse error function is not: its
    last bit depends on how the compiler splits the array into vectors.
    """

    def draw(key: jax.Array, shape: tuple[int, ...], axes: Axes) -> jax.Array:
        fan = math.prod(size for size, name in zip(shape, axes) if name in fan_in)
        words = jax.random.bits(key, (2, *shape), jnp.uint32)
        halves = (words >> 16) + (words & 0xFFFF)
        centred = (halves[0] + halves[1]).astype(jnp.int32) - 2 * 0xFFFF
        deviation = math.sqrt(4 * (2.0**32 - 1) / 12)
        return centred.astype(jnp.float32) * jnp.float32(
            (std if std is not None else gain / math.sqrt(fan)) / deviation
        )

    return draw


def constant(value: float) -> Initializer:
    """The same value everywhere."""
    return lambda key, shape, axes: jnp.full(shape, value, jnp.float32)


def parameter(init: Initializer) -> Any:
    """A field that holds a parameter, with how it is drawn."""
    return eqx.field(metadata={"init": init})


def stacked(axis: str) -> Any:
    """A field whose modules all carry one more leading axis of this name: a stack of layers."""
    return eqx.field(metadata={"stacked": axis})


def name_key(key: jax.Array, name: str) -> jax.Array:
    """A key for `name`, the same whatever other names there are."""
    return jax.random.fold_in(key, int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little"))


AModule = TypeVar("AModule", bound="Module")


@dataclass_transform(field_specifiers=(eqx.field, parameter, stacked))
class Module(eqx.Module):
    """A pytree of parameters and static settings; see this file's head for how one is declared."""

    @classmethod
    def create(cls: type[AModule], key: jax.Array, sizes: Mapping[str, int], **fields: Any) -> AModule:
        """Draw the parameters, given the size of each logical axis.

        Args:
            sizes: Logical axis to size.
            fields: Static settings and sub-modules; also `None` for a parameter that this instance goes without,
                or an `Initializer` to draw it otherwise than the class says.
        """
        declared = class_axes(cls)
        for field in cls.__dataclass_fields__.values():
            init = fields.get(field.name, field.metadata.get("init"))
            if "init" not in field.metadata or init is None:
                continue
            axes = declared[field.name]
            shape = tuple(sizes[name] for name in axes if name is not None)
            fields[field.name] = init(name_key(key, field.name), shape, axes)
        return cls(**fields)


def logical_axes(module: Any) -> Any:
    """The logical axes of every array in a module: the module's own structure with a tuple at each leaf.

    Works on abstract modules (of `jax.ShapeDtypeStruct`) as on real ones.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(module)
    return treedef.unflatten([_axes_at(module, path) for path, _ in paths])


def _axes_at(node: Any, path: tuple[Any, ...]) -> Axes:
    prefix: Axes = ()
    for depth, entry in enumerate(path):
        if isinstance(node, Module):
            name = entry.name
            field = node.__dataclass_fields__[name]
            if depth == len(path) - 1:
                return prefix + class_axes(type(node))[name]
            if "stacked" in field.metadata:
                prefix = (*prefix, field.metadata["stacked"])
            node = getattr(node, name)
        else:
            node = node[entry.key if hasattr(entry, "key") else entry.idx]
    raise TypeError(f"{jax.tree_util.keystr(path)} is not an annotated parameter of a Module")


def stack(key: jax.Array, count: int, make: Callable[[jax.Array], Any]) -> Any:
    """`count` modules made with a key each, their arrays stacked along a new first axis."""
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(count))
    return jax.lax.map(make, keys) if _in_turn.get() else jax.vmap(make)(keys)


_in_turn: ContextVar[bool] = ContextVar("panax_draw_in_turn", default=False)


@contextlib.contextmanager
def draw_in_turn(wanted: bool) -> Iterator[None]:
    """Within it the modules of a `stack` are drawn one after the other, with the random bits of one of them in memory.

    The values are the same. Where devices hold different layers of a stack, each would draw all of them.
    """
    token = _in_turn.set(wanted)
    try:
        yield
    finally:
        _in_turn.reset(token)
