"""Kernels named by a recipe."""

import dataclasses
from collections.abc import Collection, Mapping

from panax.core.errors import RecipeError
from panax.core.validation import Validated
from panax.kernels.registry import EXACT, check_name, list_kernels

_NAMED = ("attention", "grouped", "matmul", "row_sums")
_EXACT_WORKS = (
    "matmul", "partial attention", "grouped matmul", "norm", "softmax", "logsumexp", "cached attention", "materialize",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels(Validated):
    """Kernel of each kind of work; "auto" selects the fastest that supports the case on the target.

    A kernel that does not support a case, or a kind of work that the step does not have, raises an error when
    the step is traced. For matmuls and row sums, which have many sizes in a step, the named kernel is used
    for those that it supports.

    Attributes:
        attention: cudnn, pallas, blockwise, reference, or a registered one.
        grouped: Grouped matmuls of experts: triton, megablox, c, mkl, blocked, reference, or a registered
            one.
        matmul: All other matmuls with weights: xla, c, mkl, or a registered one.
        row_sums: Gradients of biases: xla, c, mkl, or a registered one.
        exact_policy: True to compute each token with equal bits in training and in generation, by kernels that compute
            a row from that row alone. On CPU, for layouts that split rows and weights (replica,
            fsdp, expert); the other fields must be "auto".

    >>> Kernels(attention="blokwise")
    Traceback (most recent call last):
    panax.core.errors.RecipeError: unknown kernel 'blokwise' for attention; did you mean 'blockwise'?
    """

    attention: str = "auto"
    grouped: str = "auto"
    matmul: str = "auto"
    row_sums: str = "auto"
    exact_policy: bool = False

    def __post_init__(self) -> None:
        named = [name for name in _NAMED if getattr(self, name) != "auto"]
        if self.exact_policy and named:
            raise RecipeError(
                f"kernels.exact_policy names the kernels of all work, and kernels.{named[0]}={getattr(self, named[0])!r} "
                f"names another; remove one of them"
            )
        for work, name in self.names.items():
            check_name(work, name)

    @property
    def names(self) -> Mapping[str, str]:
        """Return the kernel's name for each kind of work of the registry."""
        if self.exact_policy:
            return dict.fromkeys(_EXACT_WORKS, EXACT) | {"attention": "blockwise"}
        return {
            "attention": self.attention,
            "grouped matmul": self.grouped,
            "matmul": self.matmul,
            "row sums": self.row_sums,
            # The barriers between custom calls are of the same kind.
            "wall": self.matmul if self.matmul in {kernel.name for kernel in list_kernels("wall")} else "auto",
        }

    def check_effect(self, works: Collection[str]) -> None:
        """Check that a step has the kinds of work that kernels are named for.

        Raises:
            RecipeError: The step lacks one of these kinds of work.
        """
        if self.exact_policy:
            return
        for field, (work, name) in zip(_NAMED, self.names.items()):
            if name != "auto" and work not in works:
                raise RecipeError(
                    f"kernels.{field}={name!r} has no effect: the step runs no {work} that it can do; leave it at 'auto'"
                )
