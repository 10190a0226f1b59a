"""Reduction of gradients over devices within the backward pass: each layer's, as soon as it is computed.

A reduction that starts after the backward pass has no work to overlap with. The parameters that a scan over
layers (`scan_layers`) receives are therefore tracked, and each layer's slice passes through an identity. The
backward pass of that identity adds the accumulated gradient of earlier micro-batches to this layer's and
reduces the sum over the mesh axes along which the parameter is replicated. Parameters that no scan over
layers receives are reduced at the end.

    with overlap_grad_reduce(GradReduceOverlap(reduce, reduce_whole, names, residuals)) as sums:
        gradients = ...        # those of parameters in sums.received are already reduced

A parameter is identified by its array: the one passed to the loss is the one that the scan receives.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from ..core.params.axes import path_name


def parameter_name(path: tuple[Any, ...]) -> str:
    """Return the name of the parameter at a path; of a gathered weight only the slot is differentiated
    (`step_gather.py`).
    """
    return path_name(path).removesuffix(".slot")


ReduceFull = Callable[[str, jax.Array], jax.Array]
"""(parameter name, this device's partial gradient of all layers) to the sum over devices."""

Reduce = Callable[[str, jax.Array, jax.Array | None], tuple[jax.Array, jax.Array | None]]
"""(parameter name, gradient of one layer, residual) to (sum over devices, new residual)."""


class GradReduceOverlap:
    """The parameters with gradients that are reduced within the backward pass of the loss being traced, and
    how.

    Attributes:
        residuals: Residuals of error feedback by parameter, with layers as leading axis. They are
            differentiated together with the parameters, and their "gradient" is the new residual.
        received: Names of the parameters that a scan over layers has received.
    """

    def __init__(
        self,
        reduce: Reduce,
        reduce_whole: ReduceFull,
        names: frozenset[str],
        residuals: Mapping[str, jax.Array],
        *,
        of_each: bool = False,
    ):
        """Set the reductions.

        Args:
            reduce: Reduces one layer's gradient.
            reduce_whole: Reduces the gradient that a scanned parameter has from uses outside of scans, such
                as a penalty on weights.
            names: Parameters with layers that may be reduced separately.
            residuals: Residuals of error feedback, by parameter.
            of_each: True to reduce the gradients of each micro-batch; False to reduce the accumulated ones in
                the backward pass of the last micro-batch.
        """
        self.reduce, self.names, self.residuals, self.of_each = reduce, names, dict(residuals), of_each
        self.reduce_whole = reduce_whole
        self.received: set[str] = set()
        self._used_elsewhere: set[str] = set()
        self._scanned: Mapping[str, jax.Array] = {}
        self._known: dict[int, str] = {}
        self._added: Mapping[str, jax.Array] = {}
        self._residuals: Mapping[str, jax.Array] = {}
        self._held: Any = None

    def scan_params(self, free: Any) -> dict[str, jax.Array]:
        """Return the parameters that scans over layers may receive, by name; they are differentiated
        separately from `free`.
        """
        return {name: leaf for name, leaf in _named(free).items() if name in self.names}

    def track_params(
        self, free: Any, scanned: Mapping[str, jax.Array], residuals: Mapping[str, jax.Array], added: Any = None
    ) -> Any:
        """Return the parameters to pass to the loss, with arrays that are tracked into scans over layers.

        Args:
            scanned: The arrays that scans read instead.
            residuals: Residuals, as variables of the loss.
            added: Accumulated gradients of earlier micro-batches, with the structure of `free`.
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
        self._residuals, self._scanned = residuals, scanned
        self._held = structure.unflatten(watched)
        return self._held

    def total(
        self, name: str, gradient: jax.Array, sums: Mapping[str, jax.Array], before: jax.Array | None
    ) -> jax.Array:
        """Return a parameter's gradient over all micro-batches so far: the sum over devices if a scan
        received it, otherwise this device's partial sum.

        Args:
            gradient: Partial gradient from uses outside of scans.
            sums: Reduced gradients from scans, by name.
            before: Accumulated gradient of earlier micro-batches.
        """
        if name not in self.received:
            return gradient if before is None else gradient + before
        return sums[name] + self.reduce_whole(name, gradient) if name in self._used_elsewhere else sums[name]

    def attach_sums(self, function: Callable[..., Any], layers: Any) -> tuple[Callable[..., Any], Any]:
        """Add the reductions of tracked parameters to a scan; return its new function and the layers to scan
        over.
        """
        leaves, structure = jax.tree.flatten(layers)
        tracked_names = {place: self._known[id(leaf)] for place, leaf in enumerate(leaves) if id(leaf) in self._known}
        if not tracked_names:
            return function, layers
        # A parameter scanned a second time has two gradients, each reduced over devices; the accumulated
        # gradient and the residual are added only the first time.
        more = {
            place: (
                None if name in self.received else self._added.get(name),
                None if name in self.received else self._residuals.get(name),
            )
            for place, name in tracked_names.items()
        }
        self.received |= set(tracked_names.values())

        def with_sums(x: Any, scanned: tuple[Any, Mapping[int, Any]]) -> Any:
            scanned_layers, more = scanned
            leaves = jax.tree.leaves(scanned_layers)
            for place, name in tracked_names.items():
                added, residuals = more[place]
                leaves[place] = _summed_back((self.reduce, name), leaves[place], added, residuals)
            return function(x, structure.unflatten(leaves))

        for place, name in tracked_names.items():
            leaves[place] = self._scanned[name]
        return with_sums, (structure.unflatten(leaves), more)


def _named(free: Any) -> dict[str, jax.Array]:
    return {parameter_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(free)[0]}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _watched(where: tuple[set[str], str], w: jax.Array) -> jax.Array:
    """Return `w`; when a nonzero gradient of it is traced, add the name to the set."""
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
    """Return the `GradReduceOverlap` in effect for the loss being traced, if any."""
    return _current.get()


@contextlib.contextmanager
def overlap_grad_reduce(sums: GradReduceOverlap | None) -> Iterator[GradReduceOverlap | None]:
    """Apply these reductions to losses traced inside; None disables them."""
    token = _current.set(sums)
    try:
        yield sums
    finally:
        _current.reset(token)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed_back(how: tuple[Reduce, str], w: jax.Array, added: Any, residuals: Any) -> jax.Array:
    return w


def _forward(how: tuple[Reduce, str], w: jax.Array, added: Any, residuals: Any) -> tuple[jax.Array, Any]:
    return w, (added, residuals)


def _backward(how: tuple[Reduce, str], kept: Any, gradient: jax.Array) -> tuple[jax.Array, Any, Any]:
    (reduce, name), (added, residuals) = how, kept
    total, new_residual = reduce(name, gradient if added is None else gradient + added, residuals)
    return total, None if added is None else jnp.zeros_like(added), new_residual


_summed_back.defvjp(_forward, _backward)
