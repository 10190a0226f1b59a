"""The pages of messages: collected from the sources, up to date, with a cause and a cure for the usual ones."""

import ast
import doctest
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.messages import collect as collecting  # noqa: E402
from tools.messages import pages as paging  # noqa: E402
from tools.messages.__main__ import outdated  # noqa: E402
from tools.messages.collect import Message, collect, template  # noqa: E402
from tools.messages.pages import CAUSES, FOLDER, Cause, matching, pages, read_causes  # noqa: E402

MIN_CAUSES = 60


@pytest.fixture(scope="module")
def messages() -> list[Message]:
    return collect(ROOT / "src")


def test_pages_are_up_to_date(messages):
    assert not outdated(ROOT, messages), "write them: python -m tools.messages"


def test_each_cause_belongs_to_one_message(messages):
    causes = read_causes(ROOT / FOLDER / CAUSES)
    assert len(causes) >= MIN_CAUSES
    wrong = {cause.message: len(found) for cause in causes if len(found := matching(cause, messages)) != 1}
    assert not wrong, "parts of wordings, with the number of messages that have them; expected 1 each"
    anchors = [next(iter(matching(cause, messages))) for cause in causes]
    assert len(set(anchors)) == len(anchors), "two causes for one message"


def test_errors_of_every_room_are_collected(messages):
    rooms = {message.path.split("/")[1] for message in messages if message.path.startswith("panax/")}
    assert {"data", "run", "mesh", "checkpoint", "cluster", "train", "adapters"} <= rooms
    assert any(message.setting == "step.micro_batches" for message in messages)
    assert {"RecipeError", "DataError", "CheckpointError", "LayoutError", "warning"} <= {m.kind for m in messages}


def test_a_tree_with_errors_and_warnings(tmp_path):
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "errors.py").write_text("class PanaxError(Exception): ...\nclass Own(PanaxError): ...\n")
    (tmp_path / "p" / "a.py").write_text(
        "class A:\n"
        "    def check(self, n):\n"
        "        if n:\n"
        "            raise Own(f'a.size={n}; expected '\n"
        "                f'1 or more')\n"
        "        warnings.warn('it is slow', stacklevel=2)\n"
        "        raise KeyError('not a message to users')\n"
        "        raise Own(text)\n"
    )
    local, slow = collect(tmp_path)
    assert local == Message("Own", "a.size=‹n›; expected 1 or more", "p/a.py", "A.check", "a.size")
    assert slow == Message("warning", "it is slow", "p/a.py", "A.check", "")
    text = pages([local, slow], [Cause("it is slow", "It waits.", "Wait with it.")])
    assert set(text) == {"index.md", "p.md"}
    assert "> a.size=‹n›; expected 1 or more" in text["p.md"] and "**Cure:** Wait with it." in text["p.md"]
    assert "| [p](p.md) | 1 | 1 |" in text["index.md"]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("'a' + f'{b!r}c'", "a‹b›c"),
        ("f'{x if y else 2}'", "‹x | ‹2››"),
        ("f'{len(some_name_that_is_far_too_long_to_be_read)}'", "‹…›"),
    ],
)
def test_templates(expression, expected):
    assert template(ast.parse(expression, mode="eval").body).replace("‹‹", "‹") == expected.replace("‹2›", "2")


def test_the_examples_of_the_tool():
    results = [doctest.testmod(module) for module in (collecting, paging)]
    assert all(result.attempted and not result.failed for result in results)
