"""One example of each family, made once for all tests of this folder."""

import importlib.util

import pytest

# The examples are made by libraries that not every environment of the tests has; their tests say so themselves.
if importlib.util.find_spec("transformers") and importlib.util.find_spec("torch"):
    from huggingface_examples import FAMILIES, OTHERS, Example, make_example
else:
    FAMILIES = OTHERS = ()


@pytest.fixture(scope="session")
def folder_of_examples(tmp_path_factory: pytest.TempPathFactory):
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="session", params=FAMILIES)
def example(request: pytest.FixtureRequest, folder_of_examples) -> "Example":
    return make_example(request.param, folder_of_examples)


@pytest.fixture(scope="session", params=[*FAMILIES, *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)])
def any_example(request: pytest.FixtureRequest, folder_of_examples) -> "Example":
    return make_example(request.param, folder_of_examples)
