"""What float32 is multiplied in: as the task sets it, or refused where the target has it not."""

import dataclasses
import functools
import re

import jax
import jax.extend
import jax.numpy as jnp
import pytest
import tiny

from panax.core import Evaluation, Loss, RecipeError, Target, Task, use_layout
from panax.mesh import MeshShape, Placement
from panax.models import VIT_PRESETS, VitTask
from panax.optim import Sgd
from panax.train import CompiledStep, Program
from panax.train.precision import check_precision, describe_precision

H100, A100, V100, MI300 = (
    Target("gpu", "nvidia", "h100"), Target("cuda", architecture="a100"), Target("gpu", "nvidia", "v100"),
    Target("rocm", architecture="mi300x"),
)  # fmt: skip
TPU, CPU, UNKNOWN = Target("tpu", architecture="v5e"), Target("cpu"), Target("neuron")
EVERY = ("float32", "tf32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Product(Task):
    matmul_precision: str | None = None

    def init(self, key):
        return {"w": jnp.ones((4, 4))}, {}

    def parameter_axes(self, params):
        return {"w": ("embed", "ffn")}

    def loss(self, params, state, batch, key, train):
        return Evaluation({"sum": Loss(jnp.dot(batch["x"], params["w"]).sum(), jnp.float32(4))}, state, {})


@pytest.mark.parametrize(
    ("target", "offered"),
    [(H100, EVERY), (A100, EVERY), (V100, EVERY[:1]), (MI300, EVERY[:1]), (TPU, EVERY[::2]), (CPU, EVERY[:1]),
     (UNKNOWN, EVERY[:1])],
    ids=str,
)  # fmt: skip
def test_a_target_has_some_and_others_are_refused(target, offered):
    assert tuple(target.matmul_precisions) == offered and target.default_matmul_precision in offered
    for precision in EVERY:
        task = Product(precision)
        if precision in offered:
            check_precision(task, target)
            continue
        with pytest.raises(RecipeError, match=rf'task.matmul_precision="{precision}".*multiplies float32 in float32'):
            check_precision(task, target)


def there(target):
    """A layout of one device that is not attached."""

    class There(Placement):
        @property
        def target(self):
            return target

    here = Placement.create(MeshShape(fsdp=1), devices=jax.devices()[:1])
    return There(here.devices, here.rules)


def precisions(jaxpr):
    """Of each product of a traced program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield str(equation.params["precision"])
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from precisions(inner)


@pytest.mark.parametrize(
    ("target", "precision", "expected"),
    [(H100, None, "None"), (H100, "float32", "HIGHEST"), (H100, "tf32", "HIGH"), (H100, "bfloat16", "BF16_BF16_F32"),
     (TPU, "bfloat16", "DEFAULT"), (CPU, "float32", "HIGHEST")],
)  # fmt: skip
def test_products_of_steps_and_evaluations_are_traced_with_it(target, precision, expected):
    program = Program.create(Product(precision), Sgd(), num_steps=3)
    batch = {"x": jax.ShapeDtypeStruct((4, 4), jnp.float32)}
    with use_layout(there(target)):
        for function, count in ((program.step, 2), (program.evaluate, 1)):
            found = list(precisions(jax.make_jaxpr(function)(program.abstract, batch).jaxpr))
            assert len(found) == count
            for each in found:
                assert each == expected or set(re.findall(r"\w+", each.replace("Precision.", ""))) == {expected}, each


def test_a_step_for_devices_without_it_is_refused_before_it_is_compiled():
    program = Program.create(Product("tf32"), Sgd(), num_steps=3)
    with pytest.raises(RecipeError, match=r'"tf32": cpu multiplies float32 in float32; set it to one of these'):
        CompiledStep(program, Placement.create(MeshShape(replica=8, fsdp=1)), {"x": ("batch", None)})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_precision_of_products_in_16_bits_is_refused(dtype):
    for make in (tiny.task, functools.partial(VitTask, model=VIT_PRESETS["vit_s16"])):
        with pytest.raises(RecipeError, match=rf'matmul_precision="float32" has no effect: matmuls are in {dtype}'):
            make(compute_dtype=dtype, matmul_precision="float32")


def test_a_run_states_what_it_multiplies_in():
    assert describe_precision(Product("tf32"), H100) == (
        "matmul precision  float32 is multiplied in tf32 (task.matmul_precision)"
    )
    assert "in tf32, the default of gpu (h100); task.matmul_precision sets it to float32 or tf32" in str(
        describe_precision(tiny.task(), H100)
    )
    assert "in bfloat16, the default of tpu" in str(describe_precision(Product(), TPU))
    assert describe_precision(tiny.task(), CPU) is None
    assert describe_precision(tiny.task(compute_dtype="bfloat16"), H100) is None
