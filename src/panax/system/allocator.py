"""Configuration of the C allocator for programs on the CPU. Imports nothing heavy: it must act before jax
starts its threads.

XLA on CPU allocates a program's temporaries in each call, a gigabyte at a time. glibc returns such blocks to
the kernel when they are freed, and each call pays for the kernel zeroing all of their pages again: a sixth of
a training step. If they stay on the heap they are not zeroed, but the heap grows to several times their size,
since other allocations fragment it: ViT-B/16 then took 1.7 times the memory. In pages of 2 MiB the zeroing
takes 2 to 3 % of such a step, and no memory is retained. Large temporaries are therefore mapped in such pages
if the system provides them on request (`madvise`), and glibc can request them (from 2.35 on). Small ones stay
on the heap: zeroing 200 MiB took 9 % of a small model's step.
"""

import contextlib
import ctypes
import glob
import os
import sys
from collections.abc import Mapping
from pathlib import Path

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -3, -4, -8

NEVER = -1
"""Trim threshold that disables trimming; a number of bytes could not exceed 2 GiB, and larger programs would
be zeroed again at each call."""

LARGE_BYTES = 256 << 20
"""Size of a program's temporaries from which on they are mapped."""

MAPPED_BYTES, MAPPED_BLOCKS = 32 << 20, 1 << 16
"""Size from which on blocks are then mapped, the maximum that glibc accepts, and their maximum number."""

ACCELERATORS = ("/dev/nvidia[0-9]*", "/dev/accel*", "/dev/kfd")

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

TUNABLES = "GLIBC_TUNABLES"
HUGE_PAGES_TUNABLE = "glibc.malloc.hugetlb=1"


def keep_freed_memory() -> bool:
    """Make the C allocator retain freed memory for the rest of this process, on a machine without an
    accelerator.

    Has no effect once jax has started its threads.

    Returns:
        True if the allocator accepted it; C libraries other than glibc don't.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(glob.glob(pattern) for pattern in ACCELERATORS):
        return False
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, NEVER), (M_TOP_PAD, 2**30), (M_ARENA_MAX, 1))
    global _keeps
    _keeps = all(mallopt(option, value) for option, value in settings)
    return _keeps


_keeps = False


def prepare_allocator(temporaries: int) -> bool:
    """Return the memory freed by the compilation of a program to the system; then map large blocks if its
    temporaries are large and huge pages are available.

    Args:
        temporaries: Bytes that each call of the program takes in addition to its operands and results.

    Returns:
        True if large blocks are mapped from now on.
    """
    release_freed_memory()
    in_huge_pages = huge_page_mode() == "always" or HUGE_PAGES_TUNABLE in os.environ.get(TUNABLES, "")
    if not _keeps or not in_huge_pages or temporaries < LARGE_BYTES:
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(M_MMAP_MAX, MAPPED_BLOCKS), mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)])


def huge_page_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables with which a process must be started so that glibc requests huge
    pages; empty if that is unnecessary or has no effect."""
    if sys.platform != "linux" or huge_page_mode() != "madvise" or any(glob.glob(pattern) for pattern in ACCELERATORS):
        return {}
    if not _can_request_huge_pages() or "glibc.malloc.hugetlb" in environment.get(TUNABLES, ""):
        return {}
    return {TUNABLES: ":".join(filter(None, (environment.get(TUNABLES, ""), HUGE_PAGES_TUNABLE)))}


def restart_with_huge_pages() -> None:
    """Start this program again, as the same process, so that glibc requests huge pages; only if that is
    necessary and has an effect.

    For programs, as their first action.
    """
    environment = huge_page_environment()
    if not environment or not sys.executable or sys.gettrace() is not None:
        return
    with contextlib.suppress(OSError):
        # If the system refuses, the program continues as it is.
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **environment})


def release_freed_memory() -> None:
    """Return freed memory to the system, if the allocator can: after a compilation it is hundreds of
    megabytes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def huge_page_mode() -> str:
    """Return which programs get transparent huge pages: "always", "madvise" or "never"; "never" if the system
    does not report it."""
    try:
        text = HUGE_PAGES.read_text()
    except OSError:
        return "never"
    return text.partition("[")[2].partition("]")[0] or "never"


def _can_request_huge_pages() -> bool:
    """Return True if this glibc can request huge pages."""
    try:
        name, _, number = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        return name == "glibc" and tuple(map(int, number.split("."))) >= (2, 35)
    except (ValueError, OSError):
        return False
