"""Host memory for programs that run on the CPU."""

import ctypes
import functools

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8


@functools.cache
def keep_freed_memory() -> bool:
    """Have the C allocator keep what is freed, for the rest of this process.

    XLA on CPU allocates a program's temporaries anew in each call. glibc gives large blocks back to the kernel when they are
    freed, and each call then pays for the kernel's zeroing every page of them again: a third of a bfloat16 training step.

    Returns:
        Whether the allocator took it; other C libraries than glibc don't.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(
        mallopt(option, value) for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_ARENA_MAX, 1))
    )
