"""Sums over devices that begin in the backward pass: each layer's, as soon as its gradient is there.

A gradient that is summed after the backward pass has no work to hide behind. So what a scan of layers is given of the parameters
is followed (`scan_layers`), and each layer's part passes through an identity whose derivative adds up: this gradient, that of the
micro-batches before, over the mesh axes on which the parameter is stored alike. What no scan of layers is given is left to be
summed at the end.

    with sums_in_backward(InBackward(reduce, names)) as sums:
        gradients = ...        # of these, those in sums.met are whole sums

A parameter is known by its array: the one that the loss was given is the one that the scan is given.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from ..core.axes import path_name


def parameter_name(path: tuple[Any, ...]) -> str:
    """The name of the parameter at a path, of which only the slot may be differentiated (`once.py`)."""
    return path_name(path).removesuffix(".slot")


ReduceWhole = Callable[[str, jax.Array], jax.Array]
"""(name of a parameter, its gradient of all layers, a device's share) to the sum over devices."""

Reduce = Callable[[str, jax.Array, jax.Array | None], tuple[jax.Array, jax.Array | None]]
"""(name of a parameter, a layer's gradient, what its sums owe) to (the sum over devices, what is owed now)."""


class GradReduceOverlap:
    """Which parameters are summed in the backward pass of a loss that is being traced, and how.

    Attributes:
        owed: By parameter what its sums owe, layers in front; it is differentiated with the parameters, and its gradient is what
            they owe afterwards.
        met: Of the parameters, those that a scan of layers was given.
    """

    def __init__(
        self,
        reduce: Reduce,
        reduce_whole: ReduceWhole,
        names: frozenset[str],
        owed: Mapping[str, jax.Array],
        *,
        of_each: bool = False,
    ):
        """
        Args:
            reduce_whole: Sums what a parameter that a scan was given has of other uses, such as a penalty on weights.
            names: Of the parameters whose layers may be summed by themselves.
            of_each: Sum each micro-batch's gradients; else those of all together, in the backward pass of the last one.
        """
        self.reduce, self.names, self.owed, self.of_each = reduce, names, dict(owed), of_each
        self.reduce_whole = reduce_whole
        self.met: set[str] = set()
        self._used_elsewhere: set[str] = set()
        self._scanned: Mapping[str, jax.Array] = {}
        self._known: dict[int, str] = {}
        self._added: Mapping[str, jax.Array] = {}
        self._owed: Mapping[str, jax.Array] = {}
        self._held: Any = None

    def scanned(self, free: Any) -> dict[str, jax.Array]:
        """The parameters that scans of layers may be given, by name: to be differentiated apart from `free`."""
        return {name: leaf for name, leaf in _named(free).items() if name in self.names}

    def follow(
        self, free: Any, scanned: Mapping[str, jax.Array], owed: Mapping[str, jax.Array], added: Any = None
    ) -> Any:
        """The parameters as a loss is to be given them: their arrays are followed to scans of layers.

        Args:
            scanned: What scans read in their place.
            owed: As the loss is given it.
            added: Like `free`, the sums of the gradients of micro-batches before.
        """
        leaves, structure = jax.tree_util.tree_flatten_with_path(free)
        names = [parameter_name(path) for path, _ in leaves]
        watched = [
            _watched((self._used_elsewhere, name), leaf) if name in self.names else leaf
            for name, (_, leaf) in zip(names, leaves)
        ]
        self._known = {id(leaf): name for name, leaf in zip(names, watched) if name in self.names}
        before = () if added is None else zip(names, jax.tree.leaves(added))
        self._added = {name: leaf for name, leaf in before if name in self.names}
        self._owed, self._scanned = owed, scanned
        self._held = structure.unflatten(watched)
        return self._held

    def total(
        self, name: str, gradient: jax.Array, sums: Mapping[str, jax.Array], before: jax.Array | None
    ) -> jax.Array:
        """A parameter's gradient of all micro-batches so far: if a scan was given it the sum over devices, else a share.

        Args:
            gradient: Of its uses outside of scans, a device's share.
            sums: By name, those of scans.
            before: Of the micro-batches before.
        """
        if name not in self.met:
            return gradient if before is None else gradient + before
        return sums[name] + self.reduce_whole(name, gradient) if name in self._used_elsewhere else sums[name]

    def attached(self, function: Callable[..., Any], layers: Any) -> tuple[Callable[..., Any], Any]:
        """A scan's function and what it scans, with the sums of what is followed."""
        leaves, structure = jax.tree.flatten(layers)
        found = {place: self._known[id(leaf)] for place, leaf in enumerate(leaves) if id(leaf) in self._known}
        if not found:
            return function, layers
        # Given a second time, a parameter has two gradients, each summed over devices; the rest is added once.
        more = {
            place: (
                None if name in self.met else self._added.get(name),
                None if name in self.met else self._owed.get(name),
            )
            for place, name in found.items()
        }
        self.met |= set(found.values())

        def with_sums(x: Any, scanned: tuple[Any, Mapping[int, Any]]) -> Any:
            own, more = scanned
            leaves = jax.tree.leaves(own)
            for place, name in found.items():
                added, owed = more[place]
                leaves[place] = _summed_back((self.reduce, name), leaves[place], added, owed)
            return function(x, structure.unflatten(leaves))

        for place, name in found.items():
            leaves[place] = self._scanned[name]
        return with_sums, (structure.unflatten(leaves), more)


def _named(free: Any) -> dict[str, jax.Array]:
    return {parameter_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(free)[0]}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _watched(where: tuple[set[str], str], w: jax.Array) -> jax.Array:
    """`w`; while its gradient is traced, the name is put into the set if it has one."""
    return w


def _watched_forward(where: tuple[set[str], str], w: Any) -> tuple[jax.Array, None]:
    return w.value, None


def _watched_backward(where: tuple[set[str], str], _: None, gradient: Any) -> tuple[Any]:
    if not isinstance(gradient, SymbolicZero):
        where[0].add(where[1])
        return (gradient,)
    nothing: Any = gradient
    return (jnp.zeros(nothing.shape, nothing.dtype),)


_watched.defvjp(_watched_forward, _watched_backward, symbolic_zeros=True)


_current: ContextVar[GradReduceOverlap | None] = ContextVar("panax_sums_in_backward", default=None)


def current_grad_reduce() -> GradReduceOverlap | None:
    """What is set for the loss that is being traced."""
    return _current.get()


@contextlib.contextmanager
def overlap_grad_reduce(sums: GradReduceOverlap | None) -> Iterator[GradReduceOverlap | None]:
    """Trace losses inside with these sums; None for none."""
    token = _current.set(sums)
    try:
        yield sums
    finally:
        _current.reset(token)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed_back(how: tuple[Reduce, str], w: jax.Array, added: Any, owed: Any) -> jax.Array:
    return w


def _forward(how: tuple[Reduce, str], w: jax.Array, added: Any, owed: Any) -> tuple[jax.Array, Any]:
    return w, (added, owed)


def _backward(how: tuple[Reduce, str], kept: Any, gradient: jax.Array) -> tuple[jax.Array, Any, Any]:
    (reduce, name), (added, owed) = how, kept
    total, left = reduce(name, gradient if added is None else gradient + added, owed)
    return total, None if added is None else jnp.zeros_like(added), left


_summed_back.defvjp(_forward, _backward)
