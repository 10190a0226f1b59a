"""Write the models' pages from the declared families, the presets and recorded figures.

python -m tools.models             writes docs/families
python -m tools.models --check     exits with 1 if a page is not up to date
python -m tools.models --measure   computes memory and parity first: some minutes
python -m tools.models --parity    computes parity alone
python -m tools.models --census    reads the default settings of every causal model of transformers
"""

import os
import sys
from pathlib import Path

if {"--measure", "--parity", "--census"} & {*sys.argv}:
    os.environ["JAX_PLATFORMS"] = "cpu"

from tools import generated

from .census import measure_census
from .figures import FILE, measure_parity, measure_presets, read_figures, write_figures
from .pages import FOLDER, PARAMETERS, pages

ROOT = Path(__file__).resolve().parents[2]


def outdated(root: Path) -> generated.Pages:
    """Return the pages that differ from the declarations and the figures."""
    return generated.compare(root / FOLDER, pages(read_figures(root)))


def measure(root: Path) -> None:
    """Compute the figures of all presets and families, and record them in docs/families/figures.json."""
    figures = {"memory": measure_presets(list(PARAMETERS)), "parity": measure_parity(root), "census": measure_census()}
    write_figures(root, figures)
    print(root / FILE)


if __name__ == "__main__":
    if "--measure" in sys.argv:
        sys.argv.remove("--measure")
        measure(ROOT)
    if "--parity" in sys.argv:
        sys.argv.remove("--parity")
        write_figures(ROOT, read_figures(ROOT) | {"parity": measure_parity(ROOT)})
    if "--census" in sys.argv:
        sys.argv.remove("--census")
        write_figures(ROOT, read_figures(ROOT) | {"census": measure_census()})
    sys.exit(generated.run("tools.models", (__doc__ or "").partition("\n")[0], outdated))
