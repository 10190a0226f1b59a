"""Placeholder for the data of a preset: the experiment can be inspected, but not trained."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..core.errors import DataError
from ..core.validation import Validated
from .experiment import Experiment


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoData(Validated):
    """A placeholder for a preset's data.

    Attributes:
        preset: Name of the preset.
        kind: The data that it takes, as text.
        function: The call that creates the experiment, if it is not `panax.preset`.
    """

    preset: str
    kind: str
    function: str = ""

    def documents(self) -> Iterator[Any]:
        raise self.missing_data_error()

    def fingerprint(self) -> str:
        raise self.missing_data_error()

    def open(self, root: Path, max_bad_records: int) -> Any:
        raise self.missing_data_error()

    def fill(self, experiment: Experiment) -> Experiment:
        """Return the experiment with blank data, to inspect its step; unchanged if its batches are known
        without data."""
        return experiment

    def missing_data_error(self) -> DataError:
        """Return the error to raise when data is needed."""
        function = self.function or f"panax.preset({self.preset!r})"
        name = self.preset if self.function else f"the preset {self.preset}"
        return DataError(
            f"{name} comes without data; pass {self.kind}: --data PATH, or {function.removesuffix(')')}, data=PATH)"
        )


def find_missing_data(experiment: Experiment) -> NoData | None:
    """Return the placeholder in an experiment without data; None if it has data."""
    inside = getattr(experiment.data, "corpus", None) or getattr(experiment.data, "examples", None)
    return inside if isinstance(inside, NoData) else None
