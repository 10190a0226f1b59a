"""`Comms`: settings of how devices reduce the gradients of a step."""

import dataclasses
import warnings
from typing import Literal

from ..core.errors import RecipeError, suggest_name
from ..core.params.logical import MESH_AXES
from ..core.validation import Validated
from ..stores import redact_address
from .wires import WIRES, Wire

AUTO = "auto"
"""Value in `Comms.over` that stands for the slow axes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Islands(Validated):
    """Replicas that are separate jobs and synchronize through a folder or object store; losing one does not
    stop the others.

    Attributes:
        count: Number of islands; with 1, replicas are those of the mesh.
        index: Index of this island, from 0.
        store: The folder or object store through which all of them synchronize; it must contain nothing else.
        wait_seconds: How long to wait for the islands of the last round; the others then continue without
            them.
        start_seconds: How long to wait for all islands in the first round.
    """

    count: int = 1
    index: int = 0
    store: str = ""
    wait_seconds: float = dataclasses.field(default=60.0, metadata={"saved": False})
    start_seconds: float = dataclasses.field(default=600.0, metadata={"saved": False})

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.index < max(self.count, 1):
            raise RecipeError(
                f"comms.islands.count={self.count}, index={self.index}; expected 1 island or more, and an index from 0 to "
                "one less"
            )
        if self.wait_seconds <= 0 or self.start_seconds <= 0:
            raise RecipeError(
                f"comms.islands.wait_seconds={self.wait_seconds}, start_seconds={self.start_seconds}; expected more than 0"
            )
        if self.count > 1 and not self.store:
            raise RecipeError(
                f"comms.islands.count={self.count}: islands need a common store; set comms.islands.store to a folder "
                f"that all of them see, or to an address of an object store"
            )
        plain = type(self).__dataclass_fields__
        for name in () if self.count > 1 else ("store", "wait_seconds", "start_seconds"):
            if getattr(self, name) != plain[name].default:
                raise RecipeError(
                    f"comms.islands.{name}={getattr(self, name)!r} has no effect with one island; set "
                    f"comms.islands.count, or remove it"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comms(Validated):
    """How gradients are reduced over the slow network.

    Attributes:
        compress: Format in which gradients are sent over the axes of `over`: bfloat16, int8, float8, int4,
            sign, or a registered wire; empty for float32. Each array is divided among the replicas, which sum
            their parts in float32 and send the sums back; both directions are compressed. Arrays with fewer
            than 4,096 elements are sent in float32.
        over: Mesh axes over which gradients are compressed, jointly; no parameter may be sharded over one of
            them. Reductions over all other axes come first, in float32. "auto": the axes for which
            `panax check` measured less than half of the fastest axis's bandwidth or, without its profile, those
            that cross hosts.
        error_feedback: True to store the rounding error on each replica and add it to the next step's
            gradient, at 4 bytes per parameter (arXiv:1901.09847).
        rounding: nearest, or stochastic: up or down at random, so that sums are unbiased.
        sums: When gradients are reduced over all axes that replicate their parameters. at_end: after the last
            micro-batch, all at once. in_backward: in the backward pass of the last micro-batch, each layer's
            as soon as it is computed, so that communication overlaps with the other layers. each_micro_batch:
            in the backward pass of every micro-batch, which multiplies the bytes sent by their number.
        delayed: True to reduce the last batch's gradients over the axes of `over` while replicas compute the
            next batch; they are kept in between, at 4 bytes per parameter. Each update is one step late.
        delay_correction: True to compute delayed gradients at the parameters plus their last update,
            approximately where the parameters will be (arXiv:1809.02839); needs another 4 bytes per
            parameter.
        local_steps: Number of steps that each replica takes independently, with nothing sent between
            replicas. They then synchronize: the mean of their updates goes to an outer optimizer, SGD with
            Nesterov momentum (DiLoCo, arXiv:2311.08105), and is compressed by `compress`. Evaluation and
            export use the synchronized parameters.
        fragments: Number of parts in which parameters are synchronized, each once in `local_steps` steps, one
            after the other, which divides the peak of bytes sent by this number (streaming DiLoCo,
            arXiv:2501.18512).
        overlap_steps: Number of steps after which replicas adopt the result of a synchronization; they
            continue with their own parameters until then.
        mixing: Weight of a replica's own parameters when it adopts a result, only with `overlap_steps`: 0 for
            none, towards 1 for all.
        outer_rate: Learning rate of the outer optimizer.
        outer_momentum: Momentum of the outer optimizer.
        islands: With `local_steps`: replicas are separate jobs, which may be lost and join again while the
            others continue.
    """

    compress: str = ""
    over: tuple[str, ...] = ("replica",)
    error_feedback: bool = True
    rounding: Literal["nearest", "stochastic"] = "nearest"
    sums: Literal["at_end", "in_backward", "each_micro_batch"] = "at_end"
    delayed: bool = False
    delay_correction: bool = True
    local_steps: int = 1
    fragments: int = 1
    overlap_steps: int = 0
    mixing: float = 0.5
    outer_rate: float = 0.7
    outer_momentum: float = 0.9
    islands: Islands = Islands()

    def __post_init__(self) -> None:
        self._check_islands()
        self._check_local_steps()
        self._check_delayed()
        self._check_sums()
        if not self.compress:
            plain = Comms.__dataclass_fields__
            for name in ("error_feedback", "rounding") if self.delayed else ("over", "error_feedback", "rounding"):
                if getattr(self, name) != plain[name].default:
                    raise RecipeError(
                        f"comms.{name}={getattr(self, name)!r} has no effect without comms.compress; set that to one "
                        f"of {', '.join(WIRES)}, or remove comms.{name}"
                    )
        elif self.compress not in WIRES:
            raise RecipeError(
                f"comms.compress={self.compress!r} is not a wire format; {suggest_name(self.compress, list(WIRES))}"
            )
        for axis in () if self.over == (AUTO,) else self.over:
            if axis not in MESH_AXES:
                raise RecipeError(f"comms.over: {axis!r} is not a mesh axis; {suggest_name(axis, MESH_AXES)}")
        if not self.over or len(set(self.over)) < len(self.over):
            raise RecipeError(f"comms.over={self.over}; expected each mesh axis once, and at least one")
        if self.over != (AUTO,):
            object.__setattr__(self, "over", tuple(axis for axis in MESH_AXES if axis in self.over))
        if not self.compress:
            return
        if self.rounds_at_random and not self.wire.rounds_by_chance:
            raise RecipeError(
                f'comms.rounding="stochastic": {self.compress} has no numbers to choose between; set it to "nearest"'
            )
        if self.wire.needs_feedback and not self.error_feedback:
            warnings.warn(
                f"comms.error_feedback=False with comms.compress={self.compress!r}: rounding errors are lost, and "
                f"training suffers from it; leave error_feedback on",
                stacklevel=2,
            )

    def _check_local_steps(self) -> None:
        if self.local_steps < 1 or self.outer_rate <= 0 or not 0 <= self.outer_momentum < 1:
            raise RecipeError(
                f"comms.local_steps={self.local_steps}, outer_rate={self.outer_rate}, outer_momentum={self.outer_momentum}; "
                f"expected 1 or more, more than 0, and a momentum in [0, 1)"
            )
        plain = Comms.__dataclass_fields__
        for name in ("outer_rate", "outer_momentum"):
            if self.local_steps == 1 and getattr(self, name) != plain[name].default:
                raise RecipeError(
                    f"comms.{name}={getattr(self, name)} has no effect with local_steps=1; set comms.local_steps, or "
                    f"remove it"
                )
        if not 1 <= self.fragments <= self.local_steps or not 0 <= self.overlap_steps < max(self.local_steps, 1):
            raise RecipeError(
                f"comms.fragments={self.fragments}, comms.overlap_steps={self.overlap_steps} with "
                f"comms.local_steps={self.local_steps}; expected 1 to {self.local_steps} fragments, and 0 to "
                f"{self.local_steps - 1} steps"
            )
        if not 0 <= self.mixing < 1:
            raise RecipeError(f"comms.mixing={self.mixing}; expected 0 or more, and less than 1")
        if self.mixing != plain["mixing"].default and not self.overlap_steps:
            raise RecipeError(
                f"comms.mixing={self.mixing} has no effect with overlap_steps=0; set comms.overlap_steps, or remove it"
            )
        if self.local_steps > 1 and self.over != ("replica",):
            raise RecipeError(
                f"comms.over={self.over}: local steps are those of replicas; remove comms.over, or set "
                f"comms.local_steps=1"
            )

    def _check_islands(self) -> None:
        if self.islands.count == 1:
            return
        setting = f"comms.islands.count={self.islands.count}"
        if self.local_steps == 1:
            raise RecipeError(
                f"{setting}: islands synchronize after local steps; set comms.local_steps above 1, usually 25 to 500"
            )
        if self.fragments > 1 or self.overlap_steps:
            raise RecipeError(
                f"{setting} with comms.fragments={self.fragments}, overlap_steps={self.overlap_steps}: islands agree on "
                f"all parameters at once; remove both"
            )
        if self.compress and self.error_feedback:
            raise RecipeError(
                f"{setting} with comms.compress={self.compress!r}: an island does not store rounding errors; set "
                f"comms.error_feedback=False"
            )

    def _check_delayed(self) -> None:
        if self.delayed and self.local_steps > 1:
            raise RecipeError(
                f"comms.delayed=True with local_steps={self.local_steps}: replicas that take local steps add no "
                f"gradients up; remove one of them"
            )
        if not self.delayed and not self.delay_correction:
            raise RecipeError(
                "comms.delay_correction=False has no effect without comms.delayed; set that, or remove it"
            )

    def _check_sums(self) -> None:
        if self.sums == "at_end":
            return
        setting = f"comms.sums={self.sums!r}"
        if self.delayed or self.local_steps > 1:
            other = "delayed=True" if self.delayed else f"local_steps={self.local_steps}"
            raise RecipeError(
                f"{setting} with {other}: no gradients are reduced in this batch's backward pass; remove one of them"
            )
        if self.compress and self.sums == "each_micro_batch":
            raise RecipeError(
                f"{setting} with comms.compress: rounding errors are carried over once per step; set comms.sums to 'in_backward'"
            )
        if self.rounds_at_random:
            raise RecipeError(
                f"{setting} with comms.rounding='stochastic', which depends on positions in whole arrays; set it to 'nearest'"
            )

    @property
    def rounds_at_random(self) -> bool:
        """True if values are rounded up or down at random."""
        return self.rounding == "stochastic"

    def describe(self) -> str | None:
        """Return a line that describes these settings before a run; None if nothing is changed."""
        if self.local_steps > 1:
            how = self.compress or "float32"
            if self.islands.count > 1:
                return (
                    f"comms          island {self.islands.index} of {self.islands.count}: they meet after every "
                    f"{self.local_steps} steps in {redact_address(self.islands.store)}; its changes travel as {how}"
                )
            parts = "" if self.fragments == 1 else f", in {self.fragments} parts at different ones"
            return (
                f"comms          replicas agree after every {self.local_steps} steps{parts}; their changes travel as "
                f"{how}"
            )
        if self.is_plain:
            return None
        late = {True: " one step late", False: ""}[self.delayed]
        if self.sums != "at_end":
            late = " in the backward pass" + ("" if self.sums == "in_backward" else " of each micro-batch")
        how = f"comms          gradients travel as {self.compress or 'float32'} over {' and '.join(self.over)}{late}"
        if not self.compress:
            return how
        feedback = "rounding errors are sent later" if self.error_feedback else "rounding errors are lost"
        return f"{how}; {feedback}"

    @property
    def is_plain(self) -> bool:
        """True if gradients are reduced uncompressed, without delay, in every step."""
        return not self.compress and not self.delayed and self.local_steps == 1 and self.sums == "at_end"

    @property
    def mesh_settings(self) -> "Comms":
        """The settings for the devices of one job; with islands, each island's steps are plain ones."""
        return self if self.islands.count == 1 else Comms()

    @property
    def active_setting(self) -> str:
        """The setting that changes how gradients are reduced, for a message."""
        if self.compress:
            return f'comms.compress="{self.compress}"'
        return "comms.delayed=True" if self.delayed else f'comms.sums="{self.sums}"'

    @property
    def wire(self) -> Wire:
        """The wire format named by `compress`, which must be set."""
        return WIRES[self.compress]
