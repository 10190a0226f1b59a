"""Pages of messages in Markdown: one per room, and an index."""

import re
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from .collect import Message

FOLDER = "docs/messages"
CAUSES = "causes.toml"
GENERATED = "Written by `python -m tools.messages`; edit the sources or `causes.toml` instead."


class Cause(NamedTuple):
    """Why a message appears and how to act on it.

    Attributes:
        message: Part of the wording, which one message alone has.
    """

    message: str
    cause: str
    cure: str


def read_causes(path: Path) -> list[Cause]:
    """Read the causes and cures that are written by hand."""
    return [Cause(**entry) for entry in tomllib.loads(path.read_text("utf-8"))["cause"]]


def matching(cause: Cause, messages: list[Message]) -> set[str]:
    """Return the anchors of the messages that a cause belongs to."""
    return {message.anchor for message in messages if cause.message in message.wording}


def pages(messages: list[Message], causes: list[Cause]) -> dict[str, str]:
    """Return the text of each page by its file name."""
    explained = {anchor: cause for cause in causes for anchor in matching(cause, messages)}
    rooms: dict[str, list[Message]] = defaultdict(list)
    for message in messages:
        rooms[_room(message)].append(message)
    texts = {f"{room}.md": _page(room, own, explained) for room, own in sorted(rooms.items())}
    listed = "\n".join(
        f"| [{room}]({room}.md) | {sum(m.kind != 'warning' for m in own)} | {sum(m.kind == 'warning' for m in own)} |"
        for room, own in sorted(rooms.items())
    )
    return {
        "index.md": (
            f"# Messages\n\n{GENERATED}\n\nErrors that a user can cause, warnings and notes, by the room that reports them. In"
            f" the wordings, ‹…› stands for a value.\n\n| room | errors | warnings and notes |\n|---|---|---|\n{listed}\n"
        ),
        **texts,
    }


def _room(message: Message) -> str:
    package, _, rest = message.path.partition("/")
    room = rest.partition("/")[0].removesuffix(".py") if "/" in rest else "panax"
    return package if package != "panax" else room


def _page(room: str, messages: list[Message], explained: dict[str, Cause]) -> str:
    lines = [f"# Messages of `{room}`", "", GENERATED]
    by_file: dict[str, dict[str, list[Message]]] = defaultdict(lambda: defaultdict(list))
    for message in messages:
        by_file[message.path][message.anchor].append(message)
    for path, own in by_file.items():
        lines += ["", f"## `{path}`"]
        for anchor, same in own.items():
            first = same[0]
            where = ", ".join(dict.fromkeys(f"`{message.function}`" for message in same if message.function))
            setting = f"; setting `{first.setting}`" if first.setting else ""
            lines += ["", f'<a id="{anchor}"></a>`{first.kind}`{f" in {where}" if where else ""}{setting}', ""]
            lines.append(f"> {_escaped(first.wording)}")
            if cause := explained.get(anchor):
                lines += ["", f"**Cause:** {cause.cause}", "", f"**Cure:** {cause.cure}"]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    r"""Return text that Markdown shows as it is.

    >>> _escaped("a_b <c> `d*`")
    'a\\_b \\<c\\> \\`d\\*\\`'
    """
    return re.sub(r"([\\`*_<>\[\]|#])", r"\\\1", text)
