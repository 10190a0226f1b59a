"""Choice of kernels on CPU: XLA, the C files' kernels, or Intel's library. A job has one choice for each kind
of work and dtype.

The fastest one depends on the processor and on versions: `timing.py` times them once per machine. Without a
choice XLA is used for everything.
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Literal

from panax.core.errors import RecipeError, suggest_name
from panax.kernels.cpu.native import KERNELS, unavailable_reason

from ...system import json_reader

Work = Literal["product", "attention", "row_sums"]
WORKS: tuple[Work, ...] = ("product", "attention", "row_sums")
DTYPES = ("float32", "bfloat16")
XLA = "xla"
NAMES = (XLA, *KERNELS)

KERNELS_VARIABLE = "PANAX_CPU_KERNELS"
"""Environment variable that selects one kernel for all work, without timing: xla, c or mkl."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CpuKernels:
    """Kernel of each kind of work: "xla", "c" (the C files) or "mkl" (Intel's library).

    Attributes:
        row_sums_float32: Gradients of biases.
    """

    product_float32: str = XLA
    product_bfloat16: str = XLA
    attention_float32: str = XLA
    attention_bfloat16: str = XLA
    row_sums_float32: str = XLA
    row_sums_bfloat16: str = XLA

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value not in NAMES:
                raise ValueError(f"{field.name}={value!r}: {suggest_name(str(value), NAMES)}")

    def of(self, work: Work, dtype: str) -> str:
        """Return the kernel of a kind of work in a dtype; XLA if there is no other."""
        return getattr(self, f"{work}_{dtype}") if dtype in DTYPES else XLA

    def list_unavailable(self) -> list[str]:
        """Return a line for each chosen kernel that this machine lacks."""
        return [
            f"{work} in {dtype} by {name}: {why}"
            for work in WORKS
            for dtype in DTYPES
            if (name := self.of(work, dtype)) != XLA and (why := unavailable_reason(name, dtype)) is not None
        ]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "CpuKernels":
        """Read what `to_json` wrote.

        Raises:
            ValueError: The text has other content.
        """
        try:
            return cls(**json_reader.parse(text, constants=True))
        except TypeError as error:
            raise ValueError(f"not a choice of kernels: {error}") from error


_current: CpuKernels | None = None
_tried: ContextVar[CpuKernels | None] = ContextVar("panax_cpu_kernels", default=None)


def current_choice() -> CpuKernels:
    """Return the current choice; XLA for every kind of work if none was made."""
    return _tried.get() or _current or CpuKernels()


@contextlib.contextmanager
def use_temporarily(kernels: CpuKernels) -> Iterator[None]:
    """Trace code inside this context with these kernels, whatever was chosen."""
    token = _tried.set(kernels)
    try:
        yield
    finally:
        _tried.reset(token)


def is_chosen() -> bool:
    """Return True if a choice was made in this process."""
    return _current is not None


def use_choice(kernels: CpuKernels) -> None:
    """Use a choice for programs traced from now on. Programs compiled before are not affected."""
    global _current
    _current = kernels


def read_environment_choice() -> CpuKernels | None:
    """Return the choice set by the environment variable; None if it is not set.

    Raises:
        RecipeError: Its value is not a kernel's name, or this machine lacks the kernel.
    """
    name = os.environ.get(KERNELS_VARIABLE, "")
    if not name:
        return None
    if name not in NAMES:
        raise RecipeError(f"{KERNELS_VARIABLE}={name!r}: {suggest_name(name, NAMES)}")
    kernels = CpuKernels(
        **{
            f"{work}_{dtype}": name
            for work in WORKS
            for dtype in DTYPES
            if name == XLA or unavailable_reason(name, dtype) is None
        }
    )
    if name != XLA and all(unavailable_reason(name, dtype) for dtype in DTYPES):
        raise RecipeError(f"{KERNELS_VARIABLE}={name}: {unavailable_reason(name, 'float32')}")
    return kernels


_WORK_OF: dict[str, Work] = {
    "matmul": "product",
    "convolution": "product",
    "grouped matmul": "product",
    "wall": "product",
    "row sums": "row_sums",
    "partial attention": "attention",
    "adapted attention": "attention",
}


def timed_kernel(work: str, dtype: str) -> str:
    """Return the kernel that timing found fastest for a kind of work of the registry; XLA if nothing was
    timed."""
    return current_choice().of(_WORK_OF[work], dtype)
