"""Axes that models register: their default rules, their traits, and refusals."""

import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

from panax.core import (
    DivisibilityPolicy,
    Evaluation,
    LayoutError,
    LogicalAxis,
    Loss,
    Module,
    Task,
    logical_axes,
    normal,
    parameter,
)
from panax.core.params.logical import LOGICAL_AXES, MESH_AXES, Role, axis_for_role, batch_row_axes, register_axes
from panax.mesh import COMPUTE, STORAGE, Rules, assign
from panax.mesh.legality import MeshRequirements, find_problem, fit_rules
from panax.spmd import contract, contract_gathered, local_sequence, sum_over_sequence
from panax.spmd.step_gather import step_gather_dtype
from panax.testing import check_task

SLOTS = LogicalAxis("test_slots", "slots of a memory", compute=("tensor",), parallel=True)
TWINS = LogicalAxis("test_twins", "replicated", compute=("tensor",), undivided=DivisibilityPolicy.REPLICATED)
RANK = LogicalAxis("test_rank", "a rank", storage=("fsdp", "expert"), undivided=DivisibilityPolicy.FEWER)
BREADTH = LogicalAxis("test_breadth", "a width", storage=("fsdp", "stage"), undivided=DivisibilityPolicy.OFF_STAGES)
PARTS = LogicalAxis("test_parts", "elective", storage=("fsdp", "expert"), undivided=DivisibilityPolicy.ELECTIVE)
CHOICES = LogicalAxis("test_choices", "what is chosen of", in_float32=True)
ALONE = LogicalAxis("test_alone", "of one axis", compute=("context", "tensor"), single="its kernel takes one")

register_axes(SLOTS, TWINS, RANK, BREADTH, PARTS, CHOICES, ALONE)


def mesh(**sizes):
    return dict.fromkeys(MESH_AXES, 1) | sizes


def test_every_role_is_taken():
    assert {role: axis_for_role(role) for role in Role}.keys() == set(Role)
    assert batch_row_axes({"x": np.zeros((2, 3))}) == {"x": (axis_for_role(Role.ROWS), None)}


def test_the_default_rules_have_what_is_registered():
    assert COMPUTE["test_slots"] == STORAGE["test_slots"] == ("tensor",)
    assert "test_rank" not in COMPUTE and Rules().storage["test_rank"] == ("fsdp", "expert")
    assert "test_choices" in LOGICAL_AXES and "test_choices" not in {**COMPUTE, **STORAGE}
    with pytest.raises(TypeError):
        COMPUTE["test_slots"] = ()


def fitted(axis, size, **sizes):
    needs = MeshRequirements(arrays=(("w", (axis.name,), (size,)),), splits_residual=True)
    assert find_problem(needs, Rules(), mesh(**sizes)) is None
    rules = fit_rules(Rules(), needs, mesh(**sizes))
    return assign((axis.name,), (size,), rules.storage, mesh(**sizes))[0]


def test_what_becomes_of_a_dimension_that_does_not_divide():
    assert fitted(TWINS, 4, tensor=4) == ("tensor",) and fitted(TWINS, 6, tensor=4) == ()
    assert fitted(RANK, 8, fsdp=4, expert=2) == ("fsdp", "expert") and fitted(RANK, 4, fsdp=4, expert=2) == ("fsdp",)
    assert fitted(BREADTH, 8, fsdp=4, stage=2) == ("fsdp", "stage") and fitted(BREADTH, 4, fsdp=4, stage=2) == ("fsdp",)
    assert fitted(PARTS, 6, fsdp=4, expert=2) == ("expert",)
    refused = find_problem(MeshRequirements(arrays=(("w", ("test_slots",), (6,)),)), Rules(), mesh(tensor=4))
    assert refused == "w: test_slots=6 is not divisible by tensor=4; use tensor in {1, 2, 3, 6} or another test_slots"


