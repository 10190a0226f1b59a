"""`Module`: a frozen pytree with annotations that fully describe its parameters.

    class FeedForward(Module):
        w_up: Float[Array, "embed ffn"] = parameter(normal("embed"))
        w_down: Float[Array, "ffn embed"] = parameter(normal("ffn"))

    feed_forward = FeedForward.create(key, {"embed": 256, "ffn": 1024})

Shapes are written once. `create` takes the sizes of the logical axes and initializes each array with a key
derived from the field's name, so adding a parameter does not change the initial values of others.
"""

import contextlib
import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar, dataclass_transform

import equinox as eqx
import jax
import jax.numpy as jnp

from ..protocols import Axes
from .axes import class_axes

Initializer = Callable[[jax.Array, tuple[int, ...], Axes], jax.Array]
"""(key, shape, logical axes) to a float32 array."""


def normal(*fan_in: str, gain: float = 1.0, std: float | None = None) -> Initializer:
    """Initialize nearly normally, with standard deviation `std`, or `gain / sqrt(product of the fan-in axes)`
    by default.

    Values are the sum of four uniform 16-bit integers (Irwin-Hall: within 3.46 standard deviations, excess
    kurtosis -0.3), scaled by one multiplication. Integer sums are exact, so values are bitwise equal on every
    mesh and backend. An inverse error function is not: its last bit depends on how the compiler vectorizes
    the array.
    """

    def draw(key: jax.Array, shape: tuple[int, ...], axes: Axes) -> jax.Array:
        fan = math.prod(size for size, name in zip(shape, axes) if name in fan_in)
        words = jax.random.bits(key, (2, *shape), jnp.uint32)
        halves = (words >> 16) + (words & 0xFFFF)
        centered = (halves[0] + halves[1]).astype(jnp.int32) - 2 * 0xFFFF
        deviation = math.sqrt(4 * (2.0**32 - 1) / 12)
        return centered.astype(jnp.float32) * jnp.float32(
            (std if std is not None else gain / math.sqrt(fan)) / deviation
        )

    return draw


def constant(value: float) -> Initializer:
    """Initialize every element to the same value."""
    return lambda key, shape, axes: jnp.full(shape, value, jnp.float32)


def parameter(init: Initializer | None, *, default: Any = dataclasses.MISSING) -> Any:
    """Declare a field that holds a parameter, with its initializer.

    Args:
        default: None, with `init=None`: only instances for which `create` is given an initializer have it.
    """
    return eqx.field(metadata={"init": init}, default=default)


def stacked_modules(axis: str) -> Any:
    """Declare a field of modules that have an additional leading axis of this name: a stack of layers."""
    return eqx.field(metadata={"stacked": axis})


def name_key(key: jax.Array, name: str) -> jax.Array:
    """Derive a key for `name`, independent of other names."""
    return jax.random.fold_in(key, int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little"))


AModule = TypeVar("AModule", bound="Module")


@dataclass_transform(field_specifiers=(eqx.field, parameter, stacked_modules))
class Module(eqx.Module):
    """A pytree of parameters and static settings; see the module docstring for how to declare one."""

    @classmethod
    def create(cls: type[AModule], key: jax.Array, sizes: Mapping[str, int], **fields: Any) -> AModule:
        """Initialize the parameters, given the size of each logical axis.

        Args:
            sizes: Logical axis to size.
            fields: Static settings and submodules; also `None` for a parameter that this instance does not
                have, or an `Initializer` that replaces the declared one.
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
    """Return the logical axes of every array in a module, as a tree of the module's structure with a tuple at
    each leaf.

    Abstract modules (of `jax.ShapeDtypeStruct`) work too.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(module)
    return treedef.unflatten([_axes_at(module, path) for path, _ in paths])


def _axes_at(node: Any, path: tuple[Any, ...]) -> Axes:
    prefix: Axes = ()
    for depth, entry in enumerate(path):
        if isinstance(node, Module):
            name = entry.name
            field = node.__dataclass_fields__[name]
            if (axes := class_axes(type(node)).get(name)) is not None:
                return _part_axes(getattr(node, name), prefix + axes, path[depth + 1 :])
            if "stacked" in field.metadata:
                prefix = (*prefix, field.metadata["stacked"])
            node = getattr(node, name)
        else:
            node = node[entry.key if hasattr(entry, "key") else entry.idx]
    raise TypeError(f"{jax.tree_util.keystr(path)} is not an annotated parameter of a Module")


def _part_axes(weight: Any, axes: Axes, path: tuple[Any, ...]) -> Axes:
    """Return the axes of an array nested in a weight at any depth."""
    if not path:
        return axes
    name = path[0].name
    return _part_axes(getattr(weight, name), weight.part_axes(axes)[name], path[1:])


def stack(key: jax.Array, count: int, make: Callable[[jax.Array], Any]) -> Any:
    """Create `count` modules with a key each, and stack their arrays along a new leading axis."""
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(count))
    return jax.lax.map(make, keys) if _is_sequential.get() else jax.vmap(make)(keys)


_is_sequential: ContextVar[bool] = ContextVar("panax_draw_in_turn", default=False)


@contextlib.contextmanager
def init_sequentially(enabled: bool) -> Iterator[None]:
    """Initialize the modules of a `stack` inside one by one if `enabled`, so that only one module's random bits
    are in memory.

    The values are the same. This helps if devices hold different layers of a stack, since each device would
    otherwise generate all layers.
    """
    token = _is_sequential.set(enabled)
    try:
        yield
    finally:
        _is_sequential.reset(token)
