"""What Panax takes of JAX that is private to it: the one file that may, and the versions that it was read in are named.

Read in jax 0.10.2 and 0.12.0.
"""

from jax._src import xla_bridge  # noqa: TID251


def backend_runs() -> bool:
    """Whether JAX has found its devices: from then on processes can't be joined any more."""
    return xla_bridge.backends_are_initialized()
