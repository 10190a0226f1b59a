"""Comparison of an adapted model with its own library: losses, gradients and state, with one tolerance."""

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from ..core.errors import RecipeError
from ..system.host_memory import free_bytes

TOLERANCE = 1e-4
"""Tolerance of a loss or a gradient, relative to its norm: two orders above the float32 error of sums in
another order (1e-6 is usual), and far below the error of a wrong formula."""

FLOOR = 1e-5
"""Tolerance relative to the norm of all gradients, for one that is zero up to rounding, like that of a bias
before a BatchNorm."""

MAX_COPIES = 8
"""Maximum copies of the weights in a comparison: values and gradients on both sides, and intermediates."""


def check_agreement(
    name: str,
    library: str,
    ours: tuple[Any, Mapping[str, Any]],
    theirs: tuple[Any, Mapping[str, Any]],
    states: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {}),
) -> None:
    """Check that a model's loss, gradients and state agree with those that its library computes.

    Args:
        ours: (loss, gradients by parameter name), as JAX computes them.
        theirs: The same, as `library` computes them.
        states: The model's state afterwards, by name: ours and theirs.

    Raises:
        RecipeError: They differ; the message names the largest differences.
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
        actual = np.asarray(states[0][path], np.float64)
        if not _norm(actual - np.asarray(expected, np.float64)) <= TOLERANCE * max(_norm(expected), FLOOR):
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
    """Return the reason why weights of this size are not compared on this host; None if they can be."""
    needed, available = MAX_COPIES * weights_bytes, free_bytes()
    if needed <= available:
        return None
    return f"that takes about {needed / 2**30:.0f} GiB, and {available / 2**30:.0f} are free"


@contextlib.contextmanager
def exact_host_precision() -> Iterator[None]:
    """Compute on the CPU, if JAX may use it, and with full float32 matmuls, inside the context."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(RuntimeError):  # JAX_PLATFORMS may exclude the CPU
            stack.enter_context(jax.default_device(jax.local_devices(backend="cpu")[0]))
        stack.enter_context(jax.default_matmul_precision("highest"))
        yield


@contextlib.contextmanager
def use_library_promotion() -> Iterator[None]:
    """Use the promotion rules that another library's graph is written for, even if stricter ones are set.

    Such graphs often use int64, which JAX computes in int32; its warnings are suppressed.
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Explicitly requested dtype")
        yield
