"""Outer step of islands: encoding of updates, and identical arithmetic on the same bytes in each island.

It uses NumPy, one operation at a time: no compiler can fuse two operations and round only once, so islands on
different hardware compute bitwise equal results.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from .admission import Arrays
from .settings import Comms
from .wires import Wire

BLOCK_SIZE = 256
"""Number of elements that share a scale."""

MIN_QUANTIZED_SIZE = 4096
"""Arrays with fewer elements are sent in float32."""


class GroupUpdate(NamedTuple):
    """Result of a round, equal in all islands.

    Attributes:
        params: Trainable parameters by name, in their storage dtype.
        momentum: Momentum of the outer optimizer; float32.
    """

    params: Mapping[str, npt.NDArray[Any]]
    momentum: Mapping[str, npt.NDArray[np.float32]]

    @classmethod
    def initial(cls, params: Mapping[str, npt.NDArray[Any]]) -> "GroupUpdate":
        """Return the state before the first round."""
        return cls(params, {name: np.zeros(x.shape, np.float32) for name, x in params.items()})

    def apply_outer_step(self, gradient: Mapping[str, npt.NDArray[np.float32]], comms: Comms) -> "GroupUpdate":
        """Return the state after an outer step, SGD with Nesterov momentum.

        Args:
            gradient: Mean of the islands' updates, as distance from `params`; float32.
        """
        params: dict[str, npt.NDArray[Any]] = {}
        speeds: dict[str, npt.NDArray[np.float32]] = {}
        rate, momentum = np.float32(comms.outer_rate), np.float32(comms.outer_momentum)
        for name, old in self.params.items():
            speeds[name] = np.add(momentum * self.momentum[name], gradient[name], dtype=np.float32)
            change = rate * (gradient[name] + momentum * speeds[name])
            params[name] = (old.astype(np.float32) - change).astype(old.dtype)
        return GroupUpdate(params, speeds)

    def to_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return named arrays to write to a file."""
        params = {f"params/{name}": _plain(x) for name, x in self.params.items()}
        return params | {f"momentum/{name}": x for name, x in self.momentum.items()}

    @classmethod
    def of(cls, arrays: Arrays, like: Mapping[str, npt.NDArray[Any]]) -> "GroupUpdate":
        """Restore the state from a file's arrays.

        Args:
            like: Names, dtypes and shapes of the parameters.

        Raises:
            KeyError, ValueError: The arrays are not the state of a round with these parameters.
        """
        params = {name: _typed(arrays[f"params/{name}"], x.dtype).reshape(x.shape) for name, x in like.items()}
        return cls(
            params,
            {name: np.asarray(arrays[f"momentum/{name}"], np.float32).reshape(x.shape) for name, x in like.items()},
        )


def encode_update(
    moved: Mapping[str, npt.NDArray[np.float32]], wire: Wire | None, chance: int | None
) -> dict[str, npt.NDArray[Any]]:
    """Encode an island's update for sending.

    Args:
        wire: Wire format; None for float32.
        chance: Seed of stochastic rounding; None to round to nearest.
    """
    encoded: dict[str, npt.NDArray[Any]] = {}
    for number, (name, x) in enumerate(sorted(moved.items())):
        if wire is None or x.size < MIN_QUANTIZED_SIZE:
            encoded[name] = x
            continue
        rows = np.pad(x.reshape(-1), (0, -x.size % BLOCK_SIZE)).reshape(-1, BLOCK_SIZE)
        bits = None
        if chance is not None:
            bits = jax.random.bits(jax.random.fold_in(jax.random.key(chance), number), rows.shape, jnp.uint32)
        for place, part in enumerate(jax.tree.leaves(wire.encode(jnp.asarray(rows), bits))):
            encoded[f"{name}/{place}"] = _plain(np.asarray(part))
    return encoded


def decode_update(
    sent: Arrays, wire: Wire | None, like: Mapping[str, npt.NDArray[Any]]
) -> dict[str, npt.NDArray[np.float32]]:
    """Decode a received update.

    Raises:
        KeyError, ValueError: The update is not of these parameters.
    """
    decoded = {}
    for name, x in like.items():
        if wire is None or x.size < MIN_QUANTIZED_SIZE:
            decoded[name] = _typed(sent[name], np.dtype(np.float32)).reshape(x.shape)
            continue
        rows = jax.ShapeDtypeStruct((-(-x.size // BLOCK_SIZE), BLOCK_SIZE), jnp.float32)
        shapes, structure = jax.tree.flatten(jax.eval_shape(wire.encode, rows))
        parts = [
            jnp.asarray(_typed(sent[f"{name}/{place}"], np.dtype(shape.dtype)).reshape(shape.shape))
            for place, shape in enumerate(shapes)
        ]
        numbers = np.asarray(wire.decode(structure.unflatten(parts)), np.float32)
        decoded[name] = numbers.reshape(-1)[: x.size].reshape(x.shape)
    return decoded


def _plain(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an array with a dtype unknown to NumPy, such as bfloat16, as its bits."""
    return x if x.dtype.kind in "fiub" and x.dtype.isbuiltin == 1 else x.view(f"uint{8 * x.dtype.itemsize}")


def _typed(x: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if x.dtype == dtype:
        return x
    if x.dtype != _plain(np.zeros(0, dtype)).dtype:
        raise ValueError(f"{x.dtype} stands where {dtype} was expected")
    return x.view(dtype)
