"""Whether a model adapted to JAX computes what its own library does: losses, gradients and state, with one tolerance."""

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from ..core.errors import RecipeError
from ..system.host_memory import free_bytes

TOLERANCE = 1e-4
"""Of a loss or a gradient, relative to its norm: two orders above what float32 sums in another order differ by (1e-6 is usual),
and far below what a wrong formula does."""

FLOOR = 1e-5
"""Of all gradients' norm: what one may be off by where it is zero up to rounding, as that of a bias before a BatchNorm."""

MAX_COPIES = 8
"""Copies of the weights that a comparison takes at most: values and gradients on both sides, and what is between."""


def check_agreement(
    name: str,
    library: str,
    ours: tuple[Any, Mapping[str, Any]],
    theirs: tuple[Any, Mapping[str, Any]],
    states: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {}),
) -> None:
    """Refuse a model whose loss, gradients or state differ from those that its library computes.

    Args:
        ours: (loss, gradients by parameter name), as JAX computes them.
        theirs: The same, as `library` does.
        states: What the model carries on afterwards, by name: ours and theirs.

    Raises:
        RecipeError: They differ; with the worst ones.
    """
    loss, expected = float(np.asarray(ours[0])), float(np.asarray(theirs[0]))
    if not (loss == expected or abs(loss - expected) <= TOLERANCE * max(abs(expected), FLOOR)):
        raise RecipeError(
            f"{name}: the loss of the example batch is {loss!r} in JAX and {expected!r} in {library}; the model can't be adapted "
            f"faithfully, please report which operations it uses"
        )
    wrong = sorted(_worst(ours[1], theirs[1]), reverse=True)
    if wrong:
        listed = ", ".join(f"{path} by {error:.1e}" for error, path in wrong[:5])
        raise RecipeError(
            f"{name}: {len(wrong)} of {len(theirs[1])} gradients differ from {library}'s on the example batch ({listed}, "
            f"relative to their norm; {TOLERANCE} is allowed); the model can't be adapted faithfully, "
            f"please report which operations it uses"
        )
    for path, expected in states[1].items():
        found = np.asarray(states[0][path], np.float64)
        if not _norm(found - np.asarray(expected, np.float64)) <= TOLERANCE * max(_norm(expected), FLOOR):
            raise RecipeError(
                f"{name}: the state {path!r} after the example batch differs from {library}'s; the model can't be adapted "
                f"faithfully, please report which operations it uses"
            )


def _worst(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[tuple[float, str]]:
    norms = {path: _norm(gradient) for path, gradient in theirs.items()}
    floor = FLOOR * np.sqrt(sum(norm**2 for norm in norms.values()))
    for path, norm in norms.items():
        difference = _norm(np.asarray(ours[path], np.float64) - np.asarray(theirs[path], np.float64))
        if not difference <= max(TOLERANCE * norm, floor):
            yield float(difference / max(norm, floor, 1e-30)), path


def _norm(array: Any) -> float:
    return float(np.linalg.norm(np.asarray(array, np.float64).reshape(-1)))


def explain_too_large(weights_bytes: int) -> str | None:
    """Why weights of this size are not compared on this host; None if they can be."""
    needed, available = MAX_COPIES * weights_bytes, free_bytes()
    if needed <= available:
        return None
    return f"that takes about {needed / 2**30:.0f} GiB, and {available / 2**30:.0f} are free"


@contextlib.contextmanager
def exact_host_precision() -> Iterator[None]:
    """JAX computes on the CPU where it may, and with full float32 products everywhere."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(RuntimeError):  # JAX_PLATFORMS may leave the CPU out
            stack.enter_context(jax.default_device(jax.local_devices(backend="cpu")[0]))
        stack.enter_context(jax.default_matmul_precision("highest"))
        yield


@contextlib.contextmanager
def use_library_promotion() -> Iterator[None]:
    """Another library's graph runs under the promotion rules that it is written for, whatever stricter ones are set.

    Such graphs are full of int64, which JAX computes in int32; it need not say so each time.
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Explicitly requested dtype")
        yield
