"""One registry: a pure choice, custom kernels, names in recipes, and a chip that Panax has never heard of."""

import logging

import jax
import jax.extend.backend
import jax.numpy as jnp
import pytest
import tiny

from panax.core import RecipeError, Target
from panax.core.layout.layout import use_layout
from panax.core.layout.target import device_target
from panax.kernels import (
    AttentionCase,
    Kernel,
    Kernels,
    attention,
    choose,
    list_kernels,
    register,
    registry,
    use_kernels,
)
from panax.kernels.product import MatmulCase, product
from panax.mesh import Placement

CASE = AttentionCase(
    batch=2, query_seq=64, key_seq=64, heads=4, kv_heads=4, head_dim=64, dtype="bfloat16", causal=True, window=None,
    soft_cap=None, packed=False,
)  # fmt: skip
GPU, H100, AMD = Target("gpu"), Target("cuda", architecture="h100"), Target("rocm", architecture="mi300x")


@pytest.fixture
def own(monkeypatch):
    """Registers kernels that are gone after the test."""
    monkeypatch.setattr(registry, "_kernels", {work: list(kernels) for work, kernels in registry._kernels.items()})
    yield register
    registry._chosen.cache_clear()


def mine(**changes) -> Kernel:
    fields = {"work": "attention", "name": "mine", "run": lambda *_, **__: None, "platforms": ("gpu",), "rank": 40}
    return Kernel(**{**fields, **changes})


def test_a_kernel_that_is_registered_is_chosen_where_it_is_fastest_and_can(own):
    def limit(case, target):
        return None if target.architecture == "h100" else f"it is for the H100, not for {target}"

    assert choose("attention", CASE, H100, lacking={}).name == "cudnn"
    own(mine(limit=limit))
    assert choose("attention", CASE, H100, lacking={}).name == "mine"
    choice = choose("attention", CASE, GPU, lacking={})
    assert choice.name == "cudnn" and choice.reason == "mine can't run here: it is for the H100, not for gpu"
    assert choose("attention", CASE, Target("tpu")).name == "pallas"


def test_two_kernels_share_a_name_only_on_different_platforms(own):
    own(mine())
    with pytest.raises(
        ValueError,
        match="a kernel named 'mine' is already registered for attention; choose another name, or pass replace=True",
    ):
        own(mine(platforms=("tpu", "gpu")))
    own(mine(platforms=("fakechip",)))
    own(mine(rank=0), replace=True)
    assert choose("attention", CASE, H100, lacking={}).name == "cudnn"


def test_cudnn_is_for_one_vendor():
    found = choose("attention", CASE, AMD, lacking={})
    assert found.name == "pallas" and "it is for NVIDIA's GPUs, not for amd's" in found.reason


def test_what_timing_found_is_taken_where_it_can(own):
    own(mine(platforms=("cpu",), rank=0, limit=lambda case, target: "no windows" if case.window else None))
    cpu = Target("cpu")
    assert choose("attention", CASE, cpu).name == "blockwise"
    found = choose("attention", CASE, cpu, timed="mine")
    assert (found.name, found.reason) == ("mine", "timing found it fastest")
    windowed = AttentionCase(**{**vars(CASE), "window": 5})
    assert choose("attention", windowed, cpu, timed="mine").name == "blockwise"
    assert choose("attention", CASE, Target("tpu"), timed="mine").name == "pallas"


def test_the_choice_does_not_depend_on_how_many_devices_there_are():
    for devices in (1, 8, 4096):
        for target in (Target("cuda", devices=devices), Target("tpu", devices=devices), Target("cpu", devices=devices)):
            one = Target(target.platform)
            assert choose("attention", CASE, target, lacking={}) == choose("attention", CASE, one, lacking={})


def test_a_recipe_names_a_kernel():
    q = jnp.zeros((1, 8, 2, 8))
    with use_kernels({"attention": "reference"}) as lines:
        attention(q, q, q, target=Target("cpu"))
    assert list(lines) == ["attention on cpu runs 'reference': it is named"]
    with use_kernels({"attention": "cudnn"}), pytest.raises(RecipeError, match="it is for GPUs, and the target is cpu"):
        attention(q, q, q, target=Target("cpu"))
    with use_kernels({}) as lines:
        attention(q, q, q, target=Target("cpu"))
    assert "attention on cpu runs 'blockwise': the fastest on cpu" in lines
    with pytest.raises(ValueError, match="no kernels are registered for 'atention'; did you mean 'attention'"):
        choose("atention", CASE, GPU)


