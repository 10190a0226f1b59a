"""Values of tensors on the host, in the dtypes that they have in JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import torch

from ....core.errors import RecipeError
from ..lowering import DTYPES


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Copy a tensor's values to NumPy, with 64-bit dtypes in 32 bits, as JAX computes.

    Raises:
        RecipeError: An integer does not fit in 32 bits.
    """
    tensor = tensor.detach().cpu()
    tensor = tensor.resolve_conj().resolve_neg() if tensor.is_complex() else tensor
    refuse_large(tensor, "a constant of the model")
    narrow = tensor.float().numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
    return narrow.astype(DTYPES[tensor.dtype])


def refuse_large(tensor: torch.Tensor, name: str) -> None:
    """Raise if an integer does not fit into its 32-bit dtype in JAX.

    Raises:
        RecipeError: An integer is too large.
    """
    if tensor.dtype != torch.int64 or not tensor.numel():
        return
    limits = np.iinfo(np.int32)
    low, high = int(tensor.min()), int(tensor.max())
    if low < limits.min or high > limits.max:
        raise RecipeError(
            f"{name} holds {low if low < limits.min else high}, and integers have 32 bits here, up to {limits.max}; keep it "
            f"smaller, for example by a remainder"
        )


def as_jax(tensor: torch.Tensor) -> jax.Array:
    """Convert a constant of the graph to a JAX array."""
    return jnp.asarray(as_numpy(tensor))
