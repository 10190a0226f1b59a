"""Islands: as replicas of one mesh where nobody is lost; and one that is lost, late, or of another run."""

import dataclasses
import threading

import jax
import numpy as np
import pytest
from safetensors.numpy import save
from tiny_recipe import tiny

import panax
from panax.checkpoint import CheckpointConfig, open_checkpoint
from panax.comms import Comms, Islands
from panax.comms.admission import compute_digest, parse_update
from panax.core.errors import CheckpointError, HookError, PanaxError, RecipeError
from panax.hooks import Hook
from panax.mesh import MeshShape
from panax.optim import AdamW, Schedule
from panax.run import EvaluateConfig
from panax.train import StepConfig

STEPS, LOCAL, COUNT = 8, 2, 2


def experiment(folder, index=0, count=COUNT, *, hooks=(), **comms):
    place = str(folder / "outer_sync")
    settings = {"wait_seconds": 60.0, "start_seconds": 300.0} | {
        k: comms.pop(k) for k in ("wait_seconds",) if k in comms
    }
    islands = Islands(count=count, index=index, store=place, **settings) if count > 1 else Islands()
    return dataclasses.replace(
        tiny(),
        directory=str(folder / f"island_{index}"),
        num_steps=STEPS,
        optimizer=AdamW(schedule=Schedule(peak=1e-3, warmup_steps=2)),
        mesh=MeshShape(fsdp=2),
        comms=Comms(local_steps=LOCAL, islands=islands, **comms),
        checkpoint=CheckpointConfig(every=1, keep_last=20),
        evaluate=EvaluateConfig(every=0),
        hooks=hooks,
    )


def trained(*experiments):
    """Each in a thread of its own, on devices of its own; the result and messages of each."""
    result, said = [None] * len(experiments), [[] for _ in experiments]

    def run(number, one):
        devices = jax.devices()[2 * number : 2 * number + 2]
        try:
            result[number] = panax.fit(one, devices=devices, say=said[number].append)
        except BaseException as error:
            result[number] = error

    threads = [threading.Thread(target=run, args=each) for each in enumerate(experiments)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in result:
        if isinstance(each, BaseException) and not isinstance(each, PanaxError):
            raise each
    return result, said


def params_of(folder, index, step):
    checkpoint = open_checkpoint(str(folder / f"island_{index}" / "checkpoints" / f"step_{step:08d}"))
    names = [name for name in checkpoint.manifest.arrays if name.startswith("params.")]
    return {name: checkpoint.read(name) for name in names}


class Lost(Exception):
    """An island that dies."""


class Dies(Hook):
    """Raises after a step."""

    def __init__(self, step):
        self.at = step

    def after_step(self, run):
        if run.step == self.at:
            raise Lost


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    return folder, *trained(*(experiment(folder, index) for index in range(COUNT)))


def test_islands_train_like_replicas_of_one_mesh(undisturbed, tmp_path):
    folder, results, _ = undisturbed
    one_mesh = dataclasses.replace(experiment(tmp_path, count=1), mesh=MeshShape(replica=2, fsdp=2))
    panax.fit(one_mesh, devices=jax.devices()[:4], quiet=True)
    together = params_of(tmp_path, 0, STEPS)
    first, second = (params_of(folder, index, STEPS) for index in range(COUNT))
    for name, value in together.items():
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)
        np.testing.assert_allclose(first[name], value, atol=2e-6 * np.abs(value).max() + 1e-7, err_msg=name)
    assert all(result.step == STEPS for result in results)


