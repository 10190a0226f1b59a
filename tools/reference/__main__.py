"""Write the API reference from the sources.

python -m tools.reference           writes docs/reference
python -m tools.reference --check   exits with 1 if a page is not up to date
"""

import sys
from pathlib import Path

from tools import generated

from .collect import collect
from .pages import FOLDER, pages

ROOT = Path(__file__).resolve().parents[2]


def outdated(root: Path) -> generated.Pages:
    """Return the pages that differ from the sources."""
    return generated.compare(root / FOLDER, pages(collect(root / "src")))


if __name__ == "__main__":
    sys.exit(generated.run("tools.reference", (__doc__ or "").partition("\n")[0], outdated))
