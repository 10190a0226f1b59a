"""What the processes of one job agree on, in a few words each: small collectives that all of them enter at the same place.

One process agrees with itself, and touches no device.
"""

import jax
import numpy as np

MIN_BYTES = 1024
"""Of a text that travels."""


def gather_ints(*values: int) -> np.ndarray:
    """Each process's numbers, (process, number): every process calls it at the same place, with as many."""
    mine = np.array(values, np.int32)
    if jax.process_count() == 1:
        return mine[None]
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(mine)).reshape(jax.process_count(), len(values))


def gather_texts(text: str) -> list[str]:
    """Each process's text: every process calls it at the same place."""
    if jax.process_count() == 1:
        return [text]
    data = text.encode()
    longest = int(gather_ints(len(data)).max())
    # Few different lengths, each of which is compiled once: nearly all texts have the least.
    room = np.zeros(max(MIN_BYTES, 1 << max(longest - 1, 0).bit_length()), np.uint8)
    room[: len(data)] = np.frombuffer(data, np.uint8)
    found = gather_ints(*room.view(np.int32).tolist())
    return [row.tobytes().rstrip(b"\0").decode() for row in found]


def broadcast_text(text: str) -> str:
    """The text of process 0, in every process."""
    return gather_texts(text if is_process_zero() else "")[0]


def any_process(flag: bool) -> bool:
    """Whether the flag is set in any process."""
    return bool(gather_ints(int(flag)).any())


def is_process_zero() -> bool:
    """Whether this is the process that writes what is written once: logs, manifests."""
    return jax.process_index() == 0
