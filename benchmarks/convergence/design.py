"""What is trained: optimizers, batches, rates, warm-ups, seeds; and which cell comes next. Loads no jax.

A cell is one training with one optimizer, batch, rate, warm-up and seed. Its rate rises linearly over the warm-up and then stays,
so that the steps to a loss do not depend on a length that was chosen before. All cells train the same model on the same text (the
quickstart's) towards the same held-out loss.

A group is one optimizer at one batch. Its rates lie a factor of 2 apart; the grid moves on while the best one is at its edge. The
best pair of rate and warm-up is trained with two more seeds; a seed is that of the weights and of the order of the data, the same
for all optimizers, so that differences to AdamW are paired.
"""

import dataclasses
import itertools
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

TARGET = 3.5
"""Nats per held-out token; the frequencies of tokens alone give 5.5."""

SEQUENCE = 64
BATCHES = {1: 2, 8: 16, 64: 128}
"""Times the base batch, to rows of `SEQUENCE` tokens."""

BUDGETS = {1: 5000, 8: 1000, 64: 240}
"""The most updates of a cell, by its batch."""

EVALUATIONS = 40
"""Of a budget, evenly spaced; between two of them the loss is taken to fall linearly."""

WARMUPS = (0.01, 0.05)
"""Shares of the budget."""

SEEDS = (0, 1, 2)
RATES = 5
MOVES = 6
"""How many rates are added at most at the edges of a group's grid."""

HOPELESS = 1.25
"""A cell of a grid ends without the loss after so many times the updates that the best one of its group needed."""

PLAIN = "AdamW"


@dataclasses.dataclass(frozen=True)
class Kind:
    """An optimizer of the table.

    Attributes:
        name: Its class in `panax.optim`.
        middle: The rate in the middle of the first grid, by times the base batch.
        settings: Others than the class's own.
    """

    name: str
    middle: Mapping[int, float]
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def _rising(first: float, factor: float) -> dict[int, float]:
    return {times: first * factor**n for n, times in enumerate(BATCHES)}


KINDS = (
    Kind(PLAIN, _rising(2e-3, 2), {"b2": 0.98}),
    Kind("Lamb", _rising(4e-3, 2), {"b2": 0.98}),
    Kind("Lars", _rising(2.0, 2)),
    Kind("Muon", _rising(2e-3, 2), {"b2": 0.98}),
    Kind("Soap", _rising(2e-3, 2)),
    Kind("Shampoo", _rising(2e-3, 2)),
)
"""Short runs forget the second moment faster than the usual 0.999."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One training.

    Attributes:
        batch: Times the base batch.
        power: The rate is the middle one of the first grid times 2 to this power.
        warmup: Share of the budget.
    """

    optimizer: str
    batch: int
    power: int
    warmup: float
    seed: int

    @property
    def rate(self) -> float:
        return kind_named(self.optimizer).middle[self.batch] * 2.0**self.power

    @property
    def warmup_steps(self) -> int:
        return max(1, round(self.warmup * BUDGETS[self.batch]))

    @property
    def point(self) -> tuple[int, float]:
        """Its place in the grid."""
        return self.power, self.warmup


@dataclasses.dataclass(frozen=True)
class Record:
    """How a cell went: a line of the file.

    Attributes:
        steps: Updates to the loss; None where it was not reached.
        taken: Updates that were taken.
        curve: (updates, held-out loss) at each evaluation.
        ended: "reached", "hopeless", "diverged" or "budget".
        made: The design that it was trained by, as `made_by` has it.
    """

    cell: Cell
    steps: float | None
    taken: int
    curve: tuple[tuple[int, float], ...]
    ended: str
    made: str

    @property
    def rank(self) -> tuple[float, float]:
        """Less is better: updates to the loss, then the lowest loss."""
        finite = [loss for _, loss in self.curve if math.isfinite(loss)]
        return (math.inf if self.steps is None else self.steps, min(finite, default=math.inf))


def kind_named(name: str) -> Kind:
    return next(kind for kind in KINDS if kind.name == name)


def made_by(optimizer: str, batch: int) -> str:
    """What two records of a group must have alike, as text.

    >>> "peak" in made_by("AdamW", 1)
    False
    """
    kind = kind_named(optimizer)
    found = (TARGET, SEQUENCE, BATCHES[batch], BUDGETS[batch], EVALUATIONS, kind.middle[batch], dict(kind.settings))
    return json.dumps(found, sort_keys=True)


def steps_to(curve: Sequence[tuple[int, float]], target: float) -> float | None:
    """Updates to the first evaluation at or below the target, interpolated from the one before; None where there is none.

    >>> steps_to([(0, 6.0), (10, 5.0), (20, 4.0)], 4.5)
    15.0
    >>> steps_to([(0, 6.0), (10, 5.0)], 4.5) is None
    True
    """
    for (before, above), (after, below) in itertools.pairwise(curve):
        if below <= target:
            return after if not above > below else before + (after - before) * (above - target) / (above - below)
    return None


