"""Runs of the tiny recipe, in folders of their own."""

import dataclasses

import pytest
import tiny_recipe

from panax import fit


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def experiment(cache, tmp_path):
    base = tiny_recipe.tiny()
    data = dataclasses.replace(base.data, cache_dir=cache)
    return dataclasses.replace(base, data=data, directory=str(tmp_path / "run"))


@pytest.fixture(scope="session")
def undisturbed(cache, tmp_path_factory):
    """The result of a whole run, and its messages."""
    base = tiny_recipe.tiny()
    lines: list[str] = []
    result = fit(
        dataclasses.replace(
            base,
            data=dataclasses.replace(base.data, cache_dir=cache),
            directory=str(tmp_path_factory.mktemp("undisturbed")),
        ),
        say=lines.append,
    )
    return result, lines
