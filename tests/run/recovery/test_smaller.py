"""The layouts of a run on fewer devices, and batches filled up with rows that count nothing."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny
from tiny_recipe import tiny as recipe

from panax import fit
from panax.core.errors import CheckpointError, DataError, LayoutError
from panax.data import IterableSource
from panax.data.loading.example_source import ExampleSource
from panax.data.loading.examples import Arrays
from panax.data.loading.pad_rows import pad_batches, round_up
from panax.mesh import MeshShape, Placement, Rules
from panax.mesh.legality import MeshRequirements
from panax.mesh.rules import MESH_AXES
from panax.models import DecoderTask
from panax.run.feed import prefetch_to_device
from panax.run.recovery.fallback_layouts import fallback_layouts, rank_layouts
from panax.train import CompiledStep, Program, StepConfig

ROWS = MeshRequirements(batch=(("tokens", ("batch", "seq"), (32, 8)),))


def shown(mesh) -> dict[str, int]:
    return {axis: size for axis, size in mesh.items() if size > 1}


def mesh(**sizes: int) -> dict[str, int]:
    return {**dict.fromkeys(MESH_AXES, 1), **sizes}


def best(needs: MeshRequirements, whole: dict[str, int], devices: int, micro_batches: int = 1, may_pad: bool = True):
    [first, *_] = fallback_layouts(needs, Rules(), whole, micro_batches, devices, may_pad=may_pad)
    return shown(first.mesh), first.micro_batches, first.pad_rows


def test_copies_go_before_shards_and_shards_before_the_axes_of_the_model():
    assert best(ROWS, mesh(replica=2, fsdp=4), 4) == ({"fsdp": 4}, 2, False)
    assert best(ROWS, mesh(fsdp=4, tensor=2), 4) == ({"fsdp": 2, "tensor": 2}, 2, False)
    assert best(ROWS, mesh(fsdp=2, stage=4), 4) == ({"stage": 4}, 2, False)


def test_an_axis_that_can_not_be_kept_is_made_smaller():
    heads = dataclasses.replace(ROWS, arrays=(("w_q", ("embed", "heads"), (32, 6)),))
    assert best(heads, mesh(tensor=2, fsdp=2), 3) == ({"tensor": 3}, 2, False)


def test_no_device_holds_more_rows_at_one_time_than_before():
    for devices in range(1, 8):
        for layout in fallback_layouts(ROWS, Rules(), mesh(fsdp=8), 1, devices, may_pad=True):
            parts = layout.mesh["replica"] * layout.mesh["fsdp"]
            filled_up = round_up(32, parts * layout.micro_batches)
            assert filled_up // (parts * layout.micro_batches) <= 4
            assert layout.pad_rows == bool(32 % (parts * layout.micro_batches))


def test_without_a_mask_only_layouts_that_divide():
    assert fallback_layouts(ROWS, Rules(), mesh(fsdp=4), 1, 3, may_pad=False) == []
    assert best(ROWS, mesh(fsdp=4), 3) == ({"fsdp": 3}, 2, True)


def test_rows_that_are_held_by_a_process():
    examples = {"x": np.arange(10.0), "y": np.arange(10)}
    full = pad_batches(ExampleSource(Arrays(examples), batch_size=5), 4)
    assert full.batch_size == 8
    [batch, _] = next(iter(full.batches()))
    assert batch["loss_mask"].tolist() == [1, 1, 1, 1, 1, 0, 0, 0] and batch["x"].shape == (8,)
    for rows in ([0, 1, 2, 3], [4, 5], [6, 7]):
        [part, _] = next(iter(full.batches_of(np.array(rows))))
        for name, leaf in part.items():
            np.testing.assert_array_equal(leaf, batch[name][rows], err_msg=f"{name} of {rows}")


def test_a_batch_without_a_mask_can_not_be_filled_up():
    source = pad_batches(IterableSource([{"x": np.zeros((3, 2))}]), 2)
    with pytest.raises(DataError, match=r"the leaves \['x'\].*'loss_mask'.*step.pad_rows"):
        next(iter(source.batches()))
    even = pad_batches(IterableSource([{"x": np.zeros((4, 2))}]), 2)
    assert next(iter(even.batches())).batch["x"].shape == (4, 2)


def test_a_layout_whose_state_does_not_fit_is_left_out():
    """The tests' decoder has 3 layers of 32: 50 k parameters with two moments each."""
    program = Program.create(tiny.task(), tiny.ADAMW, num_steps=2, config=StepConfig())
    placement = Placement.create(MeshShape(replica=2, fsdp=4), devices=jax.devices()[:8])
    step, batch = CompiledStep(program, placement, tiny.AXES), tiny.batch(0)

    def first(limit: int | None) -> dict[int, dict[str, int]]:
        ranking = rank_layouts(step, Rules(), batch, 4, each=2, limit=limit)
        return {count: shown(layouts[0].mesh) for count, layouts in ranking.items() if layouts}

    full = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(program.abstract.params)) * 3
    assert first(None)[2] == {"fsdp": 4} and first(None)[1] == {"fsdp": 2}
    assert first(full * 2) == first(None)
    assert first(full // 3) == {2: {"fsdp": 4}}
    assert first(full // 9) == {}


def taken(devices: int, config: StepConfig):
    """The parameters after two steps of sixteen rows."""
    task = DecoderTask(model=dataclasses.replace(tiny.CONFIG, num_layers=1))
    program = Program.create(task, tiny.ADAMW, num_steps=2, config=config)
    placement = Placement.create(MeshShape(fsdp=1, replica=devices), devices=jax.devices()[:devices])
    step = CompiledStep(program, placement, tiny.AXES)
    state = step.init(0)
    for batch, *_ in prefetch_to_device(IterableSource([tiny.batch(0), tiny.batch(1)], axes=tiny.AXES, epochs=1), step):
        state, scalars = step(state, batch)
    return jax.tree.map(np.asarray, state.params), float(scalars["loss"])


def test_rows_of_weight_zero_change_nothing_but_the_order_of_sums():
    expected, loss = taken(1, StepConfig())
    found, same = taken(3, StepConfig(micro_batches=2, pad_rows=True))
    assert same == pytest.approx(loss, rel=1e-6)
    # As layouts differ from each other; AdamW's first steps make sums near zero larger.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), found, expected)
    with pytest.raises(LayoutError, match="a batch of 16 rows is not divisible by 3 data-parallel devices"):
        taken(3, StepConfig())


@pytest.mark.slow
def test_a_run_continues_with_other_parts_of_a_batch(tmp_path):
    """As it does on fewer devices; another rate is another run."""
    experiment = dataclasses.replace(recipe(), directory=str(tmp_path), num_steps=10)
    fit(experiment, quiet=True)
    said: list[str] = []
    more = dataclasses.replace(experiment, num_steps=12, step=StepConfig(micro_batches=2, pad_rows=True))
    assert fit(more, say=said.append).step == 12
    assert "changed since that checkpoint: step.micro_batches: 1 -> 2" in said
    with pytest.raises(CheckpointError, match=r"step.clip_norm: 1.0 -> 2.0"):
        fit(dataclasses.replace(experiment, num_steps=14, step=StepConfig(clip_norm=2.0)), quiet=True)
