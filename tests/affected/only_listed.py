"""A pytest plugin: run only the tests that a file lists, by function or by parametrized case.

Unlike node ids on the command line, a listed test that no longer exists is not an error.
"""

import os
from pathlib import Path

import pytest

LIST = "PANAX_TESTS_LISTED"
"""Environment variable with the path of the list: node ids relative to `tests/`, one a line."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that are not listed; a path without `::` lists the whole file."""
    listed = set(Path(os.environ[LIST]).read_text(encoding="utf-8").splitlines())

    def is_listed(item: pytest.Item) -> bool:
        name = item.nodeid.removeprefix("tests/")
        return bool({name, name.partition("[")[0], name.partition("::")[0]} & listed)

    unlisted = [item for item in items if not is_listed(item)]
    if unlisted:
        config.hook.pytest_deselected(items=unlisted)
        items[:] = [item for item in items if is_listed(item)]
