"""Steps checked on other devices: a corrupted one is found, the device is named, and the run ends as an undisturbed one."""

import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollback_run import Points, experiment
from sick import FLIPS, LineWithState, Sick, changed, lowest_bit, sign
from test_rollback import Killed, assert_same, peak, rollbacks_of, rows, steps_of  # noqa: F401

import panax
from panax.checkpoint import CheckpointConfig, Checkpointer
from panax.core import LayoutError, RecipeError, TrainingError
from panax.mesh import MeshShape, Placement
from panax.metrics.report.incidents import list_incidents
from panax.metrics.report.run_files import read_run
from panax.optim import AdamW
from panax.run import VerifyConfig
from panax.run.recovery.verification import compare_replays, replay_offsets
from panax.train import CompiledStep, Program, StepConfig
from panax.train.sdc_check import RolledReplay, ShardSums, leaf_names

LEAVES = (
    "params.w",
    "params.b",
    "model_state.mean",
    "optimizer_state.mean.w",
    "square.b",
    "averaged.w",
    "scalars.loss",
)


def fit(folder, *, devices=8, every=3, most=3, **settings):
    config = VerifyConfig(every=every, max_rollbacks=most)
    values = {"task": LineWithState(), "verify": config, "mesh": MeshShape(fsdp=-1), "every": 2, "steps": 8} | settings
    run = {"say": values.pop("say")} if "say" in values else {"quiet": True}
    return panax.fit(experiment(folder, **values), devices=jax.devices()[:devices], **run)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The state of a run of which no step is checked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("panax.run.reporting.report.measure_peak", lambda prepared: panax.metrics.Peak(1e9, "a test"))
        return fit(tmp_path_factory.mktemp("undisturbed"), every=0).state


def executions(sizes):
    """Three executions of a step of the line, and its state and batch."""
    program = Program.create(LineWithState(), AdamW(), num_steps=9, config=StepConfig(ema_decay=0.9))
    step = CompiledStep(program, Placement.create(MeshShape(**sizes)), Points().axes)
    sums = ShardSums(step.placement.devices)
    batch = next(iter(Points().batches())).batch
    return [RolledReplay(step, places, sums) for places in (0, 1, 2)], step.init(0), step.put(batch)


def found_in(taken, leaf, device, flip, state, batch, monkeypatch, errs):
    """The verdict on three executions, of which some are corrupted."""
    with monkeypatch.context() as patch:
        Sick(device, leaf, flip, lambda number, before: before in errs).patch(patch)
        sums = [each.replay_step(state, batch)[2] for each in taken]
    return compare_replays(sums, [0, 1, 2])


@pytest.mark.parametrize(
    ("sizes", "every"),
    [
        ({"fsdp": 8}, 61),
        pytest.param({"fsdp": 8}, 1, marks=pytest.mark.slow),
        pytest.param({"replica": 2, "fsdp": 4}, 1, marks=pytest.mark.slow),
        pytest.param({"fsdp": 4, "expert": 2}, 1, marks=pytest.mark.slow),
    ],
    ids=["some", "fsdp", "hsdp", "expert"],
)
def test_each_corruption_is_found_and_its_device_named(sizes, every, monkeypatch):
    checked_step, state, batch = executions(sizes)
    clean = compare_replays([each.replay_step(state, batch)[2] for each in checked_step], [0, 1, 2])
    assert clean.shards == clean.leaves == clean.odd_devices == ()
    names = leaf_names(*checked_step[0].replay_step(state, batch)[:2])
    cases = itertools.product(range(8), LEAVES, FLIPS, ({0}, {1}, {0, 1, 2}))
    # 63 cases for each device; of every 61st there is at least one for each.
    for device, leaf, flip, errs in itertools.islice(cases, 0, None, every):
        result = found_in(checked_step, leaf, device, flip, state, batch, monkeypatch, errs)
        # The number of the device on this mesh is its place.
        assert result.odd_devices == (device,) and result.is_conclusive, (leaf, device, flip, errs, result)
        assert all(leaf in names[i] for i in result.leaves) and len(result.shards) == len(errs)


