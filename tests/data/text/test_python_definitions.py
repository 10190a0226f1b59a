"""Functions and classes out of Python sources: code alone, and all of it."""

import ast
from itertools import islice

import pytest

from panax.data import PythonLibrary
from panax.data.text.python_definitions import extract_definitions

SOURCE = '''"""What the module is."""

import os
X = 1

@decorated
def one(x):
    """Say.

    # No comment: it is part of the docstring.
    """

    # A comment.

    y = x  # stays, beside code
    def inner():
        "Say."
        return """
# a line of a string
"""
    return y\x0c

class Two:
    """All there is."""

class Three:
    """Say."""
    async def four(self): "Say."; return 4

if X:
    def five(): pass
'''


def test_code_stays_and_what_explains_it_goes():
    one, two, three = extract_definitions(SOURCE)
    assert one == "def one(x):\n    y = x  # stays, beside code\n    def inner():\n" + (
        '        return """\n"""\n    return y\x0c\n'
    )
    assert two == 'class Two:\n    """All there is."""\n'
    assert three == 'class Three:\n    async def four(self): "Say."; return 4\n'


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_are_counted_as_the_parser_does(end):
    source = "\x0c\ndef f():\n    x = '\x0b\x1c'\n    return x\n".replace("\n", end)
    assert list(extract_definitions(source)) == ["def f():\n    x = '\x0b\x1c'\n    return x\n"]


def test_files_that_are_not_python_are_reported():
    with pytest.raises(SyntaxError):
        list(extract_definitions("def f(:\n"))


def test_each_document_of_the_library_is_a_definition():
    documents = [document.text for document in islice(PythonLibrary(definitions=True).documents(), 500)]
    assert len(documents) == 500 and sum(map(len, documents)) > 100_000
    assert {text.partition(" ")[0] for text in documents} <= {"def", "class", "async"}
    for text in documents[::10]:
        (node,) = ast.parse(text).body
        assert text.endswith("\n") and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


def test_the_whole_library_and_its_definitions_are_cached_apart():
    assert PythonLibrary().fingerprint() != PythonLibrary(definitions=True).fingerprint()
