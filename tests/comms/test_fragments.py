"""Parameters that agree in fragments: as written out, in which bytes, compressed, and resumed between a fragment's two steps."""

import itertools
import math

import jax
import numpy as np
import pytest
from comms.test_local_steps import AXES, CONFIG, batch, host

from panax.comms import Comms
from panax.comms.fragments import OuterSync, assign_fragments, outer_sync_after
from panax.core import pair_axes
from panax.core.errors import RecipeError
from panax.mesh import MeshShape, Placement
from panax.models import DecoderTask
from panax.optim import Schedule, Sgd
from panax.plan.walk.walk import walk_agreement
from panax.train import CompiledStep, Program, StepConfig

SGD = Sgd(schedule=Schedule(peak=0.1, decay="constant"))
STEPS = 7


def compiled(mesh, comms: Comms | None = None) -> CompiledStep:
    config = StepConfig(clip_norm=None)
    program = Program.create(DecoderTask(model=CONFIG), SGD, num_steps=STEPS, config=config, comms=comms)
    devices = jax.devices()[: math.prod(mesh.values())]
    return CompiledStep(program, Placement.create(MeshShape(**{"fsdp": 1, **mesh}), devices=devices), AXES)


def trained(step: CompiledStep, steps: int = STEPS):
    state = step.init(0)
    for number in range(steps):
        state, _ = jax.block_until_ready(step(state, step.put(batch(number))))
    return state


def named(step: CompiledStep):
    found = pair_axes(step.program.abstract.params, step.program.axes.params)
    return {name: (leaf.shape, axes) for name, leaf, axes in found}


