"""The C allocator for programs that run on the CPU. Imports nothing heavy: it must act before jax starts its threads.

XLA on CPU allocates a program's temporaries anew in each call, a gigabyte at a time. glibc gives such blocks back to the kernel
when they are freed, and each call pays for the kernel's zeroing every page of them again: a sixth of a training step. If they
stay on the heap they are not zeroed, but the heap grows to several of them, since what is allocated in between lies in the way:
ViT-B/16 then took 1.7 times the memory. In pages of 2 MiB the zeroing takes 2 to 3 % of such a step, and no memory stays. So
temporaries that are large are mapped in such pages if the system has them for programs that ask (`madvise`), and glibc can
(from 2.35 on). Small ones stay on the heap: zeroing 200 MiB took 9 % of a small model's step.
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
"""Is trimmed to; a number of bytes could not go beyond 2 GiB, and larger programs would be zeroed again at each call."""

LARGE_BYTES = 256 << 20
"""Of a program's temporaries, from which on they are mapped."""

MAPPED_BYTES, MAPPED_BLOCKS = 32 << 20, 1 << 16
"""The size from which on blocks are mapped then, the most that glibc takes, and how many there may be."""

ACCELERATORS = ("/dev/nvidia[0-9]*", "/dev/accel*", "/dev/kfd")

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

TUNABLES = "GLIBC_TUNABLES"
HUGE_PAGES_TUNABLE = "glibc.malloc.hugetlb=1"


def keep_freed_memory() -> bool:
    """Have the C allocator keep what is freed, for the rest of this process, on a machine without an accelerator.

    Has no effect once jax has started its threads.

    Returns:
        Whether the allocator took it; other C libraries than glibc don't.
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
    """Give back what compiling a program has freed; from then on map large blocks, if its temporaries are large and pages can be.

    Args:
        temporaries: Bytes that each call of the program takes besides its operands and results.

    Returns:
        Whether large blocks are mapped from now on.
    """
    release_freed_memory()
    in_huge_pages = huge_page_mode() == "always" or HUGE_PAGES_TUNABLE in os.environ.get(TUNABLES, "")
    if not _keeps or not in_huge_pages or temporaries < LARGE_BYTES:
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(M_MMAP_MAX, MAPPED_BLOCKS), mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)])


def huge_page_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a process must be started with, so that glibc asks for huge pages; nothing where that is not needed, or of no use."""
    if sys.platform != "linux" or huge_page_mode() != "madvise" or any(glob.glob(pattern) for pattern in ACCELERATORS):
        return {}
    if not _can_ask() or "glibc.malloc.hugetlb" in environment.get(TUNABLES, ""):
        return {}
    return {TUNABLES: ":".join(filter(None, (environment.get(TUNABLES, ""), HUGE_PAGES_TUNABLE)))}


def restart_with_huge_pages() -> None:
    """Start this program again, as the same process, so that glibc asks for huge pages; only if that is needed, and helps.

    For programs, as the first thing they do.
    """
    wanted = huge_page_environment()
    if not wanted or not sys.executable or sys.gettrace() is not None:
        return
    with contextlib.suppress(OSError):
        # Where the system refuses, it goes on as it is.
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **wanted})


def release_freed_memory() -> None:
    """Give what is freed back to the system, if the allocator can: after a compilation that is hundreds of megabytes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def huge_page_mode() -> str:
    """Who gets transparent huge pages: "always", "madvise" or "never"; "never" where the system does not say."""
    try:
        text = HUGE_PAGES.read_text()
    except OSError:
        return "never"
    return text.partition("[")[2].partition("]")[0] or "never"


def _can_ask() -> bool:
    """Whether this glibc can."""
    try:
        name, _, number = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        return name == "glibc" and tuple(map(int, number.split("."))) >= (2, 35)
    except (ValueError, OSError):
        return False
