"""Agreement among the processes of a job on short values: small collectives that all of them call at the same
point.

A single process returns its own values, and uses no device.
"""

import jax
import numpy as np

MIN_BYTES = 1024
"""Minimum size of the buffer of a text."""


def gather_ints(*values: int) -> np.ndarray:
    """Gather the integers of all processes, (process, value): every process calls it at the same point, with
    the same number of values."""
    mine = np.array(values, np.int32)
    if jax.process_count() == 1:
        return mine[None]
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(mine)).reshape(jax.process_count(), len(values))


def gather_texts(text: str) -> list[str]:
    """Gather the texts of all processes: every process calls it at the same point."""
    if jax.process_count() == 1:
        return [text]
    data = text.encode()
    longest = int(gather_ints(len(data)).max())
    # Few different lengths, each of which is compiled once: nearly all texts fit the minimum.
    room = np.zeros(max(MIN_BYTES, 1 << max(longest - 1, 0).bit_length()), np.uint8)
    room[: len(data)] = np.frombuffer(data, np.uint8)
    rows = gather_ints(*room.view(np.int32).tolist())
    return [row.tobytes().rstrip(b"\0").decode() for row in rows]


def broadcast_text(text: str) -> str:
    """Return the text of process 0, in every process."""
    return gather_texts(text if is_process_zero() else "")[0]


def any_process(flag: bool) -> bool:
    """Return True if the flag is set in any process."""
    return bool(gather_ints(int(flag)).any())


def is_process_zero() -> bool:
    """Return True if this is the process that writes the files that exist once per job: logs, manifests."""
    return jax.process_index() == 0
