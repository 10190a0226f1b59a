"""What stands where a preset's data will be: the experiment can be looked at, and not trained."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..core.errors import DataError
from ..core.validation import Validated
from .experiment import Experiment


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoData(Validated):
    """Where a preset's data will be.

    Attributes:
        preset: Its name.
        kind: What it takes, in words.
    """

    preset: str
    kind: str

    def documents(self) -> Iterator[Any]:
        raise self.missing_data_error()

    def fingerprint(self) -> str:
        raise self.missing_data_error()

    def open(self, root: Path, max_bad_records: int) -> Any:
        raise self.missing_data_error()

    def fill(self, experiment: Experiment) -> Experiment:
        """Return the experiment with blank data, to look at its step; one whose batches are known without data stays as it is."""
        return experiment

    def missing_data_error(self) -> DataError:
        """What to raise where data is needed."""
        return DataError(
            f"the preset {self.preset} comes without data; give {self.kind}: --data PATH, or "
            f"panax.preset({self.preset!r}, data=PATH)"
        )


def find_missing_data(experiment: Experiment) -> NoData | None:
    """What stands in the place of an experiment's data; None where it has some."""
    inside = getattr(experiment.data, "corpus", None) or getattr(experiment.data, "examples", None)
    return inside if isinstance(inside, NoData) else None
