"""Scores of a run's model on its questions: figures to log, lines to print, and a file for the run's report."""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from ...generate.scoring import TaskResult
from ...generate.scoring.score_record import to_record
from ...job.agreement import broadcast_text
from ...system import json_reader
from ...system.replacement import replace_json

QUESTIONS_FILE = "questions.json"
"""File in the run's folder with the newest scores and answers."""


@dataclasses.dataclass(frozen=True)
class QuestionScores:
    """Results of a run's files of questions, by the names of the files."""

    results: Mapping[str, TaskResult]

    def values(self) -> dict[str, float]:
        """Return all scores, by `FILE/SCORE`: those of the first process, so that all processes of a job decide by the
        same ones. Every process calls it at the same point."""
        values = {
            f"{name}/{score}": estimate.value
            for name, result in self.results.items()
            for score, estimate in result.scores.items()
        }
        return json_reader.parse(broadcast_text(json.dumps(values)), constants=True)

    def lines(self) -> Iterator[str]:
        """Yield a line about each file."""
        for name, result in self.results.items():
            scores = [
                f"{score} {each.value:.4g}" + ("" if math.isnan(each.low) else f" ({each.low:.4g} to {each.high:.4g})")
                for score, each in result.scores.items()
            ]
            refused = (
                f"; {result.refused} of {len(result.samples)} questions could not be asked" if result.refused else ""
            )
            cut = f"; {result.cut} answers were cut (questions.tokens)" if result.cut else ""
            yield f"questions {name}: {', '.join(scores)}{refused}{cut}"

    def write(self, folder: Path, step: int) -> None:
        """Write the scores and the first questions of each file to the run's folder.

        Raises:
            OSError: The file can't be written.
        """
        files = [to_record(name, result) for name, result in self.results.items()]
        replace_json(folder / QUESTIONS_FILE, {"step": step, "files": files})
