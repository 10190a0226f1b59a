"""Results of a comparison so far, in a file that is written after every turn."""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

from panax.core.errors import DataError, RecipeError
from panax.system import json_reader
from panax.system.replacement import replace_json

RESULTS = "comparison.json"

State = Literal["pending", "measured", "absent", "impossible", "failed"]


@dataclasses.dataclass
class ColumnResult:
    """Results of one column.

    Attributes:
        state: "absent": its framework is not installed; "impossible": it has no such model; "pending": not
            everything was measured.
        reason: Reason why it is not measured.
        losses: Losses of the first steps.
        checked_seconds: Times of these steps, each with a wait for its end; the first includes compiling.
        first_step_seconds: Time from the start of its process to its first loss.
        compile_seconds: Time of tracing and compiling: before the first step, and the first step's excess
            over others.
        peak_bytes: Peak memory of the device, or, according to `peak_of`, of the process.
        product: FLOP/s of a large matmul in its framework.
        registers: FLOP/s of multiplications and additions on registers alone, on CPU; None if its framework
            can't measure them.
        turns: One for each round: seconds and CPU seconds of a step, cores that others used, load of the
            machine.
        layout: The mesh axis of a distributed column; it is compared with the others of its layout.
        sent_bytes: Bytes sent by each of its processes in a step.
        probe: Results of the other batches.
    """

    name: str
    title: str
    state: State = "pending"
    reason: str = ""
    install: str = ""
    framework: str = ""
    device: str = ""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    checked_seconds: list[float] = dataclasses.field(default_factory=list)
    first_step_seconds: float | None = None
    compile_seconds: float | None = None
    peak_bytes: int | None = None
    peak_of: Literal["device", "process"] = "process"
    product: float | None = None
    registers: float | None = None
    processes: int = 1
    layout: str = ""
    sent_bytes: list[int] = dataclasses.field(default_factory=list)
    turns: list[dict[str, float]] = dataclasses.field(default_factory=list)
    probe: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def step_seconds(self) -> list[float]:
        """Return the step time of each round."""
        return [turn["seconds"] for turn in self.turns]


@dataclasses.dataclass
class Comparison:
    """All data of a report.

    Attributes:
        settings: The fields of `Settings`.
        command: The command line.
        work: Facts of the `ComparedWork`: title, unit, units_per_step, flops_per_step, parameters, family.
        reference: The column with which the losses of the others are compared.
        nudged: The reference's losses from weights that differ by a rounding.
        sessions: Number of runs of the command so far.
        one_at_a_time: True if columns were restarted for each turn, because memory did not suffice for all.
        complete: True if everything possible was measured.
    """

    settings: dict[str, Any]
    command: str = ""
    started: str = ""
    work: dict[str, Any] = dataclasses.field(default_factory=dict)
    environment: dict[str, Any] = dataclasses.field(default_factory=dict)
    reference: str = ""
    nudged: list[float] = dataclasses.field(default_factory=list)
    columns: dict[str, ColumnResult] = dataclasses.field(default_factory=dict)
    sessions: int = 0
    one_at_a_time: bool = False
    complete: bool = False

    def save(self, folder: Path) -> None:
        """Write the file atomically."""
        replace_json(folder / RESULTS, dataclasses.asdict(self))


def read_comparison(folder: Path) -> Comparison | None:
    """Read the comparison in a folder; None if there is none.

    Raises:
        DataError: The file can't be read.
    """
    path = folder / RESULTS
    if not path.is_file():
        return None
    try:
        raw = json_reader.read(path, constants=True)
        columns = {name: ColumnResult(**fields) for name, fields in raw.pop("columns").items()}
        return Comparison(**raw, columns=columns)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"{path} can't be read: {error}; remove it, or choose another folder with --directory"
        ) from error


def resume_or_start(folder: Path, settings: dict[str, Any]) -> Comparison:
    """Return the comparison in a folder, to be continued, or a new one.

    Raises:
        RecipeError: The folder holds a comparison with other settings.
    """
    comparison = read_comparison(folder)
    settings = json.loads(json.dumps(settings))
    if comparison is None:
        return Comparison(settings=settings)
    # With more rounds or columns, the existing results are continued.
    free = ("rounds", "columns", "probes")
    other = [name for name in settings if name not in free and comparison.settings.get(name) != settings[name]]
    if other:
        differences = "; ".join(
            f"{name} is {comparison.settings.get(name)!r} there, {settings[name]!r} here" for name in other
        )
        raise RecipeError(
            f"{folder} holds a comparison with other settings ({differences}); choose another folder with "
            "--directory, or remove it"
        )
    comparison.settings = settings
    return comparison