def test_a_fault_that_spread_over_all_shards_names_no_device():
    good, bad = np.zeros((4, 2, 2), np.uint32), np.ones((4, 2, 2), np.uint32)
    assert compare_replays([good, bad, good], [0, 1, 2]).odd_devices == (0, 1, 2, 3)
    assert not compare_replays([good, bad, bad + 1], [0, 1, 2]).is_conclusive
    # With two devices, both are suspects.
    assert compare_replays([good[:2], np.stack([good[0], bad[0]])], [0, 1]).odd_devices == (0, 1)
    assert replay_offsets(["a", "a", "b", "b"], [0, 0, 1, 1]) == [2, 1] and replay_offsets(["a"] * 4, [0, 0, 1, 1]) == [
        2,
        1,
    ]


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint4", "bfloat16", "float16", "float8_e4m3fn", "float32", "complex64", "int32"]
)
def test_every_bit_of_every_dtype_counts_and_moves(dtype):
    placement = Placement.create(MeshShape(fsdp=4, tensor=2))
    sharding = placement.sharding("fsdp", "tensor")
    values = jnp.asarray(np.arange(32).reshape(8, 4) % 2, dtype)
    array = jax.device_put(values, sharding)
    sums = ShardSums(placement.devices)
    clean = sums([array])
    assert len({tuple(row) for row in clean[:, 0].tolist()}) == 1, "equal shards have equal checksums"
    bits = 1 if dtype == "bool" else 4 if dtype == "uint4" else 8
    seen = {tuple(clean[5, 0])}
    for byte in range(4 * values.dtype.itemsize):
        for bit in range(bits):

            def flip(found, byte=byte, bit=bit):
                found.reshape(-1).view(np.uint8)[byte] ^= 1 << bit

            other = sums([changed({"x": array}, "x", 5, flip)["x"]])
            assert (np.flatnonzero((other != clean).any((1, 2))) == [5]).all() and (other[5] != clean[5]).all()
            seen.add(tuple(other[5, 0]))
    assert len(seen) == 1 + 4 * values.dtype.itemsize * bits, "no two changes have the same checksums"


