"""`Precision`: the dtypes in which a comparison's parameters and matmuls are computed."""

import enum
from typing import Literal

Dtype = Literal["float32", "bfloat16"]


class Precision(enum.StrEnum):
    """Precision of a comparison; see `settings.PRECISIONS`."""

    F32 = "f32"
    TF32 = "tf32"
    BF16 = "bf16"
    MIXED = "bf16-mixed"

    @property
    def stored(self) -> Dtype:
        """Dtype of parameters and of the activations between operations."""
        return "bfloat16" if self is Precision.BF16 else "float32"

    @property
    def computed(self) -> Dtype:
        """Dtype of the operands of matmuls."""
        return "bfloat16" if self in (Precision.BF16, Precision.MIXED) else "float32"

    @property
    def is_mixed(self) -> bool:
        """True if float32 parameters are cast for each matmul."""
        return self is Precision.MIXED

    @property
    def rounding(self) -> float:
        """The largest relative error of rounding an operand of a matmul."""
        return 2.0 ** {Precision.F32: -24, Precision.TF32: -11}.get(self, -9)