def test_they_agree_bit_by_bit_and_print_nothing_without_faults(undisturbed):
    folder, _, said = undisturbed
    for number in range(1, STEPS // LOCAL + 1):
        first, second = (params_of(folder, index, number * LOCAL) for index in range(COUNT))
        assert all((first[name] == second[name]).all() for name in first)
        apart = (params_of(folder, index, number * LOCAL - 1) for index in range(COUNT))
        assert any((one != other).any() for one, other in zip(*(each.values() for each in apart)))
    assert any(line.startswith("comms          island 1 of 2: they meet after every 2 steps") for line in said[1])
    assert not any("was not in round" in line for line in said[0] + said[1])
    # Older rounds than those that somebody may still need are gone.
    assert sorted(each.name for each in (folder / "outer_sync").glob("round_*")) == [
        "round_00000002",
        "round_00000003",
        "round_00000004",
    ]


@pytest.mark.slow
def test_one_that_dies_stops_no_other_and_joins_again(undisturbed, tmp_path):
    (uninterrupted, lost), said = trained(
        experiment(tmp_path, 0, wait_seconds=2.0), experiment(tmp_path, 1, wait_seconds=2.0, hooks=(Dies(3),))
    )
    assert isinstance(lost, HookError) and uninterrupted.step == STEPS
    [line] = [line for line in said[0] if "was not in" in line]
    assert line.startswith("island 1 was not in round 2, after step 4; the others waited 2")
    # Once is enough: those that were away are not waited for.
    # It comes too late to train, and ends with what was agreed.
    (again,), (told,) = trained(experiment(tmp_path, 1, wait_seconds=2.0))
    assert any(
        "island 1 is at step 3, the others have met 4 times" in line and "joins them at step 8" in line for line in told
    )
    assert again.step == STEPS
    first, second = (params_of(tmp_path, index, STEPS) for index in range(COUNT))
    assert all((first[name] == second[name]).all() for name in first)
    alone = params_of(undisturbed[0], 0, STEPS)
    assert any((alone[name] != first[name]).any() for name in first)


@pytest.mark.slow
def test_one_that_comes_back_in_time_trains_with_the_others(tmp_path):
    class Waits(Hook):
        """Until the other one has come back, so that there is a round for it."""

        def after_step(self, run):
            if run.step == 5:
                joins = tmp_path / "outer_sync" / "joining" / "island_1.json"
                for _ in range(300):
                    if joins.exists():
                        return
                    threading.Event().wait(0.1)
                raise AssertionError("island 1 did not come back")

    # Long enough to compile a step.
    dies = experiment(tmp_path, 1, wait_seconds=20.0, hooks=(Dies(3),))
    back = experiment(tmp_path, 1, wait_seconds=20.0)
    patient = experiment(tmp_path, 0, wait_seconds=20.0, hooks=(Waits(),))
    told: list[str] = []

    def lives_twice():
        with pytest.raises(HookError):
            panax.fit(dies, devices=jax.devices()[2:4], quiet=True)
        place = tmp_path / "outer_sync" / "round_00000002" / "members.json"
        while not place.exists():
            threading.Event().wait(0.1)
        ends.append(panax.fit(back, devices=jax.devices()[2:4], say=told.append))

    ends: list = []
    thread = threading.Thread(target=lives_twice)
    thread.start()
    (stayed,), (said,) = trained(patient)
    thread.join()
    assert not isinstance(stayed, BaseException) and stayed.step == ends[0].step == STEPS
    assert any("the others have met 2 times" in line and "joins them at step 4" in line for line in told)
    assert any("island 1 is back in round 3" in line or "island 1 is back in round 4" in line for line in said)
    first, second = (params_of(tmp_path, index, STEPS) for index in range(COUNT))
    assert all((first[name] == second[name]).all() for name in first)


@pytest.mark.slow
def test_one_that_misses_a_single_round_says_so_and_joins_the_next(tmp_path):
    class WaitsFor(Hook):
        """Waits after a step until a file of the store exists."""

        def __init__(self, step, *parts):
            self.at, self.file = step, tmp_path.joinpath("outer_sync", *parts)

        def after_step(self, run):
            if run.step == self.at:
                for _ in range(600):
                    if self.file.exists():
                        return
                    threading.Event().wait(0.1)
                raise AssertionError(f"{self.file} did not appear")

    patient = experiment(tmp_path, 0, wait_seconds=2.0, hooks=(WaitsFor(5, "joining", "island_1.json"),))
    late = experiment(tmp_path, 1, wait_seconds=2.0, hooks=(WaitsFor(3, "round_00000002", "members.json"),))
    results, (said, told) = trained(patient, late)
    assert [result.step for result in results] == [STEPS, STEPS]
    assert any("island 1 was not in round 2" in line for line in said)
    assert any("island 1 is back in round" in line for line in said)
    assert any("island 1 came too late for round 2" in line and "joins them at step 4" in line for line in told)
    first, second = (params_of(tmp_path, index, STEPS) for index in range(COUNT))
    assert all((first[name] == second[name]).all() for name in first)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["NaN", "a header that is a list"])
