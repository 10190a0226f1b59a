"""Classification of the initializers of an ONNX graph, which exporters don't record: which of them train, and
which are one weight.

An exporter writes parameters, buffers and literal values as initializers, and merges equal ones. The
classification follows from use, name and values if these are unambiguous; otherwise the user must declare it.
"""

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import onnx
from onnx import numpy_helper

from ...core.errors import RecipeError, suggest_name

FLOAT_TYPES = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE)

_WEIGHT_PLACES = {
    "Conv": (1, 2), "ConvTranspose": (1, 2), "Gemm": (0, 1, 2), "MatMul": (0, 1), "Gather": (0,), "LayerNormalization": (1, 2),
    "BatchNormalization": (1, 2), "GroupNormalization": (1, 2), "PRelu": (1,), "Einsum": (0, 1, 2),
}  # fmt: skip
_OTHER_PLACES = {
    "Pow": (1,), "Clip": (1, 2), "Pad": (2,), "Resize": (1, 2), "Upsample": (1,), "OneHot": (2,), "Dropout": (1,),
    "Greater": (0, 1), "Less": (0, 1), "Equal": (0, 1), "GreaterOrEqual": (0, 1), "LessOrEqual": (0, 1),
    "Range": (0, 1, 2), "Max": (0, 1), "Min": (0, 1),
    "Mod": (0, 1), "Shape": (0,), "Size": (0,), "CastLike": (1,), "ConstantOfShape": (0,), "NonZero": (0,),
}  # fmt: skip
_PASSING = ("Identity", "Cast", "Transpose", "Reshape", "Unsqueeze", "Squeeze", "Expand", "Flatten")

_LITERAL = re.compile(r"(^|/)Constant(_\d+)?_output_\d+$")
"""PyTorch's names for literal values in a model's code."""

_NAMELESS = re.compile(r"^(_?val_\d+|const\w*_\w*|\d+|tmp\w*_?\d+)$", re.IGNORECASE)
"""Names that exporters generate."""


class WeightPatterns(NamedTuple):
    """The user's declarations about initializers, as patterns of names."""

    weights: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()
    untied: tuple[str, ...] = ()

    def check(self, names: Iterable[str]) -> None:
        """Check that every pattern matches a name, and that no two contradict each other.

        Raises:
            RecipeError: A pattern matches nothing, or two contradict each other.
        """
        names = list(names)
        for kind, patterns in self._asdict().items():
            for pattern in patterns:
                if not fnmatch.filter(names, pattern):
                    raise RecipeError(
                        f"{kind}={pattern!r} matches no initializer; {suggest_name(pattern.replace('*', ''), names)}"
                    )
        for one, other in (("weights", "constants"), ("tied", "untied")):
            for name in names:
                if matches_any(name, getattr(self, one)) and matches_any(name, getattr(self, other)):
                    raise RecipeError(f"{name} is in {one}= and in {other}=; name it in one of them")


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


class InitializerUse(NamedTuple):
    """One node's input that receives an initializer, unchanged or transposed, cast or reshaped."""

    node: onnx.NodeProto
    input_index: int


def find_uses(graph: onnx.GraphProto, name: str, *, through: tuple[str, ...]) -> Iterator[InitializerUse]:
    """Yield the uses of an initializer; outputs of operations in `through` count as the initializer."""
    for node in graph.node:
        for place, each in enumerate(node.input):
            if each != name:
                continue
            if node.op_type in through and place == 0:
                for output in node.output:
                    yield from find_uses(graph, output, through=through)
            else:
                yield InitializerUse(node, place)


