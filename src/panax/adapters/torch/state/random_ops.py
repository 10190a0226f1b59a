"""PyTorch's random operations with the bits of the JAX program, so that both have the same dropout masks."""

from typing import Any

import jax
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..lowering import DTYPES, LOWERINGS, OutputSpec
from ..lowering.randomness import FUNCTIONAL, is_random
from ..tracing.values import as_numpy


class ReplayDrawsMode(TorchDispatchMode):
    """Context in which the n-th random operation returns the traced program's n-th draw with this key."""

    def __init__(self, key: jax.Array):
        super().__init__()
        self._key, self._count = key, 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_random(operation):
            return operation(*args, **kwargs)
        key, self._count = jax.random.fold_in(self._key, self._count), self._count + 1
        functional = FUNCTIONAL.get(operation, operation)
        like = operation(*args, **kwargs)  # for its shapes alone
        parts = like if isinstance(like, tuple) else (like,)
        outs = tuple(OutputSpec(tuple(part.shape), DTYPES[part.dtype], lambda: key) for part in parts)
        arguments = [as_numpy(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
        arguments = [jax.numpy.asarray(arg) if isinstance(arg, np.ndarray) else arg for arg in arguments]
        draws = LOWERINGS[functional](outs if isinstance(like, tuple) else outs[0], *arguments, **kwargs)
        values = [
            torch.from_numpy(np.array(value)).to(part.dtype)
            for value, part in zip(draws if isinstance(like, tuple) else (draws,), parts)
        ]
        if operation in FUNCTIONAL:
            return args[0].copy_(values[0])
        return tuple(values) if isinstance(like, tuple) else values[0]
