"""`compute_dtype="auto"`: bfloat16 if the devices have instructions for it, else float32. No timing is
involved."""

import functools

from panax.core.layout.layout import current_target
from panax.core.layout.target import Target
from panax.kernels.cpu.instruction_sets import ISA_VARIABLE
from panax.kernels.cpu.native import OWN, multiplies_bfloat16, unavailable_reason
from panax.system.cpu_info import cpu_flags

AUTO = "auto"

FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
"""Flags of processors with instructions for bfloat16: Intel's and AMD's, Intel's matrix units, Arm's."""


def default_dtype(target: Target) -> str:
    """Return the dtype that "auto" selects on a target. For a CPU it depends on this machine's processor.

    >>> default_dtype(Target("gpu", architecture="h100")), default_dtype(Target("gpu", architecture="v100"))
    ('bfloat16', 'float32')
    """
    return "float32" if reason_for_float32(target) else "bfloat16"


def reason_for_float32(target: Target) -> str | None:
    """Return the reason why bfloat16 is not faster than float32 on a target; None if it is."""
    has_instructions = target.multiplies_bfloat16
    if has_instructions is None:
        return _slow_here()
    return None if has_instructions else f"{target} has no known instructions for bfloat16"


def resolve_dtype(dtype: str) -> str:
    """Return the dtype's name; for "auto", the dtype selected on the current target."""
    return default_dtype(current_target()) if dtype == AUTO else dtype


@functools.cache
def _slow_here() -> str | None:
    """Return why bfloat16 is not faster on this machine's processor, or None: the processor needs
    instructions for it, and Panax a kernel that uses them."""
    if multiplies_bfloat16():
        return None
    if not cpu_flags() & FLAGS:
        return "this processor has no instructions for bfloat16"
    reason = unavailable_reason(OWN, "bfloat16") or f"{ISA_VARIABLE} rules them out"
    return f"this processor has instructions for bfloat16, and Panax no kernel of them here: {reason}"
