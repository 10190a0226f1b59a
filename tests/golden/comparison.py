"""The comparison of two commits' golden runs, bit by bit."""

import dataclasses
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

EQUAL, DIFFERS, ONLY_BEFORE, ONLY_AFTER, FAILED = "equal", "differs", "only before", "only after", "failed"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of comparing a run.

    Attributes:
        outcome: One of the constants of this module.
        detail: The first difference, or the last lines of an error.
    """

    name: str
    outcome: str
    detail: str = ""


def compare(before: Mapping[str, Any], after: Mapping[str, Any], names: Sequence[str]) -> list[Verdict]:
    """Compare the answers of two commits, by run; each has `rows` or `error`."""
    return [_compare_run(name, before.get(name), after.get(name)) for name in names]


def _compare_run(name: str, before: Any, after: Any) -> Verdict:
    for side, answer in (("before", before), ("after", after)):
        if answer is not None and "error" in answer:
            lines = [line for line in answer["error"].strip().splitlines() if line.strip()]
            return Verdict(name, FAILED, f"{side}:\n" + "\n".join(f"    {line}" for line in lines[-6:]))
    if before is None or after is None:
        return Verdict(name, ONLY_AFTER if before is None else ONLY_BEFORE)
    difference = first_difference(before["rows"], after["rows"])
    return Verdict(name, DIFFERS, difference) if difference else Verdict(name, EQUAL, f"{len(after['rows'])} values")


def first_difference(before: Sequence[Any], after: Sequence[Any]) -> str:
    """The first row, by step, that differs or is missing; empty if all are equal."""
    one, other = ({(step, metric): value for step, metric, value in rows} for rows in (before, after))
    order = sorted(one.keys() | other.keys(), key=lambda key: (key[0], key not in one or key not in other, key[1]))
    differing = [key for key in order if one.get(key) != other.get(key)]
    if not differing:
        return ""
    step, metric = differing[0]
    count = f"; {len(differing)} of {len(order)} values differ"
    if (step, metric) not in one or (step, metric) not in other:
        return f"step {step}, {metric}: only {'after' if (step, metric) in other else 'before'}{count}"
    a, b = float.fromhex(one[step, metric]), float.fromhex(other[step, metric])
    return f"step {step}, {metric}: {a!r} before, {b!r} after, {ulps_text(a, b)}{count}"


def ulps_text(a: float, b: float) -> str:
    """The distance of two values in units in the last place, of float32 if both are float32 values."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return "not both finite"
    with np.errstate(over="ignore"):
        single = all(float(np.float32(value)) == value for value in (a, b))
    form, name = ("fi", "float32") if single else ("dq", "float64")
    return f"{abs(_ordinal(a, form) - _ordinal(b, form)):,} ulps of {name}"


def _ordinal(value: float, form: str) -> int:
    """An integer that counts the floating-point numbers up to `value`."""
    (bits,) = struct.unpack(f"<{form[1]}", struct.pack(f"<{form[0]}", value))
    sign = 1 << (31 if form == "fi" else 63)
    return bits if bits >= 0 else -(bits & (sign - 1))
