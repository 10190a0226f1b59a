"""Binary headers are read by one reader: `struct.unpack` and its like stand elsewhere only with a stated reason."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"

EXCEPTIONS = {
    "panax/system/binary_reader.py": "the reader",
    "panax/data/formats/npy_header.py": "NumPy's own reader of headers, of the form that has a bound",
    "panax/core/params/module.py": "a digest of this process",
    "panax/data/mixtures/mixture_source.py": "a digest of this process",
}

READERS = {"unpack_from", "iter_unpack", "from_bytes", "read_magic", "read_array_header_1_0", "read_array"}
"""Methods, whoever has them."""

OF_MODULES = {("struct", "unpack"), ("struct", "Struct"), ("np", "load"), ("numpy", "load"), ("np", "fromstring")}


def readers_in(source: str) -> list[int]:
    """The lines on which numbers are read from bytes by something else than the reader."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and (node.attr in READERS or (isinstance(node.value, ast.Name) and (node.value.id, node.attr) in OF_MODULES))
    ]


def test_binary_headers_are_read_by_the_reader():
    found = {
        f"{path.relative_to(SOURCE)}:{line}"
        for path in SOURCE.rglob("*.py")
        if str(path.relative_to(SOURCE)) not in EXCEPTIONS
        for line in readers_in(path.read_text(encoding="utf-8"))
    }
    assert not found, "read the headers of others with panax.system.binary_reader"


@pytest.mark.parametrize(
    "planted",
    ["struct.unpack('<I', data)", "struct.unpack_from('<I', data, -4)", "int.from_bytes(data[:8], 'little')",
     "struct.Struct('<QQ')", "np.load(path)", "np.lib.format.read_array(file)"],
)  # fmt: skip
def test_another_reader_is_seen(planted):
    assert readers_in(f"import struct\n\n{planted}\n") == [3]


def test_exceptions_are_still_needed():
    assert all(readers_in((SOURCE / name).read_text(encoding="utf-8")) for name in EXCEPTIONS)