def test_one_that_writes_what_can_not_be_used_is_left_out_and_taken_back(how, tmp_path):
    place, stop = tmp_path / "outer_sync", threading.Event()

    def pretends():
        """Writes what island 0 writes, but once."""
        for number in range(1, STEPS // LOCAL + 1):
            update_file = place / f"round_{number:08d}" / "from_0.safetensors"
            while not update_file.exists():
                if stop.wait(0.02):
                    return
            update = parse_update(update_file.read_bytes())
            arrays = {name: x * np.nan if number == 2 else x for name, x in update.arrays.items()}
            if number == 2:  # as an island does that takes over what was agreed on
                (place / "joining").mkdir(exist_ok=True)
                (place / "joining" / "island_1.json").write_text('{"round": 3}')
            data = save(arrays, metadata={"base": update.base, "index": "1", "digest": compute_digest(arrays)})
            if number == 2 and how != "NaN":
                data = (3).to_bytes(8, "little") + b"[1]"
            update_file.with_name("part").write_bytes(data)
            update_file.with_name("part").rename(update_file.with_name("from_1.safetensors"))

    partner = threading.Thread(target=pretends)
    partner.start()
    try:
        (result,), (said,) = trained(experiment(tmp_path, 0))
    finally:
        stop.set()
        partner.join()
    assert result.step == STEPS
    told = [line for line in said if "is dropped from round" in line]
    assert [line.partition(":")[0] for line in told] == ["island 1 is dropped from round 2, after step 4"]
    assert any(line.startswith("island 1 is back in round 3") for line in said)
    assert all(np.isfinite(x).all() for x in params_of(tmp_path, 0, STEPS).values())


@pytest.mark.parametrize("wire", ["int8", "int4", "bfloat16", "float8"])
def test_what_travels_compressed_is_small_and_the_same_for_all(wire, tmp_path):
    from panax.comms.outer import MIN_QUANTIZED_SIZE, decode_update, encode_update
    from panax.comms.wires import WIRES

    random = np.random.default_rng(0)
    moved = {
        "w": random.standard_normal((70, 100)).astype(np.float32),
        "bias": random.standard_normal(9).astype(np.float32),
    }
    sent = encode_update(moved, WIRES[wire], None)
    bytes_each = {"int8": 1 + 4 / 256, "float8": 1 + 4 / 256, "int4": 0.5 + 4 / 256, "bfloat16": 2}[wire]
    assert sum(x.nbytes for x in sent.values()) == pytest.approx(7000 * bytes_each + 36, rel=0.03)
    update = decode_update(sent, WIRES[wire], moved)
    assert (update["bias"] == moved["bias"]).all() and moved["bias"].size < MIN_QUANTIZED_SIZE
    error = np.abs(update["w"] - moved["w"]).max() / np.abs(moved["w"]).max()
    assert 0 < error < {"int8": 0.01, "float8": 0.07, "int4": 0.15, "bfloat16": 0.004}[wire]
    with pytest.raises((KeyError, ValueError)):
        decode_update(sent, WIRES[wire], {"w": moved["w"][:60], "bias": moved["bias"]})


@pytest.mark.slow
def test_islands_that_compress_agree_too(tmp_path):
    settings = {"compress": "int8", "error_feedback": False, "rounding": "stochastic"}
    results, _ = trained(*(experiment(tmp_path, index, **settings) for index in range(COUNT)))
    assert all(result.step == STEPS for result in results)
    first, second = (params_of(tmp_path, index, STEPS) for index in range(COUNT))
    assert all((first[name] == second[name]).all() for name in first)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"local_steps": 1}, "islands synchronize after local steps; set comms.local_steps"),
        ({"local_steps": 4, "fragments": 2}, "islands agree on all parameters at once"),
        ({"local_steps": 4, "compress": "int8"}, "set comms.error_feedback=False"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(RecipeError, match=message):
        Comms(islands=Islands(count=2, index=0, store="x"), **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"count": 2}, "islands need a common store"),
        ({"count": 2, "index": 2, "store": "x"}, "an index from 0 to one less"),
        ({"store": "x"}, "comms.islands.store='x' has no effect with one island"),
        ({"count": 2, "store": "x", "wait_seconds": 0.0}, "expected more than 0"),
    ],
)
def test_islands_without_sense_are_refused(settings, message):
    with pytest.raises(RecipeError, match=message):
        Islands(**settings)


def test_the_place_of_another_run_and_an_old_start_are_refused(undisturbed, tmp_path):
    folder, *_ = undisturbed
    place = str(folder / "outer_sync")
    there = Islands(count=COUNT, index=0, store=place)
    other = dataclasses.replace(experiment(tmp_path), seed=1, comms=Comms(local_steps=LOCAL, islands=there))
    with pytest.raises(CheckpointError, match="is used by another run's islands"):
        panax.fit(other, devices=jax.devices()[:2], quiet=True)
    fresh = dataclasses.replace(experiment(tmp_path / "fresh"), comms=Comms(local_steps=LOCAL, islands=there))
    with pytest.raises(CheckpointError, match="holds 4 rounds of an earlier start of this run"):
        panax.fit(fresh, devices=jax.devices()[:2], quiet=True, fresh=True)
    # A checkpoint that has met others oftener than its place knows of.
    (folder / "outer_sync").rename(folder / "elsewhere")
    moved = dataclasses.replace(experiment(folder), num_steps=STEPS + 1)
    with pytest.raises(CheckpointError, match=r"has been in 4 rounds, and .* records only 0"):
        panax.fit(moved, devices=jax.devices()[:2], quiet=True, accept_changes=True)


def test_what_islands_can_not_do_is_refused(tmp_path):
    averaged = dataclasses.replace(experiment(tmp_path), step=StepConfig(ema_decay=0.9))
    with pytest.raises(RecipeError, match=r"each island would average its parameters separately"):
        panax.fit(averaged, devices=jax.devices()[:2], quiet=True)
