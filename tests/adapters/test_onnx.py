"""ONNX graphs, fine-tuned: what they compute, what trains, what comes back, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import optax
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import panax
from panax.adapters.onnx import task
from panax.core.errors import DataError, RecipeError
from panax.mesh import MeshShape
from panax.optim import Sgd
from panax.optim.schedule import Schedule
from panax.train import StepConfig

SGD = Sgd(schedule=Schedule(peak=0.1, decay="constant"))
UNCLIPPED = StepConfig(clip_norm=None)


def weights(seed: int, **shapes) -> list[TensorProto]:
    rng = np.random.default_rng(seed)
    return [numpy_helper.from_array(rng.normal(size=s).astype(np.float32) * 0.3, name) for name, s in shapes.items()]


def model_of(nodes, initializers, inputs, out=("batch", None), opset: int = 17) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, out)],
        initializers,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def convolutional(opset: int = 17) -> onnx.ModelProto:
    """Conv, BatchNorm, Relu, dropout, a Reshape by the input's own shape, Gemm with its weight turned."""
    node = helper.make_node
    constants = [
        numpy_helper.from_array(np.array([0, -1]), "flat"),
        numpy_helper.from_array(np.abs(np.random.default_rng(5).normal(size=6)).astype(np.float32), "variance"),
        numpy_helper.from_array(np.float32(0.5), "ratio"),
    ]
    return model_of(
        [
            node("Conv", ["x", "filters", "bias"], ["a"], pads=[1, 1, 1, 1]),
            node("BatchNormalization", ["a", "scale", "shift", "mean", "variance"], ["b"]),
            node("Relu", ["b"], ["c"]),
            node("Dropout", ["c", "ratio"], ["d"]),
            node("Reshape", ["d", "flat"], ["e"]),
            node("Gemm", ["e", "head", "head_bias"], ["out"], transB=1),
        ],
        [
            *weights(
                0, filters=(6, 2, 3, 3), bias=(6,), scale=(6,), shift=(6,), mean=(6,), head=(3, 96), head_bias=(3,)
            ),
            *constants,
        ],
        {"x": (TensorProto.FLOAT, ["batch", 2, 4, 4])},
        opset=opset,
    )


def torch_twin(model: onnx.ModelProto) -> torch.nn.Sequential:
    """The same network in PyTorch, at inference."""
    twin = torch.nn.Sequential(
        torch.nn.Conv2d(2, 6, 3, padding=1),
        torch.nn.BatchNorm2d(6),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(96, 3),
    ).eval()
    values = {t.name: torch.tensor(numpy_helper.to_array(t)) for t in model.graph.initializer}
    order = ["filters", "bias", "scale", "shift", "mean", "variance", "head", "head_bias"]
    names = [name for name in twin.state_dict() if "num_batches" not in name]
    twin.load_state_dict(dict(zip(names, (values[name] for name in order))), strict=False)
    return twin


def cross_entropy(model, batch):
    logits = model(batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.sum(), jnp.float32(losses.size)


def images(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(rows, 2, 4, 4)).astype(np.float32),
        "label": rng.integers(0, 3, rows).astype(np.int32),
    }


