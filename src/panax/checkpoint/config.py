"""Settings of a run's checkpoints."""

import dataclasses
from typing import Literal

from ..core.errors import RecipeError
from ..core.validation import Validated
from .memory import MemoryConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Validated):
    """When and where checkpoints are saved, and which are kept.

    Attributes:
        directory: A folder, or `s3://bucket/prefix`, `gs://...`, `az://...`; empty: `checkpoints` in the
            run's folder.
        every: Steps between two saves; 0 saves only at the end and when interrupted.
        keep_last: Number of newest checkpoints to keep.
        keep_best: Number of checkpoints with the lowest held-out loss to keep as well. Above 0, an evaluation
            that is the best so far is saved between two saves too, unless `every` is 0.
        keep_every: Checkpoints of steps that this divides are kept for good; 0 for none.
        when_busy: Behavior of a save that is due while the one before is still being written: `wait` for it,
            or `skip` this one.
        retries: Number of retries of a failed save, in addition to the store's own retries of each request.
        retry_seconds: The longest pause before the first retry; twice as long before each further one.
        commit_seconds: Time that the first process waits for the parts of the others.
        base: Weights that `init` has loaded from a released model, and that the run freezes, are `stored` in each checkpoint, or
            `named`: a checkpoint has their checksums, and they are read from the model again. `auto`: named by runs that
            train adapters, else stored.
        memory: Settings of copies in the memory of hosts, between two saves.
    """

    directory: str = ""
    every: int = 100
    keep_last: int = 2
    keep_best: int = 1
    keep_every: int = 0
    when_busy: Literal["wait", "skip"] = "wait"
    retries: int = 3
    retry_seconds: float = 2.0
    commit_seconds: float = 600.0
    base: Literal["auto", "named", "stored"] = "auto"
    memory: MemoryConfig = dataclasses.field(default_factory=MemoryConfig)

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_best", "every", "keep_every", "retries"):
            least = int(name == "keep_last")
            if getattr(self, name) < least:
                raise RecipeError(f"checkpoint.{name}={getattr(self, name)}; expected {least} or more")
        if self.when_busy not in ("wait", "skip"):
            raise RecipeError(f"checkpoint.when_busy={self.when_busy!r}; expected wait or skip")
        if self.base not in ("auto", "named", "stored"):
            raise RecipeError(f"checkpoint.base={self.base!r}; expected auto, named or stored")
        if self.retry_seconds < 0 or self.commit_seconds <= 0:
            raise RecipeError(f"{self}: expected retry_seconds >= 0 and commit_seconds > 0")
