"""Sums in the backward pass: the gradients of sums at the end, at the declared places, in as many bytes."""

import math

import jax
import numpy as np
import pytest

from panax.comms import Comms
from panax.core import named_leaves
from panax.core.errors import RecipeError
from panax.mesh import MeshShape, Placement, Rules
from panax.models import DecoderConfig, DecoderTask
from panax.optim import Schedule, Sgd
from panax.plan import walk_step
from panax.train import CompiledStep, Program, StepConfig

CONFIG = DecoderConfig(vocab_size=128, max_length=32, embed=64, num_layers=2, heads=4, ffn=128)
AXES = dict.fromkeys(("tokens", "targets", "loss_mask"), ("batch", "seq"))
SGD = Sgd(schedule=Schedule(peak=0.1, decay="constant"))


def batch(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, CONFIG.vocab_size, (16, 33)).astype(np.int32)
    mask = (rng.random((16, 32)) < np.linspace(0.3, 1, 16)[:, None]).astype(np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "loss_mask": mask}


def compiled(mesh, comms=None, rules=None, task=None, **config) -> CompiledStep:
    program = Program.create(
        task or DecoderTask(model=CONFIG, remat="full"),
        SGD,
        num_steps=10,
        config=StepConfig(clip_norm=None, **config),
        comms=comms,
    )
    devices = jax.devices()[: math.prod(mesh.values())]
    return CompiledStep(program, Placement.create(MeshShape(**{"fsdp": 1, **mesh}), rules, devices), AXES)


def host(tree) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in named_leaves(tree).items() if name != "key"}


def trained(step: CompiledStep, steps: int = 2):
    state, losses = step.init(0), []
    for number in range(steps):
        state, scalars = jax.block_until_ready(step(state, step.put(batch(number))))
        losses.append(float(scalars["loss"]))
    return host(state), losses


def same(found, expected):
    (state, losses), (usual, usual_losses) = found, expected
    assert losses == pytest.approx(usual_losses, rel=1e-6)
    assert state.keys() == usual.keys()
    for name, w in usual.items():
        np.testing.assert_allclose(state[name], w, rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.fixture(scope="module")
def at_end():
    return trained(compiled({"replica": 2, "fsdp": 2}, micro_batches=2))


@pytest.mark.parametrize("sums", ["in_backward", "each_micro_batch"])
def test_sums_are_those_at_the_end(at_end, sums):
    same(trained(compiled({"replica": 2, "fsdp": 2}, Comms(sums=sums), micro_batches=2)), at_end)


@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        ({"replica": 2, "tensor": 2, "fsdp": 2}, {}),
        ({"replica": 2, "context": 2}, {}),
        ({"replica": 2, "fsdp": 2}, {"rules": Rules(zero="2")}),
        ({"replica": 2}, {"micro_batches": 1}),
    ],
    ids=["tensor", "context", "zero 2", "one micro-batch, no fsdp"],
)
def test_on_every_layout_and_with_one_micro_batch(mesh, more):
    more = {"micro_batches": 2, **more}
    same(trained(compiled(mesh, Comms(sums="in_backward"), **more)), trained(compiled(mesh, **more)))


def test_layers_are_summed_in_the_backward_pass_and_the_rest_once():
    def sent(**comms):
        step = compiled({"replica": 2, "fsdp": 2}, Comms(**comms), micro_batches=4)
        cost = walk_step(step, batch(0))
        collectives: dict[str, int] = {}
        for one in cost.traffic:
            if "replica" in one.axes and one.purpose.startswith("gradients"):
                collectives[one.purpose] = collectives.get(one.purpose, 0) + one.wire_bytes
        return collectives

    usual = sent()["gradients once a step"]
    early = sent(sums="in_backward")
    layers = early["gradients in the backward pass"]
    # What sums send is the same, and what is left to the end are the table, the head and their norm.
    assert layers + early["gradients once a step"] == usual
    assert early["gradients once a step"] < usual / 4
    each = sent(sums="each_micro_batch")
    assert each["gradients in the backward pass"] == 4 * layers
    assert each["gradients once a step"] == early["gradients once a step"]


@pytest.mark.parametrize("wire", ["int8", "sign"])
def test_nothing_is_lost_of_compressed_sums(wire):
    mesh = {"replica": 2, "fsdp": 2}
    exact, _ = trained(compiled(mesh, micro_batches=2), steps=1)
    collectives, _ = trained(compiled(mesh, Comms(compress=wire, sums="in_backward"), micro_batches=2), steps=1)
    owed = {name.removeprefix("owed."): x for name, x in collectives.items() if name.startswith("owed.")}
    assert any("stacks" in name for name in owed)
    for name, left in owed.items():
        assert left.any(), name
        # The step that was taken, and the one that what is owed would have added to it.
        stepped = collectives[f"params.{name}"] - 0.1 * left.sum(0)
        np.testing.assert_allclose(stepped, exact[f"params.{name}"], rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_skipped_step_leaves_what_is_owed():
    step = compiled({"replica": 2}, Comms(compress="int4", sums="in_backward"))
    state, _ = step(step.init(0), step.put(batch(0)))
    before = host(state)
    state, scalars = step(state, step.put({**batch(1), "loss_mask": np.full((16, 32), 3e38, np.float32)}))
    after = host(state)
    assert int(scalars["skipped"]) == 1
    for name in before:
        if name.startswith(("owed.", "params.")):
            np.testing.assert_array_equal(after[name], before[name], err_msg=name)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"delayed": True}, "with delayed=True: no gradients are reduced in this batch's backward pass"),
        ({"local_steps": 4}, "with local_steps=4"),
        ({"compress": "int8", "rounding": "stochastic"}, "set it to 'nearest'"),
    ],
)
def test_wrong_settings_are_refused(settings, told):
    with pytest.raises(RecipeError, match=told):
        Comms(sums="in_backward", **settings)
    with pytest.raises(RecipeError, match="rounding errors are carried over once per step"):
        Comms(sums="each_micro_batch", compress="int8")


@pytest.mark.parametrize(
    ("mesh", "rules", "told"),
    [
        ({"fsdp": 2}, None, "has no effect: with replica=1"),
        ({"replica": 2, "stage": 2}, None, r"set mesh\.stage=1"),
        ({"replica": 2, "fsdp": 2}, Rules(zero="1"), 'set it to "2" or "3"'),
    ],
)
def test_meshes_that_do_not_fit_are_refused(mesh, rules, told):
    with pytest.raises(RecipeError, match=told):
        compiled(mesh, Comms(sums="in_backward"), rules, micro_batches=2)
