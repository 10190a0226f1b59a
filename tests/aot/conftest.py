"""Programs for hardware that is not there, compiled by the compilers that the extra `aot` installs."""

import pytest

from panax.plan.step import disable_compilation_cache


@pytest.fixture(autouse=True)
def nothing_in_the_compilation_cache():
    """Programs for absent devices can be written there, and not read back."""
    with disable_compilation_cache():
        yield