@pytest.mark.parametrize(
    "comms",
    [Comms(local_steps=4, fragments=2), Comms(local_steps=3, fragments=2, overlap_steps=1, mixing=0.25)],
    ids=["fragments", "overlapped"],
)
def test_fragments_agree_as_is_written_out(comms):
    step = compiled({"replica": 2}, comms)
    trained_state = trained(step)
    alone = compiled({})
    states = [alone.init(0), alone.init(0)]
    agreed = host(states[0].params)
    first = dict(agreed)
    momentum = {name: np.zeros_like(w) for name, w in agreed.items()}
    fragments = assign_fragments(named(step), step.placement, 2)
    for number in range(1, STEPS + 1):
        rows = batch(number - 1)
        for replica in range(2):
            replica_rows = {name: leaf[4 * replica : 4 * replica + 4] for name, leaf in rows.items()}
            states[replica], _ = alone(states[replica], alone.put(replica_rows))
        replica_rows = [{name: w.copy() for name, w in host(one.params).items()} for one in states]
        turns = [(fragment + 1) * comms.local_steps // 2 for fragment in range(2)]
        back = number - comms.overlap_steps
        sends = [f for f in range(2) if number == STEPS or (number - turns[f]) % comms.local_steps == 0]
        takes = [f for f in range(2) if back > 0 and (back - turns[f]) % comms.local_steps == 0]
        for fragment in sends:
            for name, piece in fragments[fragment].items():
                at = slice(None) if piece is None else piece
                outer = np.mean([agreed[name][at] - each[name][at] for each in replica_rows], axis=0)
                momentum[name][at] = 0.9 * momentum[name][at] + outer
                agreed[name] = agreed[name].copy()
                agreed[name][at] -= 0.7 * (outer + 0.9 * momentum[name][at])
        for fragment in [0, 1] if number == STEPS else takes:
            keeps = comms.mixing if comms.overlap_steps and number < STEPS else 0.0
            for name, piece in fragments[fragment].items():
                at = slice(None) if piece is None else piece
                for each in replica_rows:
                    each[name][at] = keeps * each[name][at] + (1 - keeps) * agreed[name][at]
        tree = jax.tree.structure(states[0].params)
        for replica in range(2):
            leaves = [jax.numpy.array(w) for w in replica_rows[replica].values()]
            states[replica] = states[replica].with_params(tree.unflatten(leaves))
    for name, w in host(trained_state.params).items():
        moved = np.linalg.norm(agreed[name] - first[name])
        assert moved > 0 and np.linalg.norm(w - agreed[name]) <= 1e-3 * moved, name
    for name, both in host(trained_state.replicas.params).items():
        np.testing.assert_array_equal(both, np.stack([host(trained_state.params)[name]] * 2), err_msg=name)


def test_layouts_inside_a_replica_change_nothing():
    comms = Comms(local_steps=4, fragments=2, compress="int8")
    meshes = ({"replica": 2}, {"replica": 2, "fsdp": 2, "tensor": 2})
    one, other = (host(trained(compiled(mesh, comms), 5).params) for mesh in meshes)
    for name, w in one.items():
        assert np.linalg.norm(w - other[name]) <= 1e-4 * np.linalg.norm(w), name


@pytest.mark.parametrize("wire", ["", "int4"])
def test_each_fragment_sends_its_share(wire):
    whole = walk_agreement(compiled({"replica": 2, "fsdp": 2}, Comms(local_steps=4, compress=wire)))
    step = compiled({"replica": 2, "fsdp": 2}, Comms(local_steps=4, fragments=2, compress=wire))
    each = [walk_agreement(step, OuterSync((part,), (part,))) for part in range(2)]
    sent = [sum(one.wire_bytes for one in cost.traffic) for cost in (whole, *each)]
    assert sent[1] + sent[2] == pytest.approx(sent[0], rel=0.02)
    # What is in no stack, two large tables, a small one and a norm, does not halve.
    assert max(sent[1:]) <= 0.55 * sent[0]


def test_fragments_are_layers_in_turn_and_arrays_by_size():
    step = compiled({"replica": 2}, Comms(local_steps=4))
    parts = assign_fragments(named(step), step.placement, 2)
    stacked = {name for name in named(step) if name.startswith("stacks")}
    for part, pieces in enumerate(parts):
        assert {name for name, piece in pieces.items() if piece is not None} == stacked
        assert all(piece == slice(part, None, 2) for piece in pieces.values() if piece is not None)
    others = [{name for name, piece in pieces.items() if piece is None} for pieces in parts]
    assert others[0] | others[1] == named(step).keys() - stacked and not others[0] & others[1]
    # Three don't divide two layers: whole arrays then.
    thirds = assign_fragments(named(step), step.placement, 3)
    assert all(piece is None for pieces in thirds for piece in pieces.values())
    assert sorted(name for pieces in thirds for name in pieces) == sorted(named(step))


def test_every_fragment_has_its_turn_once():
    comms = Comms(local_steps=10, fragments=4, overlap_steps=2)
    syncs = {number: outer_sync_after(number, 1000, comms) for number in range(1, 41)}
    for part in range(4):
        sends = [number for number, one in syncs.items() if one and part in one.sent_fragments]
        takes = [number for number, one in syncs.items() if one and part in one.received_fragments]
        assert [b - a for a, b in itertools.pairwise(sends)] == [10] * (len(sends) - 1)
        assert takes == [number + 2 for number in sends if number + 2 <= 40]
    assert outer_sync_after(1000, 1000, comms) == OuterSync((0, 1, 2, 3), (0, 1, 2, 3), is_full=True)


def test_a_run_that_resumes_between_sending_and_taking_continues_bitwise(tmp_path):
    comms = Comms(local_steps=3, overlap_steps=2, compress="int4")
    step = compiled({"replica": 2}, comms)
    uninterrupted = host(trained(step, 6))
    # What was agreed on after the third step is taken over after the fifth.
    state = trained(step, 4)
    again = jax.device_put(state, step.shardings)
    for number in (4, 5):
        again, _ = jax.block_until_ready(step(again, step.put(batch(number))))
    for name, w in host(again).items():
        np.testing.assert_array_equal(w, uninterrupted[name], err_msg=name)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"local_steps": 2, "fragments": 3}, "expected 1 to 2 fragments"),
        ({"fragments": 2}, "expected 1 to 1 fragments"),
        ({"local_steps": 4, "overlap_steps": 4}, "0 to 3 steps"),
        ({"local_steps": 4, "overlap_steps": 1, "mixing": 1.0}, "less than 1"),
        ({"local_steps": 4, "mixing": 0.1}, "no effect with overlap_steps=0"),
    ],
)
def test_wrong_settings_are_refused(settings, told):
    with pytest.raises(RecipeError, match=told):
        Comms(**settings)
