"""`panax compare`: the same work in several frameworks, side by side."""

import os
import sys
from collections.abc import Sequence

from ...system.allocator import keep_freed_memory


def compare(arguments: Sequence[str]) -> int:
    """Measure, and write a report."""
    from panax_compare.command import run

    return run(arguments)


def work_for_a_comparison() -> None:
    """Run the process of one framework's column. Panax's own columns retain freed memory, as `panax train` does."""
    if os.environ.get("PANAX_COMPARE_OWN"):
        keep_freed_memory()
    from panax_compare.measure.worker import serve

    def find_recipe(name: str):
        from ..recipes import find_recipe

        return find_recipe(name)

    serve(find_recipe)


if __name__ == "__main__":
    if sys.argv[1:] != ["--worker"]:
        sys.exit(compare(sys.argv[1:]))
    work_for_a_comparison()
