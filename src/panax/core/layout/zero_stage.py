"""`ZeroStage`: which parts of a training step are sharded. Plain Python, like `mesh/rules.py`, which resolves it."""

import enum


class ZeroStage(enum.StrEnum):
    """Which parts of a step are sharded over fsdp, in addition to stored parameters and state; see
    `mesh.Rules`."""

    ONE = "1"
    TWO = "2"
    THREE = "3"

    @property
    def gathers_per_step(self) -> bool:
        """True if weights are gathered once per step, instead of at each use."""
        return self is not ZeroStage.THREE

    @property
    def scatters_per_step(self) -> bool:
        """True if gradients accumulate unsharded and are reduce-scattered once per step."""
        return self is ZeroStage.ONE
