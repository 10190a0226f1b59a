"""Write the pages of messages from the sources.

python -m tools.messages           writes docs/messages
python -m tools.messages --check   exits with 1 if a page is not up to date
"""

import sys
from pathlib import Path

from tools import generated

from .collect import collect
from .pages import CAUSES, FOLDER, pages, read_causes

ROOT = Path(__file__).resolve().parents[2]


def outdated(root: Path) -> generated.Pages:
    """Return the pages that differ from the sources."""
    folder = root / FOLDER
    return generated.compare(folder, pages(collect(root / "src"), read_causes(folder / CAUSES)))


if __name__ == "__main__":
    sys.exit(generated.run("tools.messages", (__doc__ or "").partition("\n")[0], outdated))
