"""An ONNX graph prepared for fine-tuning: its weights, its constants, and a JAX function."""

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jaxonnxruntime
import numpy as np
import onnx
from jaxonnxruntime import call_onnx
from jaxonnxruntime import onnx_ops as _registered  # noqa: F401
from jaxonnxruntime.core.handler import Handler
from onnx import inliner, numpy_helper, version_converter

from ...core.errors import RecipeError
from ..agreement import use_library_promotion
from ..layouts import Kind
from . import operations as _added  # noqa: F401
from .weights import FLOAT_TYPES, WeightPatterns, select_trained_names, split_untied_weights

NEWEST_OPSET = 20


class OnnxGraph:
    """An ONNX model with separate weights.

    Attributes:
        proto: The original model, with weights in Constant nodes turned into initializers.
        weights: The weights that train, by name: see `onnx_weights.py`.
        inputs: Names of the graph's inputs.
        outputs: Names of its outputs.
        notes: Notes on the parts that fine-tuning does not change.
    """

    def __init__(self, proto: onnx.ModelProto, patterns: WeightPatterns | None = None):
        """
        Args:
            patterns: The user's declarations about initializers.

        Raises:
            RecipeError: The model is in training mode or contains an operation without a JAX counterpart, or it is
                not clear which initializers train.
        """
        patterns = patterns or WeightPatterns()
        self.proto = _lifted(proto)
        graph = self.proto.graph
        _refuse_training_mode(graph)
        patterns.check([tensor.name for tensor in graph.initializer])
        split_untied_weights(self.proto, select_trained_names(graph, patterns)[0], patterns)
        copies = WeightPatterns(*(tuple(f"{p}{end}" for p in names for end in ("", ".[0-9]*")) for names in patterns))
        trains, untrained = select_trained_names(graph, copies)
        self._runnable = _in_32_bits(_expanded(self.proto))
        _refuse_unknown(self._runnable)
        initializers = {tensor.name: tensor for tensor in graph.initializer}
        self.inputs = tuple(value.name for value in graph.input if value.name not in initializers)
        self.outputs = tuple(value.name for value in graph.output)
        self.weights: dict[str, np.ndarray] = {name: numpy_helper.to_array(initializers[name]) for name in trains}
        self._constants = {
            tensor.name: numpy_helper.to_array(tensor)
            for tensor in self._runnable.graph.initializer
            if tensor.name not in self.weights
        }
        count = Counter(node.op_type for node in graph.node)
        self.notes = (*_notes(count), *_notes_on_constants(untrained))

    def kind_of(self, name: str) -> Kind | None:
        """Return the kind of a weight, by the node that uses it."""
        for node in self.proto.graph.node:
            place = list(node.input).index(name) if name in node.input else None
            if place is None:
                continue
            if node.op_type == "Gather" and place == 0:
                return "embedding"
            if node.op_type == "Conv" and place == 1:
                return "convolution_first"
            if node.op_type == "Transpose" or (node.op_type == "Gemm" and place == 1 and _attribute(node, "transB", 0)):
                return "out_in" if self.weights[name].ndim == 2 else None
            if self.weights[name].ndim == 2:
                return "in_out"
        return None

    def to_jax(self, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> Any:
        """Convert the graph to `(weights, inputs) -> outputs` in JAX, for inputs of these shapes.

        Raises:
            RecipeError: The graph can't be run on inputs of these shapes.
        """
        zeros = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in shapes.items()}
        proto = onnx.ModelProto()
        proto.CopyFrom(self._runnable)
        try:
            # Run once on zeros, outside of any tracing: computed shapes become constants.
            with _static_shapes(), jax.ensure_compile_time_eval(), use_library_promotion():
                function, _ = call_onnx.call_onnx_model(proto, zeros)
        except Exception as error:  # its operations raise any exception of NumPy and JAX
            listed = ", ".join(f"{name} {leaf.dtype}{list(leaf.shape)}" for name, leaf in shapes.items())
            raise RecipeError(
                f"the ONNX graph can't be run on {listed}: {type(error).__name__}: {_first_line(error)}; "
                f"its inputs are {', '.join(map(_described, self.proto.graph.input))}"
            ) from error

        def run(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> list[Any]:
            with _static_shapes(), use_library_promotion():
                return function({**self._constants, **weights}, dict(inputs))

        return run

    def with_weights(self, weights: Mapping[str, np.ndarray]) -> onnx.ModelProto:
        """Return the model with these weights, in their original dtypes."""
        proto = onnx.ModelProto()
        proto.CopyFrom(self.proto)
        for tensor in proto.graph.initializer:
            if tensor.name in weights:
                dtype = self.weights[tensor.name].dtype
                tensor.CopyFrom(numpy_helper.from_array(np.asarray(weights[tensor.name]).astype(dtype), tensor.name))
        return proto


def _lifted(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy in which weights in Constant nodes are initializers, which can be replaced."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for node in list(copy.graph.node):
        value = _attribute(node, "value", None) if node.op_type == "Constant" else None
        if value is not None and value.data_type in FLOAT_TYPES and len(value.dims) >= 2 and math.prod(value.dims) > 1:
            tensor = copy.graph.initializer.add()
            tensor.CopyFrom(value)
            tensor.name = node.output[0]
            copy.graph.node.remove(node)
    return copy


def _expanded(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Replace operations without JAX code by the simpler ones with which ONNX defines them."""
    proto = _of_known_version(proto)
    known = _supported_operations(proto)
    compound = sorted({(node.domain, node.op_type) for node in proto.graph.node} - known)
    if not compound and not proto.functions:
        return proto
    functions = [(function.domain, function.name) for function in proto.functions]
    typed = onnx.ModelProto()
    typed.CopyFrom(proto)
    # The inliner requires the type of every value, and does not look at initializers.
    known_types = {value.name for value in [*typed.graph.input, *typed.graph.value_info]}
    typed.graph.value_info.extend(
        onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
        for tensor in typed.graph.initializer
        if tensor.name not in known_types
    )
    try:
        typed = onnx.shape_inference.infer_shapes(typed)
        simpler = inliner.inline_selected_functions(typed, [*compound, *functions], inline_schema_functions=True)
    except RuntimeError as error:
        raise RecipeError(
            f"{', '.join(name for _, name in compound)} can't be replaced by simpler operations: {_first_line(error)}"
        ) from error
    # The replacement of an operation may be compound itself.
    return simpler if len(simpler.graph.node) == len(proto.graph.node) else _expanded(simpler)


def _in_32_bits(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy without integers that 32 bits cannot hold: exporters write the largest of 64 bits if a
    slice has no end."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    held = [node.attribute for node in copy.graph.node if node.op_type == "Constant"]
    values = [a.t for attributes in held for a in attributes if a.name == "value"]
    for tensor in [*copy.graph.initializer, *values]:
        if tensor.data_type == onnx.TensorProto.INT64:
            limits = np.iinfo(np.int32)
            array = np.clip(numpy_helper.to_array(tensor), limits.min, limits.max)
            tensor.CopyFrom(numpy_helper.from_array(array.astype(np.int64), tensor.name))
    return copy


def _of_known_version(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Convert a model of a later opset to the newest one that jaxonnxruntime was written for."""
    if max((opset.version for opset in proto.opset_import if not opset.domain), default=0) <= NEWEST_OPSET:
        return proto
    try:
        return version_converter.convert_version(proto, NEWEST_OPSET)
    except RuntimeError as error:
        raise RecipeError(
            f"the model can't be brought to opset {NEWEST_OPSET}, the newest that jaxonnxruntime knows: {_first_line(error)}; "
            f"export it with opset_version={NEWEST_OPSET}"
        ) from error


def _supported_operations(proto: onnx.ModelProto) -> set[tuple[str, str]]:
    """Return (domain, name) of each operation that jaxonnxruntime computes in the model's version."""
    versions = {opset.domain: opset.version for opset in proto.opset_import}
    return {
        (handler.DOMAIN, handler.OP_TYPE)
        for handler in Handler.__subclasses__()
        if handler.DOMAIN in versions
        and hasattr(handler, f"version_{handler.get_since_version(versions[handler.DOMAIN])}")
    }


def _refuse_unknown(proto: onnx.ModelProto) -> None:
    unknown = Counter(
        node.op_type for node in proto.graph.node if (node.domain, node.op_type) not in _supported_operations(proto)
    )
    if unknown:
        versions = ", ".join(f"{opset.domain or 'ai.onnx'} {opset.version}" for opset in proto.opset_import)
        listed = ", ".join(f"{name} ({count})" for name, count in sorted(unknown.items()))
        raise RecipeError(
            f"jaxonnxruntime {jaxonnxruntime.__version__} has no {listed} in opset {versions}; export with another opset, or "
            f"without these operations"
        )


def _refuse_training_mode(graph: onnx.GraphProto) -> None:
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        training = node.op_type == "BatchNormalization" and _attribute(node, "training_mode", 0)
        if node.op_type == "Dropout" and len(node.input) > 2 and node.input[2]:
            mode = constants.get(node.input[2])
            training = mode is None or bool(numpy_helper.to_array(mode))
        if training:
            raise RecipeError(
                f"{node.op_type} {node.name or node.output[0]} is in training mode, which can't be fine-tuned; export the "
                f"model in inference mode"
            )


def _notes(count: Mapping[str, int]) -> Iterator[str]:
    yield "fine-tuning of an exported graph: it lacks all that its framework did only in training"
    if count.get("BatchNormalization"):
        yield f"the statistics of {count['BatchNormalization']} BatchNormalization stay as they are"
    if count.get("Dropout"):
        yield f"{count['Dropout']} Dropout drop nothing"
    if not count.get("BatchNormalization") and not count.get("Dropout"):
        yield "dropout that the model had is gone, and a BatchNorm may be folded into its convolution"


def _notes_on_constants(kept: list[str]) -> Iterator[str]:
    yield "constants of the model (buffers, tables of positions) look like weights in a graph: name them in constants="
    if kept:
        yield f"{len(kept)} initializers are constants of the model's code and stay: {', '.join(kept[:8])}; weights= trains them"


@contextlib.contextmanager
def _static_shapes() -> Iterator[None]:
    """Allow shapes to be computed from shapes, instead of initializers only."""
    option = "jaxort_only_allow_initializers_as_static_args"
    before = jaxonnxruntime.config.read(option)
    jaxonnxruntime.config.update(option, False)
    try:
        yield
    finally:
        jaxonnxruntime.config.update(option, before)


def _attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    return next((onnx.helper.get_attribute_value(a) for a in node.attribute if a.name == name), default)


def _described(value: onnx.ValueInfoProto) -> str:
    tensor = value.type.tensor_type
    dims = [dim.dim_param or (dim.dim_value if dim.HasField("dim_value") else "?") for dim in tensor.shape.dim]
    return f"{value.name} {onnx.TensorProto.DataType.Name(tensor.elem_type).lower()}[{', '.join(map(str, dims))}]"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else ""
