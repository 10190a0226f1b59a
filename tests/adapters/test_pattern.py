"""A region of a parameter is read from its tensor as if the whole were read and cut."""

import itertools

import numpy as np
import pytest

from panax.adapters.huggingface.pattern import GroupedPattern, Pattern

SIZES = {"embed": 4, "heads": 3, "head_dim": 2}


@pytest.mark.parametrize(
    "text", ["(heads head_dim) embed", "embed (heads head_dim)", "embed (3 heads head_dim)", "head_dim embed heads"]
)
@pytest.mark.parametrize("axes", list(itertools.permutations(SIZES)))
def test_regions_of_what_was_written(text: str, axes: tuple[str, ...]) -> None:
    pattern, rng = Pattern(text), np.random.default_rng(0)
    shape = [SIZES[axis] for axis in axes]
    parts = [rng.random(shape) for _ in range(3 if "3" in text else 1)]
    tensor = np.full(pattern.shape(SIZES), np.nan)
    for part, array in enumerate(parts):
        pattern.write(tensor, axes, SIZES, array, part)
    assert not np.isnan(tensor).any()
    for _ in range(20):
        ranges = [tuple(sorted(rng.choice(size + 1, 2, replace=False).tolist())) for size in shape]
        for part, array in enumerate(parts):
            read = pattern.read(tensor, axes, SIZES, ranges, part)
            assert np.array_equal(read, array[tuple(slice(*r) for r in ranges)])


def test_parts_of_unequal_size() -> None:
    pattern, sizes = Pattern("(heads+kv_heads+kv_heads head_dim) embed"), {**SIZES, "kv_heads": 1}
    axes = [("embed", name, "head_dim") for name in ("heads", "kv_heads", "kv_heads")]
    parts = [np.random.default_rng(0).random([sizes[axis] for axis in each]) for each in axes]
    tensor = np.full(pattern.shape(sizes), np.nan)
    for part, array in enumerate(parts):
        pattern.write(tensor, axes[part], sizes, array, part)
    rows = [array.transpose(1, 2, 0).reshape(-1, sizes["embed"]) for array in parts]
    assert np.array_equal(tensor, np.concatenate(rows))
    for part, array in enumerate(parts):
        heads = array.shape[1]
        read = pattern.read(tensor, axes[part], sizes, ((1, 3), (heads - 1, heads), (0, 2)), part)
        assert np.array_equal(read, array[1:3, heads - 1 :])


@pytest.mark.parametrize("text", ["(k: k n|k n|h p|h p) embed", "(k: h|h) embed"])
def test_rows_that_alternate_by_group(text: str) -> None:
    """The tensor is what `transformers` takes apart: for each key head, all rows of each part that belong to it."""
    pattern, rng, sizes = GroupedPattern(text), np.random.default_rng(0), {"k": 3, "n": 2, "h": 6, "p": 5, "embed": 4}
    inner = [part.split() for part in text.partition(": ")[2].partition(")")[0].split("|")]
    axes = [("embed", *names) for names in inner]
    parts = [rng.random([sizes[axis] for axis in each]) for each in axes]
    tensor = np.full(pattern.shape(sizes), np.nan)
    for part, array in enumerate(parts):
        pattern.write(tensor, axes[part], sizes, array, part)
    by_group = [np.moveaxis(array, 0, -1).reshape(3, -1, 4) for array in parts]
    assert np.array_equal(tensor, np.concatenate(by_group, axis=1).reshape(-1, 4))
    for _ in range(20):
        for part, array in enumerate(parts):
            ranges = [tuple(sorted(rng.choice(size + 1, 2, replace=False).tolist())) for size in array.shape]
            read = pattern.read(tensor, axes[part], sizes, ranges, part)
            assert np.array_equal(read, array[tuple(slice(*r) for r in ranges)])


def test_reads_no_more_than_the_region_needs() -> None:
    class Recorded:
        def __getitem__(self, index):
            self.index = index
            return np.zeros((4, 24))[index]

    tensor = Recorded()
    Pattern("embed (4 heads head_dim)").read(tensor, tuple(SIZES), SIZES, ((1, 3), (1, 2), (0, 1)), 2)
    assert tensor.index == (slice(1, 3), slice(14, 15))
