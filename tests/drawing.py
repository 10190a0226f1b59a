"""Models drawn for tests: what draws random numbers is compiled with little optimization, which takes a third of the time."""

from collections.abc import Callable
from typing import Any

import jax


def drawn(build: Callable[[jax.Array], Any], seed: int = 0) -> Any:
    """What `build` makes of the key of a seed; bitwise what it makes with all optimization, since Panax's drawing is exact."""
    return jax.jit(build, compiler_options={"xla_backend_optimization_level": 1})(jax.random.key(seed))