@pytest.mark.parametrize("opset", [17, 22])
def test_fine_tunes_as_pytorch_does_and_comes_back_as_a_model(opset, tmp_path):
    proto = convolutional(opset)
    onnx.save(proto, tmp_path / "net.onnx")
    adapted = task(str(tmp_path / "net.onnx"), cross_entropy, example=images(8))
    assert set(adapted._axes) == {"filters", "bias", "scale", "shift", "head", "head_bias"}
    assert adapted._axes["filters"] == ("features", "width", None, None) and adapted._axes["head"] == (
        "width",
        "features",
    )
    assert any("statistics of 1 BatchNormalization" in note for note in adapted.notes)
    step = panax.compile_step(adapted, images(8), SGD, config=UNCLIPPED, mesh=MeshShape(fsdp=4, tensor=2))
    state, twin = step.init(), torch_twin(proto)
    for seed in range(3):
        batch = images(8, seed)
        state, metrics = step(state, batch)
        loss = torch.nn.functional.cross_entropy(twin(torch.tensor(batch["x"])), torch.tensor(batch["label"]).long())
        gradients = torch.autograd.grad(loss, list(twin.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(twin.parameters(), gradients):
                parameter -= 0.1 * gradient
        np.testing.assert_allclose(metrics["loss"], loss.item(), rtol=1e-5)
    tuned = adapted.trained(state)
    onnx.checker.check_model(tuned)
    x = images(8, 9)["x"]
    np.testing.assert_allclose(
        ReferenceEvaluator(tuned).run(None, {"x": x})[0], twin(torch.tensor(x)).detach(), rtol=1e-4, atol=1e-5
    )
    assert (
        np.abs(ReferenceEvaluator(proto).run(None, {"x": x})[0] - twin(torch.tensor(x)).detach().numpy()).max() > 1e-3
    )


def transformer() -> onnx.ModelProto:
    """LayerNormalization, Gelu, a Mish and a HardSwish that only ONNX's definitions make known, a weight in a Constant node."""
    node = helper.make_node
    constant = weights(3, up=(8, 16))[0]
    return model_of(
        [
            node("Gather", ["table", "ids"], ["a"]),
            node("LayerNormalization", ["a", "scale", "shift"], ["b"], axis=-1),
            node("Constant", [], ["up"], value=constant),
            node("MatMul", ["b", "up"], ["c"]),
            node("Gelu", ["c"], ["d"]),
            node("Mish", ["d"], ["d1"]),
            node("HardSwish", ["d1"], ["d2"]),
            node("MatMul", ["d2", "down"], ["e"]),
            node("Add", ["a", "e"], ["out"]),
        ],
        weights(1, table=(7, 8), scale=(8,), shift=(8,), down=(16, 8)),
        {"ids": (TensorProto.INT64, ["batch", "length"])},
        out=("batch", "length", 8),
        opset=20,
    )


def test_compound_operations_are_taken_apart():
    example = {"ids": np.arange(24).reshape(8, 3) % 7}
    adapted = task(transformer(), lambda model, batch: (model(ids=batch["ids"]) ** 2).mean(), example=example)
    assert adapted._axes["up"] == ("width", "features") and adapted._axes["table"] == ("features", "width")
    params, state = adapted.model.initial
    half = {"ids": np.asarray(example["ids"][:4], np.int32)}
    gradient = jax.grad(lambda p: adapted.loss(p, state, half, jax.random.key(0), True).losses["objective"].mean)(
        params
    )
    assert all(np.abs(leaf).max() > 0 for leaf in gradient.values())
    after = adapted.model.rebuild({name: np.asarray(leaf) * 2 for name, leaf in params.items()}, {})
    assert {t.name: numpy_helper.to_array(t) for t in after.graph.initializer}["up"] == pytest.approx(2 * params["up"])


def plain(op: str, **attributes) -> onnx.ModelProto:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node(op, ["a"], ["out"], **attributes)]
    return model_of(nodes, weights(0, w=(4, 4)), {"x": (TensorProto.FLOAT, ["batch", 4])})


def squared(model, batch):
    return (model(batch["x"]) ** 2).mean()


def in_training() -> onnx.ModelProto:
    proto = convolutional()
    proto.graph.node[1].attribute.append(helper.make_attribute("training_mode", 1))
    return proto


REFUSED = {
    "an operation": (plain("Det"), squared, r"has no Det \(1\) in opset ai.onnx 17"),
    "training mode": (in_training(), squared, "BatchNormalization b is in training mode"),
    "no weights": (
        model_of([helper.make_node("Relu", ["x"], ["out"])], [], {"x": (TensorProto.FLOAT, ["batch", 4])}),
        squared,
        "no weights",
    ),
    "a wrong input": (plain("Relu"), lambda model, batch: model(y=batch["x"]), "was given 'y'; its inputs are x"),
    "too many inputs": (plain("Relu"), lambda model, batch: model(batch["x"], batch["x"]), "2 inputs; it takes 1: x"),
    "no call": (plain("Relu"), lambda model, batch: batch["x"].mean(), "never calls its model"),
    "a wrong shape": (
        plain("Relu"),
        lambda model, batch: model(batch["x"][:, :3]),
        r"can't be run on x float32\[8, 3\].*batch, 4",
    ),
    "no scalar": (plain("Relu"), lambda model, batch: model(batch["x"]), "not a scalar"),
    "no model": (3, squared, "an int; expected the path"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    proto, loss, message = REFUSED[case]
    with pytest.raises(RecipeError, match=message):
        task(proto, loss, example={"x": np.ones((8, 4), np.float32)})


def test_a_graph_that_jax_runs_otherwise_is_refused():
    """The shape that this graph makes depends on its input's values, and what is compiled has one."""
    nodes = [
        helper.make_node("Cast", ["x"], ["i"], to=TensorProto.INT64),
        helper.make_node("ReduceSum", ["i"], ["n"], keepdims=0),
        helper.make_node("Range", ["zero", "n", "one"], ["r"]),
        helper.make_node("Cast", ["r"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("ReduceSum", ["f"], ["s"], keepdims=0),
        helper.make_node("Mul", ["w", "s"], ["out"]),
    ]
    numbers = [numpy_helper.from_array(np.int64(i), name) for i, name in enumerate(("zero", "one"))]
    proto = model_of(nodes, [*weights(0, w=(2,)), *numbers], {"x": (TensorProto.FLOAT, ["batch"])})
    with pytest.raises(RecipeError, match=r"differs from that of ONNX's reference evaluator|can't be run"):
        task(proto, squared, example={"x": np.ones(8, np.float32)})


def test_no_onnx_file(tmp_path):
    (tmp_path / "x.onnx").write_bytes(b"\x80\x04 no model")
    for path in (tmp_path / "x.onnx", tmp_path / "none.onnx"):
        with pytest.raises(DataError, match="can't be read as an ONNX model"):
            task(path, squared, example={"x": np.ones((8, 4), np.float32)})
