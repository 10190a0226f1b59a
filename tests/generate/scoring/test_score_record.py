"""Pages of questions are of bounded size and show texts as they are, whatever a model has answered or a file holds."""

import html.parser
import json

import pytest

from panax.generate.scoring import AnswerResult, Question, QuestionKind, QuestionResult, TaskResult
from panax.generate.scoring.score_record import MAX_CHARACTERS, MAX_QUESTIONS, to_record
from panax.metrics.page.html import page
from panax.metrics.report.questions import question_sections

ATTACKS = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</td></table></main><iframe src=javascript:alert(1)>",
    "&lt;script&gt; **strong** `code` [a](javascript:alert(1))",
    "line\n  indented\x00\x1b[31m\u202e",
)


class Texts(html.parser.HTMLParser):
    """The elements of a page, and the texts of its table cells."""

    def __init__(self, source: str):
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.cells: list[str] = []
        self._is_cell = False
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag == "td":
            self.cells.append("")
        self._is_cell = tag == "td"

    def handle_endtag(self, tag):
        self._is_cell = False

    def handle_data(self, data):
        if self._is_cell:
            self.cells[-1] += data


def answer(where: str, prompt, text: str, *, error: str = "") -> QuestionResult:
    question = Question(QuestionKind.ANSWER, where, prompt, accepted=(text,))
    return QuestionResult(question, error, answers=() if error else (AnswerResult(text, text, True, "end"),))


def rendered(record) -> Texts:
    return Texts(page("Questions", question_sections(record)))


def test_texts_are_shown_as_they_are():
    samples = [answer(attack, [{"role": attack, "content": attack}], attack) for attack in ATTACKS]
    samples += [answer("last", attack, "", error=attack) for attack in ATTACKS]
    record = {"step": 3, "files": [to_record(ATTACKS[0], TaskResult.of(samples))]}
    texts = rendered(json.loads(json.dumps(record)))
    plain = rendered({"step": 3, "files": [to_record("a", TaskResult.of([answer("a", "b", "c", error="d")] * 10))]})
    assert texts.tags == plain.tags and texts.attributes == plain.attributes
    for attack in ATTACKS:
        # Of the line, the answer, the expected one, the question twice, and the error.
        assert texts.cells.count(attack) >= 4, attack
        assert f"{attack}: {attack}" in texts.cells


def test_the_page_is_bounded():
    many = [answer(f"line {number}", "q" * 100_000, "a" * 100_000) for number in range(3 * MAX_QUESTIONS)]
    record = to_record("many", TaskResult.of(many))
    assert record["count"] == 600 and len(record["questions"]) == MAX_QUESTIONS
    assert record["questions"][0]["answer"] == "a" * MAX_CHARACTERS + " ... 99,400 characters more"
    source = page("Questions", question_sections({"files": [record] * 9}))
    assert "many: the first 200 of 600 questions" in source and len(source) < 9 * 200 * 4 * MAX_CHARACTERS
    # A file of a run may be of another program, without bounds.
    huge = {"name": "a" * 10**6, "count": 10**5, "questions": [{"question": "q" * 10**5}] * 1000, "scores": [{}] * 3}
    assert len(page("Questions", question_sections({"files": [huge] * 200}))) < 50 * 200 * 2 * 1000


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"files": None},
        {"files": [3, None, "a", []]},
        {"step": "x", "files": [{}]},
        {"step": 10**400, "files": [{"name": 3, "scores": 3, "questions": {"a": 1}, "refused": "all", "count": True}]},
        {
            "files": [
                {"scores": [{"name": [], "value": "<b>", "low": 1e999, "high": {}}], "questions": [{"question": 3}]}
            ]
        },
    ],
)
def test_a_file_of_any_form_is_read(record):
    assert "<b>" not in "".join(rendered(record).cells)


def test_texts_and_choices_have_their_own_columns():
    text = QuestionResult(Question(QuestionKind.TEXT, "a", "", ("abcd",)), log_probabilities=(-4.0,), tokens=(2,))
    cells = rendered({"files": [to_record("texts", TaskResult.of([text]))]}).cells
    assert cells[-3:] == ["a", "abcd", "1.443 bits per byte"]
    choice = QuestionResult(
        Question(QuestionKind.CHOICE, "b", "prompt", (" x", " y"), 1), log_probabilities=(-1.0, -2.0), tokens=(1, 1)
    )
    cells = rendered({"files": [to_record("choices", TaskResult.of([choice]))]}).cells
    assert cells[-5:] == ["b", "prompt", " x", " y", "wrong"]
