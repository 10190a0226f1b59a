"""Whole rows follow fractional shares to less than a row, whatever the weights do."""

import random

import pytest

from panax.data.mixtures.apportion import UNITS_PER_ROW, apportion, apportion_shares

BATCHES = 60


def weights_of(kind: str, draw: random.Random, parts: int) -> list[list[float]]:
    """The weights of each batch, and of those that are looked ahead to."""
    if kind == "constant":
        return [[draw.random() + 1e-9 for _ in range(parts)]] * (8 * BATCHES)
    if kind == "tiny":
        return [[draw.choice([1e-5, 1e-3, 0.01, 1.0]) for _ in range(parts)]] * (8 * BATCHES)
    results = []
    for batch in range(8 * BATCHES):
        if kind == "changing" or batch % 7 == 0:
            results.append([draw.choice([0.0, 0.0, draw.random(), 5 * draw.random()]) for _ in range(parts)])
            results[-1][0] = results[-1][0] or 1.0
        else:
            results.append(results[-1])
    return results


@pytest.mark.parametrize("kind", ["constant", "tiny", "changing", "jumping"])
def test_no_part_is_a_row_off_its_schedule_after_any_batch(kind):
    for seed in range(20):
        draw = random.Random(f"{kind}{seed}")
        parts, size = draw.randint(2, 7), draw.choice([1, 2, 3, 8, 24])
        schedule = [apportion_shares(weights, size) for weights in weights_of(kind, draw, parts)]
        owed, dealt, due = [0] * parts, [0] * parts, [0] * parts
        for batch in range(BATCHES):
            rows = apportion(owed, lambda ahead, at=batch, of=schedule: of[min(at + ahead, len(of) - 1)], size)
            assert sum(rows) == size and min(rows) >= 0
            dealt = [a + b for a, b in zip(dealt, rows, strict=True)]
            due = [a + b for a, b in zip(due, schedule[batch], strict=True)]
            owed = [d - g * UNITS_PER_ROW for d, g in zip(due, dealt, strict=True)]
            assert max(map(abs, owed)) < UNITS_PER_ROW, (seed, batch)


def test_shares_are_exact():
    for seed in range(200):
        draw = random.Random(seed)
        weights = [draw.choice([0.0, 1e-9, draw.random(), 1e6]) for _ in range(5)] + [1.0]
        size = draw.randint(1, 4096)
        found = apportion_shares(weights, size)
        assert sum(found) == size * UNITS_PER_ROW and min(found) >= 0
        for share, weight in zip(found, weights, strict=True):
            assert abs(share - size * UNITS_PER_ROW * weight / sum(weights)) <= len(weights) + share * 2**-50


@pytest.mark.parametrize(
    "owed", [[5 * UNITS_PER_ROW, -5 * UNITS_PER_ROW], [-(UNITS_PER_ROW * 7) // 2, (UNITS_PER_ROW * 7) // 2]]
)
def test_a_debt_from_other_weights_is_paid_and_not_more_than_a_batch(owed):
    for _ in range(6):
        share = apportion_shares([1.0, 1.0], 2)
        rows = apportion(owed, lambda ahead, share=share: share, 2)
        assert sum(rows) == 2 and min(rows) >= 0
        owed = [a + b - n * UNITS_PER_ROW for a, b, n in zip(owed, share, rows, strict=True)]
    assert max(map(abs, owed)) < UNITS_PER_ROW