def select_trained_names(graph: onnx.GraphProto, patterns: WeightPatterns) -> tuple[list[str], list[str]]:
    """List the names of the initializers that train, and of other floating-point initializers.

    Raises:
        RecipeError: It is not clear if an initializer trains.
    """
    statistics = {name for node in graph.node if node.op_type == "BatchNormalization" for name in node.input[3:5]}
    made_by = {output: node for node in graph.node for output in node.output}
    trained, constants, unclear = [], [], []
    for tensor in graph.initializer:
        uses = list(find_uses(graph, tensor.name, through=_PASSING))
        if tensor.data_type not in FLOAT_TYPES or not tensor.dims or tensor.name in statistics or not uses:
            continue
        if matches_any(tensor.name, patterns.constants):
            continue
        verdict = True if matches_any(tensor.name, patterns.weights) else _trains(tensor, uses, made_by)
        {True: trained, False: constants, None: unclear}[verdict].append(tensor.name)
    if unclear:
        raise RecipeError(
            f"the graph does not show whether {', '.join(unclear[:8])} ({len(unclear)} in all) are weights or "
            f"constants of the model: the exporter has dropped their names; pass task(..., weights=[...], "
            f"constants=[...]), as names or patterns such as {unclear[0]!r} or 'val_*'"
        )
    return trained, constants


def _trains(tensor: onnx.TensorProto, uses: list[InitializerUse], made_by: Mapping[str, onnx.NodeProto]) -> bool | None:
    """Return True if an initializer trains, False if not; None if it is not clear."""
    value = numpy_helper.to_array(tensor).astype(np.float32)
    if _LITERAL.search(tensor.name) or not np.isfinite(value).all():
        return False
    if all(use.input_index in _OTHER_PLACES.get(use.node.op_type, ()) for use in uses):
        return False
    nameless = bool(_NAMELESS.match(tensor.name))
    if (
        any(use.node.op_type == "InstanceNormalization" for use in uses)
        and np.ptp(value) == 0
        and value.flat[0] in (0, 1)
    ):
        # A GroupNorm is exported as an InstanceNorm of reshaped groups, without its own scale and shift.
        grouped = any(_is_reshaped(use.node.input[0], made_by) for use in uses)
        return not (grouped or nameless or tensor.name.startswith("onnx::"))
    if any(use.input_index in _WEIGHT_PLACES.get(use.node.op_type, ()) for use in uses):
        return True
    return None if nameless else True


def _is_reshaped(name: str, made_by: Mapping[str, onnx.NodeProto]) -> bool:
    return name in made_by and made_by[name].op_type == "Reshape"


def split_untied_weights(proto: onnx.ModelProto, trained: Iterable[str], patterns: WeightPatterns) -> None:
    """Give each node that uses an untied weight a separate copy, in place.

    Raises:
        RecipeError: A weight is used by several nodes, and it is not declared as tied or untied.
    """
    graph = proto.graph
    unclear = []
    for name in list(trained):
        users: dict[str, onnx.NodeProto] = {}
        for use in find_uses(graph, name, through=("Identity",)):
            if use.input_index not in _OTHER_PLACES.get(use.node.op_type, ()):
                users.setdefault(use.node.output[0], use.node)
        if len(users) < 2 or matches_any(name, patterns.tied):
            continue
        if matches_any(name, patterns.untied):
            _copy_for_each(graph, name)
        else:
            unclear.append(f"{name} ({', '.join(node.name or output for output, node in list(users.items())[:4])})")
    if unclear:
        raise RecipeError(
            f"{len(unclear)} initializers are each used by several nodes: {'; '.join(unclear[:5])}. Exporters merge weights that "
            f"happen to be equal when they export (two fresh LayerNorms), and would train as one; pass task(..., untied=...) "
            f"for those that are several weights in the model, and tied=... for those that are one there too, by name or pattern"
        )


def _copy_for_each(graph: onnx.GraphProto, name: str) -> None:
    """Turn the `Identity`s of an initializer into initializers, and number the copies for further nodes."""
    original = next(tensor for tensor in graph.initializer if tensor.name == name)

    def copied(new: str) -> None:
        copy = graph.initializer.add()
        copy.CopyFrom(original)
        copy.name = new

    aliases = [name]
    for node in list(graph.node):
        if node.op_type == "Identity" and node.input[0] in aliases:
            aliases.append(node.output[0])
            copied(node.output[0])
            graph.node.remove(node)
    for alias in aliases:
        users = [node for node in graph.node if alias in node.input]
        for number, node in enumerate(users[1:], 2):
            copied(f"{alias}.{number}")
            for place, each in enumerate(node.input):
                if each == alias:
                    node.input[place] = f"{alias}.{number}"
