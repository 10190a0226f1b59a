"""Write the pages of messages from the sources.

python -m tools.messages           writes docs/messages
python -m tools.messages --check   exits with 1 if a page is not up to date
"""

import sys
from pathlib import Path

from tools import generated

from .collect import Message, collect
from .pages import CAUSES, FOLDER, pages, read_causes

ROOT = Path(__file__).resolve().parents[2]


def outdated(root: Path, messages: list[Message] | None = None) -> generated.Pages:
    """Return the pages that differ from the sources.

    Args:
        messages: The sources' messages, if they are collected already.
    """
    folder = root / FOLDER
    messages = collect(root / "src") if messages is None else messages
    return generated.compare(folder, pages(messages, read_causes(folder / CAUSES)))


if __name__ == "__main__":
    sys.exit(generated.run("tools.messages", (__doc__ or "").partition("\n")[0], outdated))
