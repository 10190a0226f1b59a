"""Addresses of weights that a run begins with, or that are loaded: `hf:DIR`, `peft:DIR`, `checkpoint:PLACE`."""

from pathlib import Path

from ...core.errors import CheckpointError

RELEASED_PREFIX = "hf:"
"""Prefix of released models."""

ADAPTER_PREFIX = "peft:"
"""Prefix of adapters in PEFT's layout, which name their base."""

CHECKPOINT_PREFIX = "checkpoint:"
"""Prefix of checkpoints."""

PREFIXES = (RELEASED_PREFIX, ADAPTER_PREFIX, CHECKPOINT_PREFIX)


def is_released(init: str) -> bool:
    """Return True if an address is of a released model, or of an adapter beside one."""
    return init.startswith((RELEASED_PREFIX, ADAPTER_PREFIX))


def base_name(init: str) -> str:
    """Return the folder or hub name of the released model at an address, or of the adapter's base there.

    Raises:
        CheckpointError: The adapter's settings can't be read, or name no base.
    """
    kind, _, where = init.partition(":")
    if f"{kind}:" == RELEASED_PREFIX:
        return where
    from ...adapters.huggingface.low_rank.released_adapter import find_base_address

    return find_base_address(where)


def base_folder(init: str) -> Path | None:
    """Return the folder of the released model at an address, or of the adapter's base there; None if it is not on this
    machine, where the run may have been resumed."""
    if not is_released(init):
        return None
    from ...adapters.huggingface.hub import find_here

    try:
        return find_here(base_name(init))
    except CheckpointError:
        return None
