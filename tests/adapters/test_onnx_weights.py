"""What trains of an exported graph: literals and a GroupNorm's ones and zeros stay, merged weights are asked for."""

import io
import warnings

import jax
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from test_onnx import SGD, UNCLIPPED, model_of, squared, weights
from torch import nn

import panax
from panax.adapters.onnx import task
from panax.core.errors import RecipeError
from panax.mesh import MeshShape

NODE = helper.make_node
X = {"x": (TensorProto.FLOAT, ["batch", 4])}


class Exported(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.groups = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.plain, self.first, self.second = nn.InstanceNorm2d(4), nn.LayerNorm(4), nn.LayerNorm(4)
        self.mid, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.plain(self.groups(self.up(x))) * x[:, :1]
        return self.down(self.second(self.mid(self.first(h.mean((2, 3)))) * torch.tensor([0.1, 0.2, 0.3, 0.4])))


@pytest.fixture(scope="module")
def exported() -> tuple[Exported, onnx.ModelProto]:
    module, file = Exported().eval(), io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, (torch.randn(8, 2, 4, 4),), file, dynamo=False, opset_version=17)
    return module, onnx.load_from_string(file.getvalue())


def images(seed):
    return {"x": np.random.default_rng(seed).normal(size=(8, 2, 4, 4)).astype(np.float32)}


def test_an_exported_module_trains_as_the_module_does(exported):
    """Two fresh LayerNorms are merged by the exporter; GroupNorm and InstanceNorm have ones and zeros that are no weights."""
    module, proto = exported
    with pytest.raises(
        RecipeError, match=r"2 initializers are each used by several nodes: first.\w+ \(.*untied=.*tied="
    ):
        task(proto, squared, example=images(0))
    adapted = task(proto, squared, example=images(0), untied="first.*")
    names = set(adapted.model.initial[0])
    assert {"first.weight", "second.weight", "first.bias", "second.bias"} <= names and len(names) == 12
    assert not any("Constant" in name for name in names) and any("constants=" in note for note in adapted.notes)
    devices = jax.devices()[:1]
    step = panax.compile_step(adapted, images(0), SGD, config=UNCLIPPED, mesh=MeshShape(), devices=devices)
    state, optimizer = step.init(), torch.optim.SGD(module.parameters(), lr=0.1)
    for seed in range(4):
        state, metrics = step(state, images(seed))
        optimizer.zero_grad()
        loss = module(torch.tensor(images(seed)["x"])).square().mean()
        loss.backward()
        optimizer.step()
        np.testing.assert_allclose(metrics["loss"], loss.item(), rtol=1e-4)
    tuned = {t.name: numpy_helper.to_array(t) for t in adapted.trained(state).graph.initializer}
    for name in ("first.weight", "second.weight", "second.bias", "down.weight"):
        np.testing.assert_allclose(tuned[name], module.state_dict()[name], rtol=1e-3, atol=1e-5)
    assert np.abs(tuned["first.weight"] - tuned["second.weight"]).max() > 1e-4
    onnx.checker.check_model(adapted.trained(state))


def grouped(name: str) -> onnx.ModelProto:
    """A GroupNorm as an InstanceNormalization of reshaped groups, with ones and zeros as initializers."""
    numbers = [
        numpy_helper.from_array(np.ones(2, np.float32), f"{name}_a"),
        numpy_helper.from_array(np.zeros(2, np.float32), f"{name}_b"),
        numpy_helper.from_array(np.array([0, 2, -1]), "split"),
        numpy_helper.from_array(np.array([0, 4]), "joined"),
    ]
    nodes = [
        NODE("MatMul", ["x", "w"], ["a"]),
        NODE("Reshape", ["a", "split"], ["b"]),
        NODE("InstanceNormalization", ["b", f"{name}_a", f"{name}_b"], ["c"]),
        NODE("Reshape", ["c", "joined"], ["d"]),
        NODE("Mul", ["d", "scale"], ["out"]),
    ]
    return model_of(nodes, [*weights(0, w=(4, 4), scale=(4,)), *numbers], X)


EXAMPLE = {"x": np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)}


@pytest.mark.parametrize("name", ["ones", "onnx::InstanceNormalization", "norm.weight"])
def test_ones_and_zeros_of_a_group_norm_stay(name):
    adapted = task(grouped(name), squared, example=EXAMPLE)
    assert set(adapted.model.initial[0]) == {"w", "scale"}
    assert any(f"{name}_a" in note for note in adapted.notes)
    assert set(task(grouped(name), squared, example=EXAMPLE, weights=f"{name}_*").model.initial[0]) == {
        "w", "scale", f"{name}_a", f"{name}_b",
    }  # fmt: skip


def scaled(name: str, exponent: bool = False) -> onnx.ModelProto:
    nodes = [NODE("MatMul", ["x", "w"], ["a"]), NODE("Pow" if exponent else "Mul", ["a", name], ["out"])]
    return model_of(nodes, [*weights(0, w=(4, 4)), numpy_helper.from_array(np.full(4, 2, np.float32), name)], X)


def test_what_has_no_name_is_asked_for():
    with pytest.raises(
        RecipeError, match=r"whether val_3 \(1 in all\) are weights or constants .*weights=.*constants="
    ):
        task(scaled("val_3"), squared, example=EXAMPLE)
    assert set(task(scaled("val_3"), squared, example=EXAMPLE, weights=["val_*"]).model.initial[0]) == {"w", "val_3"}
    assert set(task(scaled("val_3"), squared, example=EXAMPLE, constants=["val_3"]).model.initial[0]) == {"w"}
    assert set(task(scaled("scale"), squared, example=EXAMPLE).model.initial[0]) == {"w", "scale"}
    assert set(task(scaled("scale"), squared, example=EXAMPLE, constants=["scale"]).model.initial[0]) == {"w"}
    assert set(task(scaled("power", exponent=True), squared, example=EXAMPLE).model.initial[0]) == {"w"}
    with pytest.raises(RecipeError, match="constants='scal' matches no initializer; did you mean 'scale'"):
        task(scaled("scale"), squared, example=EXAMPLE, constants="scal")
    with pytest.raises(RecipeError, match=r"scale is in weights= and in constants="):
        task(scaled("scale"), squared, example=EXAMPLE, constants="scale", weights="s*")


def test_a_weight_of_several_nodes_is_one_or_several():
    nodes = [NODE("MatMul", ["x", "w"], ["a"]), NODE("Relu", ["a"], ["b"]), NODE("MatMul", ["b", "w"], ["out"])]
    shared = model_of(nodes, weights(0, w=(4, 4)), X)
    with pytest.raises(RecipeError, match=r"1 initializers are each used by several nodes: w \(a, out\)"):
        task(shared, squared, example=EXAMPLE)
    assert set(task(shared, squared, example=EXAMPLE, tied="w").model.initial[0]) == {"w"}
    apart = task(shared, squared, example=EXAMPLE, untied=["w"])
    assert set(apart.model.initial[0]) == {"w", "w.2"}
    back = apart.model.rebuild({"w": np.zeros((4, 4)), "w.2": np.ones((4, 4))}, {})
    onnx.checker.check_model(back)
    assert {t.name: float(numpy_helper.to_array(t).mean()) for t in back.graph.initializer} == {"w": 0.0, "w.2": 1.0}
