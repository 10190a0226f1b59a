"""The largest micro-batch that fits: the search against all sizes, the answer's arithmetic, and a real step's memory."""

import dataclasses

import jax
import pytest
import tiny_recipe

import panax
from panax.cli.main import main
from panax.core.errors import LayoutError, RecipeError
from panax.mesh import MeshShape
from panax.run.tools import batch_search
from panax.run.tools.batch_search import find_largest, format_batch_result, usable_bytes
from panax.train import StepConfig


def test_the_search_finds_what_trying_all_would():
    sizes = [*range(1, 17), *(m << e for e in range(1, 14) for m in range(9, 17))]
    for most in [*range(70), 100, 1000, 5000]:
        for first in (1, 3, 16, 700):
            asked = []
            found = find_largest(lambda rows, most=most, asked=asked: not asked.append(rows) and rows <= most, first)
            assert found == max((size for size in sizes if size <= most), default=0), (most, first)
            assert len(asked) == len(set(asked)) <= 20
    assert find_largest(lambda rows: True, 1) == batch_search.MAX_ROWS


@pytest.fixture
def measured(monkeypatch):
    """Steps that take 100 MiB, and 10 for each row of a device."""
    asked = []

    def played(found, batch, rows, ways, batch_size):
        asked.append(rows)
        return (100 + 10 * rows) * 2**20

    monkeypatch.setattr(batch_search, "step_memory_bytes", played)
    return asked


def test_the_answer_keeps_the_recipes_batch(experiment, measured):
    data = dataclasses.replace(experiment.data, batch_size=96)
    wide = dataclasses.replace(experiment, data=data, mesh=MeshShape(fsdp=8))
    # 0.9 of 300 MiB holds 17 rows, of which 16 are tried; 96 rows over 8 devices are 12 on each.
    suggestion = panax.find_batch(wide, memory_gib=300 / 1024)
    assert (suggestion.rows, suggestion.ways, suggestion.largest_batch, suggestion.micro_batches, suggestion.even) == (
        16,
        8,
        128,
        1,
        True,
    )
    # 8 rows don't divide 12: 6 do.
    suggestion = panax.find_batch(wide, memory_gib=200 / 1024)
    assert (suggestion.rows, suggestion.micro_batches) == (8, 2) and measured[-5:] == [8, 16, 12, 10, 9]
    assert format_batch_result(suggestion)[-1] == "set            --step.micro-batches 2, for the recipe's 96 rows"
    # From the power of 2 below the recipe's 12 rows on: 8 fit, 16 don't, then between them.
    assert [each.rows for each in suggestion.trials] == [8, 9, 10, 12, 16]


def test_rows_that_divide_by_no_parts_are_filled_up(experiment, measured):
    data = dataclasses.replace(experiment.data, batch_size=30)
    odd = dataclasses.replace(experiment, data=data, mesh=MeshShape(fsdp=8), step=StepConfig(pad_rows=True))
    found = panax.find_batch(odd, memory_gib=150 / 1024)
    assert (found.rows, found.micro_batches, found.even) == (3, 2, False)
    assert "--step.micro-batches 2 --step.pad-rows" in format_batch_result(found)[-1]


def test_what_does_not_fit_at_all_explains_what_to_do(experiment, measured):
    with pytest.raises(LayoutError, match=r"one row on each device takes .* shard over more devices"):
        panax.find_batch(experiment, memory_gib=0.1)


@pytest.mark.parametrize("memory", [0.0, -1.0, float("nan"), float("inf")])
def test_memory_that_is_none_is_refused(memory):
    with pytest.raises(RecipeError, match="expected the memory of a device in GiB, above 0"):
        panax.find_batch(tiny_recipe.tiny(), memory_gib=memory)


def test_the_command_refuses(capsys):
    assert main(["find", "batch", "quickstart", "--target", "h100x8", "--memory-gib", "3"]) == 2
    assert "--memory-gib has no effect with --target" in capsys.readouterr().err
    assert main(["find", "batch", "quickstart", "--debug"]) == 2
    assert "remove debug" in capsys.readouterr().err


def test_devices_of_the_host_share_what_it_may_use(monkeypatch):
    monkeypatch.setattr(batch_search, "host_bytes", lambda: 1048576000)
    assert usable_bytes(jax.devices()) == 1048576000 // 8


@pytest.mark.slow
def test_a_real_step_fits_by_its_own_memory(experiment):
    sharded = dataclasses.replace(experiment, mesh=MeshShape(fsdp=4))
    found = panax.find_batch(sharded, memory_gib=0.007, devices=jax.devices()[:4])
    fitting = {each.rows for each in found.trials if each.total_bytes <= found.memory_bytes}
    assert max(fitting) == found.rows and len(found.trials) > len(fitting) > 1
    sizes = [each.total_bytes for each in found.trials]
    assert sizes == sorted(sizes) and found.total_bytes <= found.memory_bytes
