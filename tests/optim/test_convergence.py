"""The convergence sweep (benchmarks/convergence) looks for the best rate, resumes, and trains with the rates that it names."""

import math
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from optimized import axes_of, parameters

from panax.optim import AdamW, Muon, Schedule, Soap

BENCHMARK = Path(__file__).parents[2] / "benchmarks/convergence"


@pytest.fixture(scope="module", autouse=True)
def on_path():
    sys.path.insert(0, str(BENCHMARK))
    yield
    sys.path.remove(str(BENCHMARK))


def record(cell, steps):
    import design

    curve = ((0, 6.0), (100, design.TARGET)) if steps is not None else ((0, 6.0), (100, 5.0))
    return design.Record(cell, steps, 100, curve, "reached", design.made_by(cell.optimizer, cell.batch))


def swept(optimizer, batch, steps_of):
    """Records of a group, each cell trained by `steps_of`."""
    import design

    records = []
    while (cell := design.next_cell(optimizer, batch, records)) is not None:
        records.append(record(cell, steps_of(cell)))
        assert len(records) < 100
    return records


def test_the_grid_moves_until_the_best_rate_is_inside():
    import design

    records = swept("AdamW", 1, lambda cell: 100 + abs(cell.power - 4) + 10 * cell.warmup + cell.seed)
    grid = {each.cell.power for each in records}
    assert grid == set(range(-2, 6))
    assert len(records) == len(grid) * len(design.WARMUPS) + len(design.SEEDS) - 1
    [group] = design.groups_of(records)
    assert group.complete and not group.at_edge
    assert {each.cell.point for each in group.best.values()} == {(4, min(design.WARMUPS))}
    assert set(group.steps) == set(design.SEEDS)


def test_a_grid_that_never_ends_is_reported():
    import design

    records = swept("Lars", 8, lambda cell: 1000 - cell.power)
    assert len({each.cell.power for each in records}) == design.RATES + design.MOVES
    [group] = design.groups_of(records)
    assert group.at_edge and group.complete


def test_differences_are_paired_by_seed():
    import design

    plain = swept("AdamW", 1, lambda cell: 100 * (1 + cell.seed) + abs(cell.power))
    other = swept("Muon", 1, lambda cell: 100 * (1 + cell.seed) - 20 + abs(cell.power))
    one, two = design.groups_of([*plain, *other])
    # The same for each seed, however different the seeds are.
    assert design.paired_difference(two, one) == pytest.approx((-0.1, 0.0))


def test_a_sweep_that_was_killed_resumes(tmp_path):
    import design

    path = tmp_path / "cells.jsonl"
    cells = [design.Cell("AdamW", 1, power, 0.01, 0) for power in (0, 1)]
    for cell in cells:
        design.append_record(path, record(cell, 50.0))
    path.write_text(path.read_text()[:-30])
    assert [each.cell for each in design.read_records(path)] == cells[:1]
    diverged = design.Record(cells[1], None, 3, ((0, 6.0), (3, math.inf)), "diverged", design.made_by("AdamW", 1))
    design.append_record(path, diverged)
    assert design.read_records(path)[1] == diverged


def test_cells_of_another_design_are_refused(tmp_path, monkeypatch):
    import design

    path = tmp_path / "cells.jsonl"
    design.append_record(path, record(design.Cell("AdamW", 1, 0, 0.01, 0), 50.0))
    monkeypatch.setattr(design, "TARGET", 3.0)
    with pytest.raises(SystemExit, match="another design"):
        design.read_records(path)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [AdamW(b2=0.98), Muon(), Soap()], ids=lambda each: type(each).__name__)
def test_a_rate_in_the_state_is_that_of_a_schedule(optimizer):
    import dataclasses

    import training

    params = parameters(0)
    gradients = [parameters(seed) for seed in (1, 2, 3)]
    schedule = Schedule(peak=3e-3, warmup_steps=2, decay="constant")

    def after(optimizer, **given):
        transformation = optimizer.build(axes_of(params), 10)
        state = transformation.init(params) | given
        actual = params
        update, renewal = jax.jit(transformation.update), transformation.renewal
        for number, gradient in enumerate(gradients, start=1):
            changes, state = update(gradient, state, actual)
            actual = jax.tree.map(np.add, actual, changes)
            if renewal is not None and renewal.due(number):
                state = renewal.renew(state, params)
        return actual

    wanted = after(dataclasses.replace(optimizer, schedule=schedule))
    actual = after(training.Rated(inner=optimizer), rate=np.float32(3e-3), warmup=np.float32(2))
    for name in wanted:
        np.testing.assert_allclose(actual[name], wanted[name], rtol=1e-6, atol=1e-7 * float(np.abs(wanted[name]).max()))


def test_the_page_has_a_row_for_each_group(tmp_path):
    import shown

    records = [
        *swept("AdamW", 1, lambda cell: 100 + cell.seed + abs(cell.power)),
        *swept("Muon", 1, lambda cell: None),
    ]
    table = shown.markdown(records, {("AdamW", 1): 10.0})
    # 101 updates on average, of 10 ms each.
    assert "| AdamW | 1 | 0.002 | 50 | 101 | 13 k | 1.0 |" in table
    assert "| Muon | 1 |" in table and "3 of 3 seeds" not in table and "0 of 3 seeds reach it" in table
    shown.write_page(records, {}, tmp_path / "page.html")
    assert "<svg" in (tmp_path / "page.html").read_text()
