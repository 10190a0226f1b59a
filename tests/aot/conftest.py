"""Programs for hardware that is not there, compiled by the compilers that the extra `aot` installs."""

import pytest

from panax.plan.step import nothing_kept


@pytest.fixture(autouse=True)
def nothing_in_the_compilation_cache():
    """Programs for absent devices can be written there, and not read back."""
    with nothing_kept():
        yield
