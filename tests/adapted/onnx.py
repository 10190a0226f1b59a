"""ONNX: a graph at inference, fine-tuned; beside it the same network in PyTorch, in `eval()`."""

import numpy as np
import optax
import torch
from onnx import TensorProto, helper, numpy_helper

from panax.adapters.onnx import task

from .case import MOMENTUM, RATE, SIZES, Case, Own, batch

INPUTS, HIDDEN, CLASSES = SIZES
SHAPES = {
    "up.weight": (HIDDEN, INPUTS),
    "up.bias": (HIDDEN,),
    "norm.weight": (HIDDEN,),
    "norm.bias": (HIDDEN,),
    "head.weight": (CLASSES, HIDDEN),
    "head.bias": (CLASSES,),
}


def proto(nodes, tensors, output=CLASSES):
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", INPUTS])
    out = helper.make_tensor_value_info("out", TensorProto.FLOAT, ["batch", output])
    initializers = [numpy_helper.from_array(array, name) for name, array in tensors.items()]
    graph = helper.make_graph(nodes, "net", [x], [out], initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def net():
    rng = np.random.default_rng(0)
    tensors = {name: 0.3 * rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    tensors["norm.weight"] += 1
    tensors |= {"mean": tensors["norm.bias"] * 2, "variance": tensors["norm.weight"] ** 2}
    nodes = [
        helper.make_node("Gemm", ["x", "up.weight", "up.bias"], ["a"], transB=1),
        helper.make_node("BatchNormalization", ["a", "norm.weight", "norm.bias", "mean", "variance"], ["b"]),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("Gemm", ["c", "head.weight", "head.bias"], ["out"], transB=1),
    ]
    return proto(nodes, tensors)


def arrays(model):
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def weights_of(model):
    if isinstance(model, torch.nn.Module):
        return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    return {name: array for name, array in arrays(model).items() if name in SHAPES}


class OnnxOwn(Own):
    def start(self, model):
        parts = {"up": torch.nn.Linear(INPUTS, HIDDEN), "norm": torch.nn.BatchNorm1d(HIDDEN), "relu": torch.nn.ReLU()}
        self.model = torch.nn.Sequential()
        for name, part in {**parts, "head": torch.nn.Linear(HIDDEN, CLASSES)}.items():
            self.model.add_module(name, part)
        values = arrays(model)
        values = {"norm.running_mean": values.pop("mean"), "norm.running_var": values.pop("variance"), **values}
        self.model.load_state_dict({name: torch.tensor(array) for name, array in values.items()}, strict=False)
        self.model.eval()
        self.optimizer = torch.optim.SGD(self.model.parameters(), RATE, MOMENTUM)

    def loss(self, batch):
        return torch.nn.functional.cross_entropy(self.model(torch.tensor(batch["x"])), torch.tensor(batch["y"]).long())

    def gradients(self, batch, key):
        self.optimizer.zero_grad()
        value = self.loss(batch)
        value.backward()
        return float(value.detach()), {name: p.grad.numpy().copy() for name, p in self.model.named_parameters()}

    def step(self, batch, key):
        value, _ = self.gradients(batch, key)
        self.optimizer.step()
        return value

    def evaluate(self, batch):
        with torch.no_grad():
            return float(self.loss(batch))


def loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def weighted(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
    return (losses * batch["weight"]).sum(), batch["weight"].sum()


linear = proto([helper.make_node("MatMul", ["x", "w"], ["out"])], {"w": np.ones((INPUTS, CLASSES), np.float32)})

CASE = Case(
    task=task(net(), loss, example=batch()),
    noisy=None,
    weighted=task(linear, weighted, example=batch()),
    own=OnnxOwn(),
    weights=weights_of,
    statistics=lambda model: {},
)