def test_what_cancels_in_plain_sums_is_found():
    placement = Placement.create(MeshShape(fsdp=8))
    sums = ShardSums(placement.devices)

    def of(values):
        return sums([jax.device_put(np.tile(values, 8), placement.sharding("fsdp"))])

    values = np.arange(64, dtype=np.float32)
    clean, swapped, flipped, zeros = of(values), values.copy(), values.copy(), np.zeros(64, np.float32)
    swapped[[3, 40]] = values[[40, 3]]
    sign(flipped[:1]), sign(flipped[7:8])
    other = zeros.copy()
    sign(other[:1]), sign(other[7:8])
    assert (of(swapped) != clean).all() and (of(flipped) != clean).all() and (of(other) != of(zeros)).all()
    nan, payload = (np.array([bits] * 64, np.uint32).view(np.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert (of(nan) != of(payload)).all()


def test_a_corrupted_step_is_taken_back(tmp_path, monkeypatch, undisturbed):
    sick, lines = Sick(5, "square.w", sign, lambda number, before: number == 6 and before == 1), []
    sick.patch(monkeypatch)
    result = fit(tmp_path, say=lines.append)
    assert len(sick.seen) == 1
    assert_same(result.state, undisturbed)
    (rollback,) = rollbacks_of(tmp_path)
    # Step 3 was the last one that was found good; the checkpoint of step 4 is not trusted.
    assert (rollback["step"], rollback["to"], rollback["batches"]) == (6, 2, [])
    # The two newest, and the two newest up to the last good step.
    assert steps_of(tmp_path) == [4, 6, 8]
    assert "device 5 of process 0 on " in rollback["why"] and "square.w" in rollback["why"]
    assert any("returns to step 2" in line and line.endswith("rollback 1 of at most 3") for line in lines), lines
    assert any("MiB more on each device than a usual step" in line for line in lines)
    (mishap,) = list_incidents(read_run(tmp_path))
    assert (mishap.cause, mishap.step, mishap.lost_steps) == ("silent corruption", 6, 4)
    assert [line["step"] for line in rows(tmp_path) if "verify/seconds" in line] == [1, 3, 6, 3, 6]


@pytest.mark.parametrize(
    ("devices", "at", "execution"),
    [
        # The first check of all, with no majority among two devices.
        (2, 1, 1),
        *(
            pytest.param(devices, at, execution, marks=pytest.mark.slow)
            for devices, at, execution in itertools.product([2, 8], [1, 3, 6, 8], [0, 1])
            if (devices, at, execution) != (2, 1, 1)
        ),
    ],
)
def test_wherever_it_happens(tmp_path, monkeypatch, devices, at, execution):
    expected = fit(tmp_path / "expected", devices=devices, every=0)
    # Step 8 is the last one: as a multiple of 2 it is checked.
    every = 2 if at == 8 else 3
    Sick(1, "params.w", lowest_bit, lambda number, before: number == at and before == execution).patch(monkeypatch)
    result = fit(tmp_path / "run", devices=devices, every=every)
    (rollback,) = rollbacks_of(tmp_path / "run")
    assert (rollback["step"], rollback["to"]) == (at, {1: 0, 3: 0, 6: 2, 8: 6}[at])
    named = "device 0 of process 0" in rollback["why"], "device 1 of process 0" in rollback["why"]
    assert named == (devices == 2, True)
    assert_same(result.state, expected.state)


@pytest.mark.slow
def test_a_device_that_stays_sick_ends_the_run(tmp_path, monkeypatch):
    Sick(3, "params.w", sign, lambda number, before: number >= 5).patch(monkeypatch)
    with pytest.raises(
        TrainingError, match=r"device 3 of process 0 on .*; verify.max_rollbacks=2 rollbacks are used up"
    ):
        fit(tmp_path, most=2)
    assert [(each["step"], each["to"]) for each in rollbacks_of(tmp_path)] == [(6, 2), (6, 2)]


@pytest.mark.slow
def test_checkpoints_are_kept_until_a_later_step_is_checked(tmp_path, monkeypatch, undisturbed):
    Sick(3, "params.w", sign, lambda number, before: number == 8 and before == 0).patch(monkeypatch)
    result = fit(tmp_path, every=4, checkpoint=CheckpointConfig(every=1, keep_last=1, keep_best=0))
    assert [each["to"] for each in rollbacks_of(tmp_path)] == [4]
    assert_same(result.state, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["write_rollbacks", "remove_abandoned", "record_rollback"])
def test_killed_while_going_back(tmp_path, monkeypatch, undisturbed, where):
    def killed(*arguments, **more):
        raise Killed

    owner = {
        "write_rollbacks": panax.run.recovery.rollback,
        "remove_abandoned": Checkpointer,
        "record_rollback": panax.run.reporting.report.RunReporter,
    }[where]
    with monkeypatch.context() as patch:
        Sick(3, "params.w", sign, lambda number, before: number == 6 and before == 0).patch(patch)
        patch.setattr(owner, where, killed)
        with pytest.raises(Killed):
            fit(tmp_path)
    recorded = where != "write_rollbacks"
    lines = []
    result = fit(tmp_path, say=lines.append)
    # Nothing on record: it goes on from the newest checkpoint, as after any kill.
    assert any(f"resuming from step {2 if recorded else 4} " in line for line in lines), lines
    assert len(rollbacks_of(tmp_path)) == recorded
    assert_same(result.state, undisturbed)


@pytest.mark.slow
def test_a_resumed_run_knows_what_was_found_good(tmp_path, monkeypatch, undisturbed):
    with monkeypatch.context() as patch:
        Sick(
            3, "params.w", sign, lambda number, before: (_ for _ in ()).throw(Killed()) if number == 8 else False
        ).patch(patch)
        with pytest.raises(Killed):
            fit(tmp_path)
    Sick(3, "params.w", sign, lambda number, before: number == 7 and before == 0).patch(monkeypatch)
    # Found good: 1, 3, 6. The checkpoint of step 6 says so; that of 7, the first one here, is checked.
    assert steps_of(tmp_path) == [4, 6]
    result = fit(tmp_path)
    assert [(each["step"], each["to"]) for each in rollbacks_of(tmp_path)] == [(7, 6)]
    assert_same(result.state, undisturbed)


@pytest.mark.slow
def test_left_at_a_corrupted_step_by_its_own_loop(tmp_path, monkeypatch):
    Sick(3, "params.w", sign, lambda number, before: number == 6 and before == 0).patch(monkeypatch)
    settings = experiment(
        tmp_path, task=LineWithState(), verify=VerifyConfig(every=3), mesh=MeshShape(fsdp=-1), every=2, steps=8
    )
    with panax.open_run(settings, quiet=True) as run:
        for batch in run:
            run.after_step(run.take_step(batch))
            if run.step == 6:
                break
    assert run.result.step == 2 and steps_of(tmp_path) == [2]


@pytest.mark.slow
def test_a_step_that_is_not_deterministic_is_refused(tmp_path, monkeypatch):
    random = np.random.default_rng(0)

    def noise(values):
        values += random.normal(size=values.shape).astype(values.dtype)

    Sick(0, "params.b", noise, lambda number, before: True).patch(monkeypatch)
    Sick(1, "params.b", noise, lambda number, before: True).patch(monkeypatch)
    Sick(2, "params.b", noise, lambda number, before: True).patch(monkeypatch)
    with pytest.raises(TrainingError, match=r"step 1 can't be checked: the step is not deterministic.*params.b"):
        fit(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 8])
def test_a_step_that_depends_on_the_order_of_the_devices_is_refused(tmp_path, monkeypatch, devices):
    original = RolledReplay.replay_step

    def take(self, state, batch):
        new, scalars, sums = original(self, state, batch)
        return new, scalars, sums + np.uint32(self.places)

    monkeypatch.setattr(RolledReplay, "replay_step", take)
    with pytest.raises(TrainingError, match=r"step 1 can.t be checked: .* other bits on the devices in another order"):
        fit(tmp_path, devices=devices)


def test_what_can_not_be_checked_is_refused(tmp_path, monkeypatch):
    with pytest.raises(LayoutError, match=r"verify.every=3 repeats steps on other devices, and this run has one"):
        fit(tmp_path, devices=1)
    with pytest.raises(RecipeError, match=r"verify.every=3 .* debug runs on one"):
        fit(tmp_path, debug=True)
    with pytest.raises(RecipeError, match=r"verify.every=-1"):
        VerifyConfig(every=-1)
    monkeypatch.setattr("panax.run.recovery.verification.gather_texts", lambda text: ["A; avx", "B; avx avx512"])
    with pytest.raises(LayoutError, match=r"of different models: process 0: A .*; process 1: B"):
        fit(tmp_path)
    assert not (Path(tmp_path) / "checkpoints").exists()
