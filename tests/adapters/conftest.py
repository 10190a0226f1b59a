"""One example of each family, made once for all tests of this folder."""

import pytest
from huggingface_examples import FAMILIES, Example, make_example


@pytest.fixture(scope="session")
def folder_of_examples(tmp_path_factory: pytest.TempPathFactory):
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="session", params=FAMILIES)
def example(request: pytest.FixtureRequest, folder_of_examples) -> Example:
    return make_example(request.param, folder_of_examples)
