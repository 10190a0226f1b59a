"""JSON of other programs: every bound, and one error for all that is wrong."""

import json
import math
import os

import pytest

from panax.system import json_reader
from panax.system.json_reader import JsonError

HOSTILE = {
    "lists in lists": ("[" * 30_000 + "]" * 30_000, "nested deeper than 64"),
    "objects in objects": ('{"a":' * 65 + "1" + "}" * 65, "nested deeper than 64"),
    "an open list": ("[" * 30_000, "nested deeper than 64"),
    "digits": ("9" * 5_000, "5,000 digits"),
    "infinite": ("[1e400]", "exceeds the range of float64"),
    "minus infinite": ("-1e999", "exceeds the range of float64"),
    "NaN": ('{"loss": NaN}', "holds NaN"),
    "Infinity": ("[-Infinity]", "holds -Infinity"),
    "half a pair": ('["\\ud800"]', "half of a surrogate pair"),
    "half a pair as a key": ('{"\\uDC00": 1}', "half of a surrogate pair"),
    "not UTF-8": (b'{"a": "\xff"}', "not JSON"),
    "cut short": ('{"a": [1, 2', "not JSON"),
    "empty": ("", "not JSON"),
    "two values": ("1 2", "not JSON"),
    "a control character": ('"\x00"', "not JSON"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_text_is_one_kind_of_error(case):
    text, message = HOSTILE[case]
    with pytest.raises(JsonError, match=message):
        json_reader.parse(text)


def test_text_at_the_bounds_is_read():
    deep = '{"a":' * 64 + "1" + "}" * 64
    assert json_reader.parse(deep) == json.loads(deep)
    assert json_reader.parse("1" + "0" * 39) == 10**39
    assert json_reader.parse('"\\ud83d\\ude00"') == "😀"
    assert json_reader.parse(b"\xef\xbb\xbf[1]") == [1]
    assert json_reader.parse("[1]", max_bytes=3) == [1]
    with pytest.raises(JsonError, match="3 bytes long; at most 2"):
        json_reader.parse("[1]", max_bytes=2)
    assert math.isnan(json_reader.parse("[NaN]", constants=True)[0])


@pytest.mark.parametrize(
    ("text", "says"), [("[1]", "a list"), ("null", "a NoneType"), ("3", "a int"), ('"x"', "a str")]
)
def test_a_value_of_another_kind_is_refused(text, says):
    with pytest.raises(JsonError, match=f"it holds {says}; expected an object"):
        json_reader.parse_as(dict, text)
    assert json_reader.parse_as(dict, "{}") == {}


def test_a_file_is_regular_and_short(tmp_path):
    (tmp_path / "whole").write_text('{"a": 1}')
    assert json_reader.read_as(dict, tmp_path / "whole") == {"a": 1}
    with pytest.raises(JsonError, match="8 bytes long; at most 7"):
        json_reader.read(tmp_path / "whole", max_bytes=7)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(JsonError, match="not a regular file"):
        json_reader.read(tmp_path / "pipe")
    with pytest.raises(JsonError, match="not a regular file"):
        json_reader.read("/dev/zero")
    with pytest.raises(IsADirectoryError):
        json_reader.read(tmp_path)
    with pytest.raises(FileNotFoundError):
        json_reader.read(tmp_path / "none")
