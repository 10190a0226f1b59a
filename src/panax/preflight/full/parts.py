"""Parts of a full check, which pass, fail or are skipped, each with its reason and figures."""

import dataclasses
import enum
import time
from collections.abc import Callable, Mapping

Figures = Mapping[str, str]
"""Name to a value with its unit."""

MAX_CHARACTERS = 4000
"""Maximum length of an error that is stored: a compiler's may be a whole program."""


class CheckOutcome(enum.Enum):
    """How a part ended; the value is the text for users."""

    PASSED = "passed"
    FAILED = "failed"
    LEFT_OUT = "left out"


class CaseSkipped(Exception):
    """Error for a part that can't run here; the message gives the reason."""


class ResultMismatch(Exception):
    """Error for values that differ from their definition."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One part, before it runs.

    Attributes:
        group: "kernel", "layout", "checkpoint" or "benchmark".
        run: Returns the figures; raises CaseSkipped, or any other error.
    """

    group: str
    name: str
    run: Callable[[], Figures]

    def __str__(self) -> str:
        return f"{self.group}: {self.name}"


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """One part, after it ran.

    Attributes:
        why: The error of a part that failed, or the reason why it was skipped; otherwise empty.
        seconds: Its duration, compilation included.
    """

    group: str
    name: str
    outcome: CheckOutcome
    why: str
    figures: Figures
    seconds: float


@dataclasses.dataclass(frozen=True)
class FullCheck:
    """All parts of one full check.

    Attributes:
        day: The day on which it began, YYYY-MM-DD.
        platform: JAX's name of the platform: "cpu", "gpu", "tpu" or a plug-in's.
        chip: Name of the device.
        facts: Hardware and versions: name to value.
        seconds: Duration of the whole check.
    """

    day: str
    platform: str
    chip: str
    facts: Mapping[str, str]
    parts: tuple[CheckResult, ...]
    seconds: float

    @property
    def failed(self) -> tuple[CheckResult, ...]:
        return tuple(part for part in self.parts if part.outcome is CheckOutcome.FAILED)

    def count(self, outcome: CheckOutcome) -> int:
        return sum(part.outcome is outcome for part in self.parts)

    def format_summary(self) -> str:
        """Format how many parts passed, failed and were skipped."""
        return ", ".join(f"{self.count(each)} {each.value}" for each in CheckOutcome)


def run_case(case: Case) -> CheckResult:
    """Run a part; an error is stored as its result, so that the other parts continue."""
    start = time.perf_counter()
    figures: Figures = {}
    outcome, why = CheckOutcome.PASSED, ""
    try:
        figures = case.run()
    except CaseSkipped as reason:
        outcome, why = CheckOutcome.LEFT_OUT, str(reason)
    except Exception as error:
        outcome, why = CheckOutcome.FAILED, _said(error)
    return CheckResult(case.group, case.name, outcome, why, figures, time.perf_counter() - start)


def _said(error: Exception) -> str:
    text = str(error).strip() or "without a message"
    said = text if isinstance(error, ResultMismatch) else f"{type(error).__name__}: {text}"
    return said if len(said) <= MAX_CHARACTERS else f"{said[:MAX_CHARACTERS]} [...]"
