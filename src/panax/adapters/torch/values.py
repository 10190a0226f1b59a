"""A tensor's values on the host, in the dtype that they have here."""

import jax
import jax.numpy as jnp
import numpy as np
import torch

from ...core.errors import RecipeError
from .lowering import DTYPES


def as_numpy(tensor: torch.Tensor, name: str = "a constant of the model") -> np.ndarray:
    """A tensor's values, copied; 64-bit numbers in 32 bits, as JAX computes.

    Raises:
        RecipeError: An integer does not fit.
    """
    tensor = tensor.detach().cpu()
    tensor = tensor.resolve_conj().resolve_neg() if tensor.is_complex() else tensor
    narrow = tensor.float().numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
    dtype = np.dtype(DTYPES[tensor.dtype])
    if dtype.kind in "iu" and dtype.itemsize < narrow.dtype.itemsize and narrow.size:
        limits = np.iinfo(dtype)
        if narrow.min() < limits.min or narrow.max() > limits.max:
            worst = narrow.min() if narrow.min() < limits.min else narrow.max()
            raise RecipeError(
                f"{name} holds {worst}, and integers have 32 bits here, up to {limits.max}; keep it smaller, for example by a "
                f"remainder taken before the model sees it"
            )
    return narrow.astype(dtype)


def as_jax(tensor: torch.Tensor) -> jax.Array:
    """A constant of the graph."""
    return jnp.asarray(as_numpy(tensor))
