"""The house language: rules without exceptions, and counts of the rest that may only fall (`language.toml`)."""

from collections.abc import Iterator

import language
import pytest


@pytest.fixture(scope="module")
def counts() -> Iterator[dict[str, dict[str, int]]]:
    """Made when a test asks for them, since every worker imports this file; the trees are gone after these tests."""
    found = language.counts()
    assert found.keys() == language.CEILINGS.keys()
    yield found
    language.nodes.cache_clear()
    language.definitions_in_tests.cache_clear()
    language.trees.cache_clear()


@pytest.mark.parametrize("table", sorted(language.CEILINGS))
def test_no_count_is_above_its_ceiling(table, counts):
    ceilings = language.CEILINGS[table]
    above = {
        name: (count, ceilings.get(name, 0)) for name, count in counts[table].items() if count > ceilings.get(name, 0)
    }
    assert not above, "count and ceiling; `python tests/docs/language.py` prints all"


@pytest.mark.parametrize("table", sorted(language.CEILINGS))
def test_no_ceiling_is_left_high(table, counts):
    """A ceiling that has far more room than it takes would let the old words back in."""
    high = {
        name: (ceiling, counts[table].get(name, 0))
        for name, ceiling in language.CEILINGS[table].items()
        if ceiling > 1.1 * counts[table].get(name, 0) + 5
    }
    assert not high, "ceiling and count; lower the ceiling in tests/docs/language.toml"


def test_no_public_class_name_stands_for_two_classes():
    assert not {name: paths for name, paths in language.public_classes().items() if len(paths) > 1}


def test_every_exported_function_states_what_it_does():
    assert not list(language.silent_exports())


def test_an_entry_point_takes_its_settings_by_keyword():
    long = language.long_signatures()
    assert not language.ENTRY_POINTS - long.keys(), "these need no exception: remove them from tests/docs/language.toml"
    crowded = {
        name
        for name in language.ENTRY_POINTS
        if len(language.positional(long[name])) > language.MAX_POSITIONAL
        or (long[name].name.startswith("_") and long[name].name != "__init__")
    }
    assert not crowded, "private, or too many parameters by position: introduce a value with a name"


def test_a_planted_phrase_is_counted():
    counts = language.phrases(iter([language.Text("here", "What it is, unless told; whose value is none.")]))
    assert counts["what is ..."] == counts["unless told"] == counts["whose"] == counts["is no, is none"] == 1
