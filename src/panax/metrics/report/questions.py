"""Section of a page about questions that a model was asked: scores, and the first questions with their answers."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..page.blocks import Block, Fold, Paragraph, Section, TextTable
from .run_files import Facts, number, text

MAX_FILES, MAX_QUESTIONS, MAX_CHARACTERS = 50, 200, 700
"""Maximum sizes of the shown part: a run's file may have been written by another program."""

COLUMNS = ("question", "answer", "expected", "score")


def question_sections(record: Facts) -> tuple[Section, ...]:
    """Return the section of a record of scores; none if no questions were asked.

    Args:
        record: Content of a run's `questions.json`, which may be of any form.
    """
    files = _objects(record.get("files"))[:MAX_FILES]
    if not files:
        return ()
    step = number(record, "step")
    after = "" if step is None else f" after step {step:,}"
    return (
        Section(
            "Questions",
            (
                Paragraph(f"Scores{after}, with intervals of 95 % over questions.", faint=True),
                TextTable((("file", "questions", "score", "value", "95 %"), *_score_rows(files)), verbatim=True),
                *(block for file in files for block in _answers(file)),
            ),
        ),
    )


def _score_rows(files: Sequence[Facts]) -> Iterator[tuple[str, ...]]:
    for file in files:
        for score in _objects(file.get("scores")):
            low, high = number(score, "low"), number(score, "high")
            interval = "" if low is None or high is None else f"{low:.4g} to {high:.4g}"
            value = number(score, "value")
            shown = "—" if value is None else f"{value:.4g}"
            yield _text(file, "name"), _count(score, "rows"), _text(score, "name"), shown, interval


def _answers(file: Facts) -> Iterator[Block]:
    """Yield the first questions of a file, collapsed."""
    name, count = _text(file, "name"), _count(file, "count")
    for key, meaning in (
        ("refused", "questions could not be asked, and no score counts them"),
        ("cut", "answers ended by their maximum number of tokens"),
    ):
        if number(file, key):
            yield Paragraph(f"{name}: {_count(file, key)} {meaning}.", faint=True)
    questions = _objects(file.get("questions"))[:MAX_QUESTIONS]
    # A column without any text is omitted, such as the expected answers to texts.
    columns = [column for column in COLUMNS if any(text(question, column) for question in questions)]
    rows = [
        (_text(question, "where"), *(_text(question, column) for column in columns), _text(question, "error"))
        for question in questions
    ]
    has_errors = any(row[-1] for row in rows)
    if questions:
        head = ("line", *columns, "error")
        first = f"the first {len(rows)} of " if str(len(rows)) != count else ""
        table = [head, *rows] if has_errors else [row[:-1] for row in (head, *rows)]
        yield Fold(f"{name}: {first}{count} questions", (TextTable(tuple(table), verbatim=True),))


def _objects(value: Any) -> list[Facts]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def _text(facts: Facts, name: str) -> str:
    value = text(facts, name)
    return value if len(value) <= MAX_CHARACTERS else f"{value[:MAX_CHARACTERS]} ..."


def _count(facts: Facts, name: str) -> str:
    count = number(facts, name)
    return "—" if count is None else f"{count:,}"
