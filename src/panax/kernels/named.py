"""The kernels that a recipe names."""

import dataclasses
from collections.abc import Collection, Mapping

from panax.core.errors import RecipeError
from panax.core.validation import Validated
from panax.kernels.registry import check_name, list_kernels


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels(Validated):
    """Which kernel does each kind of work; "auto" takes the fastest that can do the case on the target.

    A kernel that can't do a case, and one whose kind of work the step does not have, are errors when the step is traced. Of
    matmuls and row sums, of which a step has many sizes, the named kernel does those that it can.

    Attributes:
        attention: cudnn, pallas, blockwise, reference, or a registered one.
        grouped: Of the grouped matmuls of experts: triton, megablox, c, mkl, blocked, reference, or a registered one.
        matmul: Of all other products with weights: xla, c, mkl, or a registered one.
        row_sums: Of the gradients of biases: xla, c, mkl, or a registered one.

    >>> Kernels(attention="blokwise")
    Traceback (most recent call last):
    panax.core.errors.RecipeError: there is no kernel 'blokwise' for attention; did you mean 'blockwise'?
    """

    attention: str = "auto"
    grouped: str = "auto"
    matmul: str = "auto"
    row_sums: str = "auto"

    def __post_init__(self) -> None:
        for work, name in self.names.items():
            check_name(work, name)

    @property
    def names(self) -> Mapping[str, str]:
        """Kind of work, as the registry has it, to the kernel's name."""
        return {
            "attention": self.attention,
            "grouped matmul": self.grouped,
            "matmul": self.matmul,
            "row sums": self.row_sums,
            # What stands between custom calls is made like them.
            "wall": self.matmul if self.matmul in {kernel.name for kernel in list_kernels("wall")} else "auto",
        }

    def check_effect(self, works: Collection[str]) -> None:
        """See that a step has the work that kernels are named for.

        Raises:
            RecipeError: It has none of a kind.
        """
        for field, (work, name) in zip(dataclasses.fields(self), self.names.items()):
            if name != "auto" and work not in works:
                raise RecipeError(
                    f"kernels.{field.name}={name!r} has no effect: the step runs no {work} that it can do; leave it at 'auto'"
                )