def test_a_parallel_axis_is_split_as_the_residual_stream_is():
    needs = MeshRequirements(arrays=(("w", ("test_slots",), (8,)),), splits_residual=True)
    unsharded_rules = Rules(compute={**COMPUTE, "test_slots": ()})
    assert "test_slots is split over (), and residual over ('tensor',) beyond seq" in find_problem(
        needs, unsharded_rules, mesh(tensor=2)
    )
    elsewhere = {"test_slots": ("fsdp",)}
    rules = Rules(compute={**COMPUTE, **elsewhere}, storage={**STORAGE, **elsewhere})
    assert "test_slots is split over fsdp=2, and residual -> ('context', 'tensor') is not" in find_problem(
        needs, rules, mesh(fsdp=2)
    )


def test_an_axis_may_be_for_one_mesh_axis():
    needs = MeshRequirements(arrays=(("w", ("test_alone",), (8,)),), splits_residual=True)
    found = find_problem(needs, Rules(), mesh(context=2, tensor=2))
    assert found == "rules.compute: test_alone is split over context=2·tensor=2; its kernel takes one"


def test_what_chooses_is_gathered_in_float32():
    assert step_gather_dtype(("embed", "test_choices"), jnp.bfloat16) == jnp.float32
    assert step_gather_dtype(("embed", "test_slots"), jnp.bfloat16) == jnp.bfloat16


@pytest.mark.parametrize(
    "make, says",
    [
        (
            lambda: LogicalAxis("test_a", "", compute=("tensr",)),
            "'test_a' -> 'tensr' is not a mesh axis; did you mean 'tensor'",
        ),
        (
            lambda: LogicalAxis("test_a", "", compute=("tensor",), storage=("fsdp", "tensor")),
            r"'test_a' is stored over \('fsdp', 'tensor'\), and computed over \('tensor',\); the storage axes must begin",
        ),
        (lambda: LogicalAxis("test a", ""), "'test a' can't name a logical axis"),
        (
            lambda: LogicalAxis("test_slots", "slots of a memory", compute=("tensor",), in_float32=True),
            r"'test_slots' \(slots of a memory\) is registered already, with another parallel, another in_float32; choose",
        ),
        (
            lambda: LogicalAxis("test_lines", "lines", role=Role.ROWS),
            "'test_lines' has the role ROWS, which 'batch' has already; call that dimension 'batch'",
        ),
    ],
)
def test_what_is_refused(make, says):
    before = dict(LOGICAL_AXES)
    with pytest.raises(LayoutError, match=says):
        register_axes(make())
    assert dict(LOGICAL_AXES) == before
    register_axes(SLOTS)


def test_the_tables_are_there_whichever_room_comes_first():
    for module in ("panax.core.params.logical", "panax.mesh.rules", "panax.spmd.weights"):
        code = f"import {module}; from panax.core.params.logical import COMPUTE; assert COMPUTE['batch']"
        subprocess.run([sys.executable, "-c", code], check=True)


class Memory(Module):
    w_in: Float[Array, "embed test_slots"] = parameter(normal("embed"))
    w_out: Float[Array, "test_slots embed"] = parameter(normal("test_slots"))


class Recall(Task):
    """A layer with a custom axis for its width."""

    mesh_axes = frozenset({"replica", "fsdp", "tensor"})
    names_axes = True

    def init(self, key):
        return Memory.create(key, {"embed": 8, "test_slots": 16}), {}

    def parameter_axes(self, params):
        return logical_axes(params)

    def loss(self, params, state, batch, key, train):
        x, tokens = local_sequence(batch["x"]), jnp.float32(batch["x"].shape[0] * batch["x"].shape[1])
        (hidden,) = contract_gathered(x, ("batch seq embed, embed test_slots -> batch seq test_slots", params.w_in))
        y = contract("batch seq test_slots, test_slots embed -> batch seq embed", jnp.tanh(hidden), params.w_out)
        return Evaluation({"squares": Loss(sum_over_sequence(jnp.square(y - x).sum()), tokens)}, state, {})


def test_a_model_with_its_own_axis_trains_as_on_one_device():
    x = {"x": np.random.default_rng(0).standard_normal((8, 4, 8), dtype=np.float32)}
    layouts = [{"fsdp": 2, "tensor": 2}, {"replica": 2, "tensor": 4}]
    report = check_task(Recall(), x, axes={"x": ("batch", "seq", None)}, layouts=layouts)
    assert report.compared == ("fsdp=2 · tensor=2", "replica=2 · tensor=4")
