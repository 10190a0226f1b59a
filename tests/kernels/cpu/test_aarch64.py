"""The C files' kernels on a processor that is not here: run by an emulator (`tests/engines/install.sh aarch64`)."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from panax.kernels.cpu.instruction_sets import INSTRUCTION_SETS
from panax.kernels.cpu.library import SOURCES

PROGRAM = Path(__file__).parent / "csrc" / "products_and_rows.c"


@pytest.mark.parametrize("name", [each.name for each in INSTRUCTION_SETS.values() if each.machine == "aarch64"])
def test_products_and_rows_under_an_emulator(name, wheel_tools, tmp_path):
    emulator = shutil.which("qemu-aarch64")
    assert emulator is not None, "run `tests/engines/install.sh aarch64`"
    binary = tmp_path / "program"
    folders = (f"-I{SOURCES}", f"-I{jax.ffi.include_dir()}")
    sources = map(str, (PROGRAM, SOURCES / "gemm.c", SOURCES / "shared.c"))
    target = ("-target", "aarch64-linux-musl", "-static", "-O3", f"-mcpu={INSTRUCTION_SETS[name].zig}")
    command = [sys.executable, "-m", "ziglang", "cc", *target, *folders, *sources, "-o", str(binary)]
    environment = {**os.environ, "PYTHONPATH": str(wheel_tools)}
    subprocess.run(command, env=environment, check=True, timeout=300)
    done = subprocess.run([emulator, "-cpu", "max", str(binary)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
