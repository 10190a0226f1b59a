"""Instruction sets that the C files are compiled for: by a processor's features, never by its maker."""

import dataclasses
import os
import platform
from collections.abc import Collection

from panax.core.errors import RecipeError, suggest_name
from panax.system.cpu_info import cpu_flags

ISA_VARIABLE = "PANAX_CPU_ISA"
"""Environment variable that selects an instruction set for the C files, instead of the processor's best."""


@dataclasses.dataclass(frozen=True)
class InstructionSet:
    """One of the variants of the C files.

    They are compiled for the instruction set, and not tuned for the processor (`-march=native`): when tuned for
    AMD processors, gcc 12 replaces each fused multiply-add by two instructions, and matmuls took 1.4 times as
    long.

    Attributes:
        machine: The architecture, as returned by `platform.machine()`.
        flags: Flags that `/proc/cpuinfo` must list.
        options: Compiler options for gcc and clang.
        zig: The name of the same processor for `zig cc -mcpu=`.
        bfloat16: True if it has instructions for bfloat16 multiplication.
    """

    name: str
    machine: str
    flags: frozenset[str]
    options: tuple[str, ...]
    zig: str
    bfloat16: bool = False


_V3 = frozenset({"avx2", "fma", "bmi2", "f16c"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}

INSTRUCTION_SETS = {
    each.name: each
    for each in (
        InstructionSet("avx2", "x86_64", _V3, ("-march=x86-64-v3",), "x86_64_v3"),
        InstructionSet("avx512", "x86_64", _V4, ("-march=x86-64-v4",), "x86_64_v4"),
        InstructionSet(
            "avx512_bf16",
            "x86_64",
            _V4 | {"avx512_bf16"},
            ("-march=x86-64-v4", "-mavx512bf16"),
            "x86_64_v4+avx512bf16",
            bfloat16=True,
        ),
        InstructionSet("neon", "aarch64", frozenset({"asimd"}), ("-march=armv8-a",), "generic"),
        InstructionSet(
            "neon_bf16",
            "aarch64",
            frozenset({"asimd", "bf16"}),
            ("-march=armv8.2-a+bf16",),
            "generic+v8_2a+bf16",
            bfloat16=True,
        ),
    )
}
"""In ascending order for each architecture."""


def detect(flags: Collection[str] | None = None, machine: str | None = None) -> tuple[InstructionSet, ...]:
    """Detect the instruction sets of a processor, the best one last; () if the system does not list its
    flags.

    Args:
        flags: As /proc/cpuinfo lists them; by default this machine's.
        machine: Its architecture; by default this machine's.

    >>> [each.name for each in detect({"avx2", "fma", "bmi2", "f16c"}, "x86_64")]
    ['avx2']
    """
    flags = cpu_flags() if flags is None else flags
    machine = (platform.machine() if machine is None else machine).lower().replace("arm64", "aarch64")
    return tuple(
        each for each in INSTRUCTION_SETS.values() if each.machine == machine and each.flags <= frozenset(flags)
    )


def read_limit() -> InstructionSet | None:
    """Return the instruction set selected by the environment; None if none is.

    Raises:
        RecipeError: The name is unknown, or this processor lacks the set.
    """
    name = os.environ.get(ISA_VARIABLE, "")
    if not name:
        return None
    if name not in INSTRUCTION_SETS:
        raise RecipeError(f"{ISA_VARIABLE}={name!r}: {suggest_name(name, INSTRUCTION_SETS)}")
    here = detect()
    if INSTRUCTION_SETS[name] not in here:
        raise RecipeError(
            f"{ISA_VARIABLE}={name}: this processor lacks it; it has {', '.join(each.name for each in here) or 'none of them'}"
        )
    return INSTRUCTION_SETS[name]
