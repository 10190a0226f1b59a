"""A tutorial's page, cut into prose, code and recorded outputs.

The page is the source. Directives are HTML comments, which a rendered page doesn't show:

    <!-- files: texts, chat.jsonl -->                   small files that the code reads; a cell of the notebook writes them
    <!-- shortened: num_steps=300 -> num_steps=6 -->    a substitution for the form that the default tests run
    <!-- varies -->                                     the output of the next block differs between machines
    <!-- output -->                                     the text or picture that follows was recorded from the block above
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

FOLDER = "docs/tutorials"

Kind = Literal["python", "file", "console", "files"]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$\n?", re.M | re.S)
_OUTPUT = re.compile(r"^\n<!-- output -->\n(?:```text\n.*?^```$\n?|!\[[^\n]*\n)", re.M | re.S)
_FILES = re.compile(r"^<!-- files: (.+?) -->\n", re.M)
_SHORTENED = re.compile(r"^<!-- shortened: (.+?) -> (.*?) ?-->$", re.M)
_VARIES = "<!-- varies -->\n"
_NAMED = re.compile(r"# (\w+\.py)\n")


class TutorialError(Exception):
    """A page can't be converted or executed; the message names the page and the line."""


@dataclasses.dataclass(frozen=True)
class Block:
    """A piece of a page that becomes a code cell.

    Attributes:
        text: Contents of the fence, or the names in a `files` directive.
        line: Line of the page on which `text` begins, from 1.
        raw: The block as written on the page, without its outputs.
        varies: True if its output differs between machines, and is not compared.
    """

    kind: Kind
    text: str
    line: int
    raw: str
    varies: bool = False

    @property
    def file(self) -> str:
        """Name of the file that the block writes; empty if it writes none."""
        named = _NAMED.match(self.text) if self.kind == "file" else None
        return named[1] if named else ""


@dataclasses.dataclass(frozen=True)
class Page:
    """A page in its order: prose as text, code as blocks; recorded outputs are left out.

    Attributes:
        path: The file that it was read from.
    """

    path: Path
    parts: tuple[str | Block, ...]

    @property
    def blocks(self) -> list[Block]:
        """The page's code, in order."""
        return [part for part in self.parts if isinstance(part, Block)]

    def with_outputs(self, outputs: Sequence[str]) -> str:
        """Return the page's text with an output after each block; "" for a block that shows nothing."""
        remaining = iter(outputs)
        return "".join(part.raw + next(remaining) if isinstance(part, Block) else part for part in self.parts)


def find_pages(root: Path) -> list[Path]:
    """Return the tutorials of a repository, by name."""
    return sorted((root / FOLDER).glob("*.md"))


def read_page(path: Path) -> Page:
    """Read a page and cut it.

    Raises:
        TutorialError: A console block has a line that is not a command.
    """
    return cut(path.read_text("utf-8"), path)


def cut(text: str, path: Path) -> Page:
    """Cut a page's text into prose and blocks.

    Raises:
        TutorialError: A console block has a line that is not a command.
    """
    parts: list[str | Block] = []
    position = 0

    def end_prose(end: int) -> None:
        if text[position:end]:
            parts.append(text[position:end])

    while match := _next(text, position):
        if match.re is _OUTPUT:
            end_prose(match.start())
        else:
            kind = _kind(match)
            if kind is None:
                # Shown and not run: part of the prose.
                parts.append(text[position : match.end()])
            else:
                end_prose(match.start())
                group = 1 if kind == "files" else 2
                varies = text[: match.start()].endswith(_VARIES)
                line = text.count("\n", 0, match.start(group)) + 1
                block = Block(kind, match[group], line, match[0], varies)
                if kind == "console":
                    commands(block, path)
                parts.append(block)
        position = match.end()
    end_prose(len(text))
    return Page(path, tuple(_joined(parts)))


def _next(text: str, position: int) -> re.Match[str] | None:
    found = [match for pattern in (_FENCE, _OUTPUT, _FILES) if (match := pattern.search(text, position))]
    return min(found, key=lambda match: match.start(), default=None)


def _kind(match: re.Match[str]) -> Kind | None:
    if match.re is _FILES:
        return "files"
    if match[1] == "python":
        return "file" if _NAMED.match(match[2]) else "python"
    return "console" if match[1] == "console" else None


def _joined(parts: Sequence[str | Block]) -> list[str | Block]:
    """Join prose that only an omitted output or a block without a cell divided."""
    joined: list[str | Block] = []
    for part in parts:
        if joined and isinstance(part, str) and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return joined


def commands(block: Block, path: Path) -> list[str]:
    """Return the commands of a console block, each on one line.

    Raises:
        TutorialError: A line is neither a command after `$ ` nor the continuation of one.
    """
    found: list[str] = []
    for number, line in enumerate(block.text.splitlines(), start=block.line):
        if found and found[-1].endswith("\\"):
            found[-1] = found[-1].removesuffix("\\") + line.strip()
        elif line.startswith("$ "):
            found.append(line.removeprefix("$ "))
        else:
            raise TutorialError(
                f"{path}:{number}: {line!r} is not a command; commands begin with '$ ', and outputs are recorded "
                f"after the block"
            )
    return found


def read_substitutions(text: str) -> list[tuple[str, str]]:
    """Return the (whole form, shortened form) pairs that a page declares."""
    return [(match[1], match[2]) for match in _SHORTENED.finditer(text)]


def shortening(text: str) -> Callable[[str], str]:
    """Return the function that cuts a block's text to the shortened form that a page declares; without a declaration it
    changes nothing.

    >>> cut = shortening("<!-- shortened: num_steps=300 -> num_steps=6 -->")
    >>> cut("fit(num_steps=300, warmup_num_steps=300)")
    'fit(num_steps=6, warmup_num_steps=300)'
    """
    pairs = [(_whole_words(old), new) for old, new in read_substitutions(text)]

    def shorten(block: str) -> str:
        for pattern, new in pairs:
            block = pattern.sub(lambda _, new=new: new, block)
        return block

    return shorten


def unused_substitutions(page: Page, text: str) -> list[str]:
    """Return the declared substitutions that occur in no block of a page."""
    return [
        old
        for old, _ in read_substitutions(text)
        if not any(_whole_words(old).search(block.text) for block in page.blocks)
    ]


def _whole_words(text: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(text)}(?!\w)")
