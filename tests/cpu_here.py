"""Which kernels for products on CPU this machine has, fastest first by its kind: known before jax is imported."""

import platform
import sys
from pathlib import Path

# Intel's library is made for these machines alone, and there the tests' requirements bring it.
HAS_MKL = sys.platform == "linux" and platform.machine() == "x86_64"
HAS_AVX512 = HAS_MKL and all(flag in Path("/proc/cpuinfo").read_text() for flag in ("avx512f", "avx512_bf16"))
KERNELS = ["c"] * HAS_AVX512 + ["mkl"] * HAS_MKL + ["xla"]
