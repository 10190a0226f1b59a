"""The environment in which golden runs are taken."""

import os
from pathlib import Path

XLA_FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)
PASSED_ON = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
"""Variables of this environment that the runs also have; others could change them."""


def environment(tree: Path, home: Path, programs: Path) -> dict[str, str]:
    """Variables for the runs of a checkout: kernels, devices and hashing pinned, its own home and caches.

    Args:
        programs: JAX's cache of compiled programs. Commits may share it: equal programs are one entry.
    """
    for folder in (home, home / "tmp", programs):
        folder.mkdir(parents=True, exist_ok=True)
    paths = (tree / "src", tree / "recipes", tree / "tests", tree / "tests/golden")
    return {
        **{name: os.environ[name] for name in PASSED_ON if name in os.environ},
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": str(home),
        "TMPDIR": str(home / "tmp"),
        "PANAX_CACHE": str(home / "cache"),
        "PANAX_CPU_KERNELS": "xla",
        "PANAX_MEMORY": str(home / "memory"),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(programs),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_FLAGS": " ".join(XLA_FLAGS),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