def test_a_recipe_names_a_kernel_for_products_and_it_does_those_that_it_can(own, monkeypatch):
    def halved(a, b, transposed):
        a, b = (x.T if turned else x for x, turned in zip((a, b), transposed))
        return 0.5 * (a @ b)

    own(mine(work="matmul", run=halved, platforms=(), limit=lambda case, target: None if case.large else "small"))
    assert Kernels(matmul="mine").names["wall"] == "auto" and Kernels(matmul="c").names["wall"] == "c"
    x, w = jnp.ones((4, 3)), jnp.ones((3, 5))
    with use_kernels(Kernels(matmul="mine").names) as lines:
        assert product("ab,bc->ac", x, w, jnp.float32)[0, 0] == 3.0
        assert not lines
        monkeypatch.setattr("panax.kernels.product.MIN_PRODUCTS", 1)
        assert product("ab,bc->ac", x, w, jnp.float32)[0, 0] == 1.5
        assert product("ab,cb->ac", x, w.T, jnp.float32)[0, 0] == 1.5
    assert lines == {"matmul on cpu runs 'mine': it is named": "matmul"}
    with use_kernels({"matmul": "c"}), pytest.raises(RecipeError, match="it is for CPUs, and the target is"):
        choose("matmul", MatmulCase(dtype="float32", large=True, local=True), GPU, yields=True)


def test_naming_a_kernel_for_products_that_a_step_has_not_is_an_error():
    with pytest.raises(RecipeError, match=r"kernels.matmul='c' has no effect: the step runs no matmul that it can do"):
        Kernels(matmul="c").check_effect({"attention"})
    Kernels(matmul="c", row_sums="xla").check_effect({"matmul", "row sums"})


class Fake:
    """Description of a PJRT plug-in's devices."""

    platform = "fakechip"
    device_kind = "Fake F1"


class Elsewhere(Placement):
    @property
    def target(self) -> Target:
        return device_target(Fake())


@pytest.fixture
def fakechip():
    """A plug-in's platform, known to JAX by its name; there is no such device, so programs are only lowered for it."""
    jax.extend.backend.register_backend_factory(Fake.platform, lambda: None, priority=-100, fail_quietly=True)
    return device_target(Fake())


def test_a_chip_of_an_unknown_plug_in_gets_portable_kernels(fakechip, caplog):
    with caplog.at_level(logging.WARNING, "panax.kernels"):
        for work in registry._kernels:
            assert all(not kernel.platforms for kernel in list_kernels(work, fakechip)), work
        assert choose("attention", CASE, fakechip) == (
            next(k for k in list_kernels("attention") if k.name == "blockwise"),
            "the fastest on fakechip",
        )
    assert not caplog.records


@pytest.mark.parametrize("task", [tiny.task(), tiny.task(compute_dtype="bfloat16")], ids=["float32", "bfloat16"])
def test_a_step_is_lowered_for_a_chip_of_an_unknown_plug_in(fakechip, task, monkeypatch):
    monkeypatch.setattr("panax.kernels.product.MIN_PRODUCTS", 1)
    params, state = jax.eval_shape(task.init, jax.random.key(0))
    rows = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    batch = {"tokens": rows, "targets": rows, "loss_mask": jax.ShapeDtypeStruct((2, 16), jnp.float32)}
    batch["row"] = jax.ShapeDtypeStruct((2,), jnp.int32)

    def loss(params, batch):
        evaluation = task.loss(params, state, batch, jax.random.key(0), True)
        return sum(term.sum for term in evaluation.losses.values())

    with use_layout(Elsewhere.create(devices=jax.devices()[:1])):
        lowered = jax.jit(jax.grad(loss)).trace(params, batch).lower(lowering_platforms=("fakechip",))
    assert "custom_call" not in lowered.as_text()
