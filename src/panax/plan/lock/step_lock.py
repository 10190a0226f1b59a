"""`StepLock`: the cost of one training step, as it is written to a file and read again."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, get_args

from ...core.errors import DataError
from ...system import json_reader
from ..collectives import CollectiveKind
from ..walk.traffic import Traffic
from ..walk.walk import StepCost

FORMAT = 1
"""Version of the file's form."""

KINDS: tuple[str, ...] = get_args(CollectiveKind)


class LockedCollective(NamedTuple):
    """A collective of a step.

    Attributes:
        kind: See `Traffic`.
        axes: Its mesh axes.
        purpose: Its contents, such as `weights`, or the part of the model that sends.
        sent: Bytes that a device sends in one execution.
        times: Expected executions in one step.
        module: Its named scope in the program.
        source: The line that traced it, as "FILE:LINE (FUNCTION)"; empty if unknown.
    """

    kind: str
    axes: tuple[str, ...]
    purpose: str
    sent: int
    times: float
    module: str
    source: str

    @property
    def total(self) -> float:
        """Return the bytes that a device sends in one step."""
        return self.sent * self.times


@dataclasses.dataclass(frozen=True)
class StepLock:
    """The cost of one training step on one device.

    Attributes:
        recipe: The recipe, as on the command line.
        flags: Its flags, with the target.
        mesh: Mesh axis to size, for sizes above 1.
        parameters: Number of the model's parameters.
        flops: FLOPs of matrix multiplications.
        memory: Bytes by kind: parameters, optimizer, state and batch, temporaries.
        collectives: The communication, in the order of the program.
        unknown: Parts that the figures leave out; see `StepCost`.
    """

    recipe: str
    flags: tuple[str, ...]
    mesh: Mapping[str, int]
    parameters: int
    flops: float
    memory: Mapping[str, int]
    collectives: tuple[LockedCollective, ...]
    unknown: tuple[str, ...]

    def to_json(self) -> str:
        """Return the text of the file; a line for each collective, so that a diff is readable."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        lines = [json.dumps(each._asdict()) for each in self.collectives]
        listed = "[]" if not lines else "[\n    " + ",\n    ".join(lines) + "\n  ]"
        head = {"format": FORMAT, **fields, "collectives": None}
        text = json.dumps(head, indent=2)
        return text.replace('"collectives": null', f'"collectives": {listed}') + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> "StepLock":
        """Read the text of a file.

        Args:
            where: Its name, for errors.

        Raises:
            DataError: It is not a lock, or of another version of the form.
        """
        try:
            fields = json_reader.parse(text)
            version = fields.pop("format")
            if version != FORMAT:
                raise DataError(
                    f"{where} has the format {version!r}, and this version of Panax reads {FORMAT}; write the lock again with "
                    f"`panax inspect RECIPE --lock {where}`"
                )
            return cls(
                str(fields["recipe"]),
                tuple(str(flag) for flag in fields["flags"]),
                {str(axis): int(size) for axis, size in fields["mesh"].items()},
                int(fields["parameters"]),
                float(fields["flops"]),
                {str(kind): int(size) for kind, size in fields["memory"].items()},
                tuple(_read_collective(each) for each in fields["collectives"]),
                tuple(str(each) for each in fields["unknown"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{where} is not a lock that `panax inspect --lock` has written: {error!r}") from error


def _read_collective(fields: Mapping[str, Any]) -> LockedCollective:
    kind = str(fields["kind"])
    if kind not in KINDS:
        raise ValueError(f"unknown collective {kind!r}")
    return LockedCollective(
        kind,
        tuple(str(axis) for axis in fields["axes"]),
        str(fields["purpose"]),
        int(fields["sent"]),
        float(fields["times"]),
        str(fields["module"]),
        str(fields["source"]),
    )


def lock_step(
    recipe: str,
    flags: Sequence[str],
    cost: StepCost,
    *,
    mesh: Mapping[str, int],
    parameters: int,
    state_bytes: Mapping[str, int],
) -> StepLock:
    """Return the lock of a traced step.

    Args:
        state_bytes: Bytes on each device by kind of state, such as `optimizer`.
    """
    return StepLock(
        recipe,
        tuple(flags),
        {axis: size for axis, size in mesh.items() if size > 1},
        parameters,
        cost.work.flops,
        {**state_bytes, "state and batch": cost.arguments, "temporaries": cost.temporaries},
        tuple(_lock_traffic(cost.traffic)),
        cost.unknown,
    )


def _lock_traffic(traffic: Iterable[Traffic]) -> Iterable[LockedCollective]:
    """Yield collectives in order, each with all equal ones, at the place of the first."""
    merged: dict[LockedCollective, float] = {}
    for one in traffic:
        key = LockedCollective(one.kind, one.axes, one.purpose, one.sent, 0.0, one.scope, one.source)
        merged[key] = merged.get(key, 0.0) + one.times.expected
    return [key._replace(times=times) for key, times in merged.items()]