def next_cell(optimizer: str, batch: int, records: Sequence[Record]) -> Cell | None:
    """What a group still lacks; None where it is complete.

    The middle of the grid comes first: what is worse ends early.
    """
    own = [each for each in records if (each.cell.optimizer, each.cell.batch) == (optimizer, batch)]
    grid = {each.cell.point: each for each in own if each.cell.seed == SEEDS[0]}
    half = RATES // 2
    for power in sorted(range(-half, half + 1), key=abs):
        for warmup in WARMUPS:
            if (power, warmup) not in grid:
                return Cell(optimizer, batch, power, warmup, SEEDS[0])
    best = best_point(grid)
    powers = {power for power, _ in grid}
    if len(powers) < RATES + MOVES:
        for edge, outside in ((min(powers), min(powers) - 1), (max(powers), max(powers) + 1)):
            if best[0] == edge:
                return Cell(optimizer, batch, outside, WARMUPS[0], SEEDS[0])
    for power in powers:
        for warmup in WARMUPS:
            if (power, warmup) not in grid:
                return Cell(optimizer, batch, power, warmup, SEEDS[0])
    done = {each.cell.seed for each in own if each.cell.point == best}
    return next((Cell(optimizer, batch, *best, seed) for seed in SEEDS if seed not in done), None)


def best_point(grid: Mapping[tuple[int, float], Record]) -> tuple[int, float]:
    """The place of the best record."""
    return min(grid, key=lambda point: grid[point].rank)


def is_at_edge(grid: Mapping[tuple[int, float], Record]) -> bool:
    """Whether the best rate is one of the grid's outermost."""
    powers = {power for power, _ in grid}
    return best_point(grid)[0] in (min(powers), max(powers))


@dataclasses.dataclass(frozen=True)
class Group:
    """A row of the table: an optimizer at one batch.

    Attributes:
        best: Its best pair of rate and warm-up, by seed.
        complete: Whether all of its cells are there.
    """

    optimizer: str
    batch: int
    best: Mapping[int, Record]
    at_edge: bool
    complete: bool

    @property
    def steps(self) -> dict[int, float]:
        """Updates to the loss by seed, of those that reached it."""
        return {seed: each.steps for seed, each in sorted(self.best.items()) if each.steps is not None}

    @property
    def mean(self) -> float | None:
        """Of all seeds; None where one has not reached the loss."""
        return statistics.fmean(self.steps.values()) if self.best and len(self.steps) == len(self.best) else None


def groups_of(records: Sequence[Record]) -> Iterator[Group]:
    """The rows of the table, those that have begun."""
    for batch in BATCHES:
        for kind in KINDS:
            own = [each for each in records if (each.cell.optimizer, each.cell.batch) == (kind.name, batch)]
            grid = {each.cell.point: each for each in own if each.cell.seed == SEEDS[0]}
            if not grid:
                continue
            point = best_point(grid)
            best = {each.cell.seed: each for each in own if each.cell.point == point}
            yield Group(kind.name, batch, best, is_at_edge(grid), next_cell(kind.name, batch, records) is None)


def paired_difference(one: Group, plain: Group) -> tuple[float, float] | None:
    """(mean of the differences of a seed's updates as a share of the other's mean, twice its standard error).

    None where fewer than two seeds have reached the loss in both.
    """
    seeds = sorted(one.steps.keys() & plain.steps.keys())
    if len(seeds) < 2:
        return None
    usual = statistics.fmean(plain.steps[seed] for seed in seeds)
    found = [(one.steps[seed] - plain.steps[seed]) / usual for seed in seeds]
    return statistics.fmean(found), 2 * statistics.stdev(found) / math.sqrt(len(found))


def read_records(path: Path) -> list[Record]:
    """The lines of a file that a sweep wrote; a last one that was cut short is left out, and a cell's newest line counts."""
    if not path.exists():
        return []
    found: dict[Cell, Record] = {}
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        raw = json.loads(line)
        cell = Cell(**raw.pop("cell"))
        curve = tuple((step, math.inf if loss is None else loss) for step, loss in raw.pop("curve"))
        found[cell] = Record(cell, curve=curve, **raw)
    for record in found.values():
        now = made_by(record.cell.optimizer, record.cell.batch)
        if record.made != now:
            raise SystemExit(
                f"{path} has cells of {record.cell.optimizer} that were trained by another design: {record.made}, where it is "
                f"{now} now; remove these lines, or give another --folder"
            )
    return list(found.values())


def append_record(path: Path, record: Record) -> None:
    """Add a line."""
    raw = dataclasses.asdict(record)
    raw["curve"] = [[step, loss if math.isfinite(loss) else None] for step, loss in record.curve]
    with open(path, "a+b") as file:
        file.seek(0)
        # What a kill has cut short goes.
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(raw).encode() + b"\n")
