"""Host memory for programs that run on the CPU. Imports nothing heavy: it must act before jax starts its threads."""

import ctypes
import glob

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -4, -8

NEVER = -1
"""Is trimmed to; a number of bytes could not go beyond 2 GiB, and larger programs would be zeroed again at each call."""

ACCELERATORS = ("/dev/nvidia[0-9]*", "/dev/accel*", "/dev/kfd")


def keep_freed_memory() -> bool:
    """Have the C allocator keep what is freed, for the rest of this process, on a machine without an accelerator.

    XLA on CPU allocates a program's temporaries anew in each call. glibc gives large blocks back to the kernel when they are
    freed, and each call then pays for the kernel's zeroing every page of them again: a sixth of a bfloat16 training step. Has
    no effect once jax has started its threads.

    Returns:
        Whether the allocator took it; other C libraries than glibc don't.
    """
    if any(glob.glob(pattern) for pattern in ACCELERATORS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, NEVER), (M_TOP_PAD, 2**30), (M_ARENA_MAX, 1))
    return all(mallopt(option, value) for option, value in settings)
