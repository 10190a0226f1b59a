"""The text of an answer arrives in whole characters and ends before a stop text, however tokens cut either."""

import pytest

from panax.generate import GenerationRequest
from panax.generate.rows import EngineRow, PendingAnswer, choose_rows
from panax.generate.text import AnswerText


class Bytes:
    """A tokenizer of bytes, as byte-level ones are at their finest."""

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")


class Pieces:
    """A tokenizer that spells the first token of a text without its leading space, as SentencePiece does."""

    words = (" a", " b", " st", "op", " stop")

    def decode(self, ids):
        return "".join(self.words[each] for each in ids).removeprefix(" ")


def parts(tokenizer, ids, stop=()):
    text = AnswerText(tokenizer, stop)
    given = [text.add(each) for each in ids]
    return [*given, text.finish()], text


def test_characters_arrive_whole():
    given, text = parts(Bytes(), "aä€😀z".encode())
    assert [each for each in given if each] == ["a", "ä", "€", "😀", "z"] and text.text == "aä€😀z"


def test_bytes_that_are_no_character_are_passed_on_at_the_end_and_after_a_while():
    given, text = parts(Bytes(), b"a\xe2\x82")
    assert given == ["a", "", "", "\N{REPLACEMENT CHARACTER}"] and text.text == "a\N{REPLACEMENT CHARACTER}"
    given, text = parts(Bytes(), b"\xff" * 40 + b"a")
    assert text.text == "\N{REPLACEMENT CHARACTER}" * 40 + "a"


@pytest.mark.parametrize(
    ("text", "stop", "shown", "stopped"),
    [
        ("one two", ("two",), "one ", True),
        ("one tw", ("two",), "one tw", False),
        ("one twtwo x", ("two",), "one tw", True),
        ("aab", ("ab", "aab"), "", True),
        ("xyxyz", ("xyz",), "xy", True),
        ("ä€", ("€",), "ä", True),
        ("abc", ("d",), "abc", False),
    ],
)
def test_a_stop_text_that_spans_tokens_ends_the_text_before_it(text, stop, shown, stopped):
    answer = AnswerText(Bytes(), stop)
    given = ""
    for byte in text.encode():
        given += answer.add(byte)
        assert shown.startswith(given), "nothing is shown that is taken back later"
        if answer.is_stopped:
            break
    given += answer.finish()
    assert given == answer.text == shown and answer.is_stopped is stopped


def test_spaces_between_pieces_are_kept():
    given, text = parts(Pieces(), [0, 1] * 12 + [2, 3], ("stop",))
    assert text.text == " ".join("ab" * 12) + " " and text.is_stopped
    assert given[1] == " b"


def test_rows_are_chosen_for_their_common_beginning():
    request = GenerationRequest((1, 2, 3, 4))
    busy = PendingAnswer(0, 0, request, None)
    rows = [EngineRow(busy, (1, 2, 3, 4)), EngineRow(None, (1, 2, 9, 9)), EngineRow(None, ())]
    # The longest beginning is in a busy row: it is copied to the free row with the least to lose.
    assert choose_rows(rows, (1, 2, 3, 4, 5), 2, shares=True) == (2, 0, 4)
    # In a free row: continued there.
    assert choose_rows(rows, (1, 2, 9, 9, 5), 2, shares=True) == (1, 1, 4)
    # Whole chunks, and never the last token.
    assert choose_rows(rows, (1, 2, 3, 4), 2, shares=True) == (1, 1, 2)
    assert choose_rows(rows, (1, 2, 3, 4, 5), 3, shares=True) == (2, 0, 3)
    assert choose_rows(rows, (1, 2, 3, 4, 5), 2, shares=False)[2] == 0
    assert choose_rows(rows[:1], (1,), 2, shares=True) is None
