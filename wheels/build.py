"""Builds the wheels `panax-jax-kernels`: the C files, compiled for machines that have no compiler.

    python3 install.py --extra wheel
    python wheels/build.py dist
    python3 install.py --kernels dist/panax_jax_kernels-0.1.1-py3-none-manylinux_2_17_x86_64.whl    # on the other machine

Each holds one library for every instruction set of its architecture; `library.py` loads the best that a processor has. `zig cc`
compiles for all of them on any machine, against the symbols of an old glibc. What it wrote is looked at: what it needs, which
glibc, and whether all functions are there.
"""

import argparse
import importlib.metadata
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax

from panax.core.errors import PanaxError
from panax.kernels.cpu.instruction_sets import INSTRUCTION_SETS
from panax.kernels.cpu.library import MANIFEST, OPTIONS, PACKAGE, SOURCES, build_manifest
from panax.kernels.cpu.native import TARGETS

VERSION = importlib.metadata.version("panax-jax")

GLIBC = (2, 17)
"""The oldest that the wheels run on: that of manylinux2014."""

NEEDED = {"libc.so.6", "libm.so.6", "libpthread.so.0", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
"""Of every Linux with glibc."""

_COMPILE_SECONDS = 600


class Platform(NamedTuple):
    """What a wheel is for.

    Attributes:
        tag: As pip names it.
        zig: As zig names it.
        machine: The architecture of its instruction sets.
    """

    tag: str
    zig: str
    machine: str


PLATFORMS = (
    Platform("manylinux_2_17_x86_64", "x86_64-linux-gnu.2.17", "x86_64"),
    Platform("manylinux_2_17_aarch64", "aarch64-linux-gnu.2.17", "aarch64"),
    Platform("macosx_11_0_arm64", "aarch64-macos.11.0", "aarch64"),
)


def build(folder: Path, platform: Platform) -> Path:
    """Compile, check and pack the wheel of a platform into a folder.

    Raises:
        PanaxError: zig failed, or wrote what does not run on every machine of the platform.
    """
    from wheel.wheelfile import WheelFile  # of the extra `wheel`

    folder.mkdir(parents=True, exist_ok=True)
    name = f"{PACKAGE}-{VERSION}"
    file = folder / f"{name}-py3-none-{platform.tag}.whl"
    with tempfile.TemporaryDirectory() as scratch, WheelFile(file, "w") as wheel:
        for each in INSTRUCTION_SETS.values():
            if each.machine != platform.machine:
                continue
            library = Path(scratch) / f"kernels-{each.name}.so"
            _compile(library, platform, each.zig)
            if problems := list(find_faults(library, platform)):
                raise PanaxError(f"{library.name} for {platform.tag}: {'; '.join(problems)}")
            wheel.write(library, f"{PACKAGE}/{library.name}")
        wheel.writestr(f"{PACKAGE}/{MANIFEST}", build_manifest(Path(scratch).iterdir()))
        wheel.writestr(
            f"{PACKAGE}/__init__.py",
            '"""The C files of panax-jax, compiled; panax.kernels.cpu.library loads them."""\n',
        )
        wheel.writestr(f"{name}.dist-info/METADATA", _metadata())
        wheel.writestr(
            f"{name}.dist-info/WHEEL",
            f"Wheel-Version: 1.0\nGenerator: panax-jax\nRoot-Is-Purelib: false\nTag: py3-none-{platform.tag}\n",
        )
    return file


def find_faults(library: Path, platform: Platform) -> Iterator[str]:
    """What keeps a library from running on machines of its platform."""
    missing = [name for name in TARGETS if f"{name}\0".encode() not in library.read_bytes()]
    if missing:
        yield f"it lacks {', '.join(missing)}"
    if "linux" not in platform.zig:
        return
    from elftools.elf.elffile import ELFFile  # of the extra `wheel`

    with library.open("rb") as file:
        elf = ELFFile(file)
        for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED"):
            if tag.needed not in NEEDED:
                yield f"it needs {tag.needed}"
        versions = elf.get_section_by_name(".gnu.version_r")
        for _, names in () if versions is None else versions.iter_versions():
            for version in names:
                kind, _, number = version.name.partition("_")
                if kind != "GLIBC" or tuple(map(int, number.split("."))) > GLIBC:
                    yield f"it needs {version.name}, and the oldest glibc to run on is {'.'.join(map(str, GLIBC))}"


def _compile(library: Path, platform: Platform, processor: str) -> None:
    sources = map(str, sorted(SOURCES.glob("*.c")))
    command = [
        *(sys.executable, "-m", "ziglang", "cc", "-target", platform.zig, f"-mcpu={processor}", *OPTIONS),
        *("-s", f"-I{jax.ffi.include_dir()}", *sources, "-o", str(library)),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise PanaxError(f"zig took more than {_COMPILE_SECONDS} s for {library.name}") from error
    if done.returncode:
        raise PanaxError(f"zig failed for {library.name}; it is of the extra `wheel`: {done.stderr.strip()}")


def _metadata() -> str:
    return (
        f"Metadata-Version: 2.1\nName: {PACKAGE.replace('_', '-')}\nVersion: {VERSION}\n"
        f"Summary: The kernels of panax-jax for CPUs, compiled\nLicense: Apache-2.0\nRequires-Python: >=3.11\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the wheels are written")
    parser.add_argument("--platform", choices=[each.tag for each in PLATFORMS], help="only this one (default: all)")
    options = parser.parse_args()
    for platform in PLATFORMS:
        if options.platform in (None, platform.tag):
            print(build(options.folder, platform))


if __name__ == "__main__":
    main()
