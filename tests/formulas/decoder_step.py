"""A decoder's training step on a mesh, as numbers: what each parameter is on a device, and how often what runs in a step."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

from panax.core.errors import LayoutError
from panax.core.params.axes import pair_axes
from panax.mesh.rules import MESH_AXES, MeshAxes, Rules, assign
from panax.mesh.topology import data_parallel_size
from panax.models import DecoderConfig, DecoderTask

from .held import HeldRun, held_runs
from .passes import Passes


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderStep:
    """One training step of a decoder on a mesh: all that its communication and its memory depend on.

    Attributes:
        mesh: Mesh axis to size; an axis that is not named has size 1.
        rows: Of the global batch.
        length: Tokens in a row.
        packed: Whether rows hold several documents, and so have segments.
    """

    task: DecoderTask
    mesh: Mapping[str, int]
    rows: int
    length: int
    micro_batches: int = 1
    packed: bool = True
    rules: Rules = dataclasses.field(default_factory=Rules)

    def __post_init__(self) -> None:
        parts = data_parallel_size(self.mesh) * self.micro_batches
        if self.rows % parts:
            raise LayoutError(
                f"a batch of {self.rows} rows is not divisible by {parts // self.micro_batches} data-parallel devices x "
                f"{self.micro_batches} micro-batches; use a multiple of {parts} rows"
            )
        split = (2 * self.size("context") if self.size("context") > 1 else 1) * self.size("tensor")
        if self.length % split:
            raise LayoutError(
                f"rows of {self.length} tokens can't be split over context={self.size('context')} and "
                f"tensor={self.size('tensor')}; use a multiple of {split} tokens"
            )

    def size(self, axis: str) -> int:
        return self.mesh.get(axis, 1)

    def ways(self, axes: Iterable[str]) -> int:
        return math.prod(self.size(axis) for axis in axes)

    @property
    def model(self) -> DecoderConfig:
        return self.task.model

    @property
    def zero(self) -> str:
        """What of a step is sharded; see `Rules`."""
        if self.rules.zero != "auto":
            return self.rules.zero
        return "1" if self.size("stage") > 1 else "3"

    @property
    def compute_bytes(self) -> int:
        """Of an element of an activation, or of a weight as it is multiplied."""
        return self.task.weight_dtype.itemsize

    @property
    def micro_rows(self) -> int:
        """Rows of one micro-batch on one device."""
        return self.rows // data_parallel_size(self.mesh) // self.micro_batches

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one device, outside of the residual stream."""
        return self.micro_rows * self.length // self.size("context")

    @functools.cached_property
    def layers_rest(self) -> bool:
        """True if a pipeline's layers are stored at the stage that computes them."""
        return self.task.pipeline_requirement.can_store_on(self.size("stage"))

    @functools.cached_property
    def fitted_rules(self) -> Rules:
        """The rules with what the model can't split laid out otherwise."""
        sizes = {axis: n for _, axes, shape in decoder_arrays(self.model) for axis, n in zip(axes, shape) if axis}
        return self.rules.fit(sizes, self.mesh, layers_rest_on_stages=self.layers_rest)

    @functools.cached_property
    def arrays(self) -> list["StoredArray"]:
        """Every parameter.

        Raises:
            LayoutError: One does not divide over the mesh.
        """
        rules = self.fitted_rules
        key = (self.model, _frozen(self.mesh), _frozen(rules.storage), _frozen(rules.compute))
        if key not in _ARRAYS:
            if len(_ARRAYS) >= 1024:
                _ARRAYS.clear()
            _ARRAYS[key] = [StoredArray.of(self, *array) for array in decoder_arrays(self.model)]
        return _ARRAYS[key]

    @functools.cached_property
    def held(self) -> tuple[HeldRun, ...]:
        """What each stage holds; nothing without stages.

        Raises:
            RecipeError: There are fewer units of layers than parts of the pipeline.
        """
        stages = self.size("stage")
        return held_runs(self.model, stages, self.task.pipeline.chunks) if stages > 1 else ()

    @functools.cached_property
    def layers_of_pass(self) -> tuple[int, int]:
        """Layers that one pass runs: dense ones, and mixtures of experts. Slots that a stage leaves empty are counted."""
        slots = [(kind, run.slots) for run in self.held for kind in run.kinds]
        slots = slots or [(kind, 1) for kind in self.model.kinds]
        mixtures = sum(count for kind, count in slots if kind.mixture)
        return sum(count for _, count in slots) - mixtures, mixtures

    def layers_of(self, array: "StoredArray") -> tuple[int, int]:
        """How many layers of a stacked array one pass computes with, and how many a device does in a step.

        A pipeline's run of layers is one array on a stage: all is counted for the run's first stack, nothing for the others.
        """
        if not self.held:
            return array.layers, array.layers
        stack, place = array.place
        slots = sum(run.slots for run in self.held if run.stack == stack and place < len(run.kinds))
        return slots, slots * self.task.pipeline.chunks

    @property
    def assignments(self) -> int:
        """Tokens that a device has for experts, in one mixture layer and micro-batch: each as often as it is sent; at most."""
        moe = self.model.feed_forward
        assert moe is not None
        own = self.tokens // self.size("tensor")
        if moe.choice == "expert":
            return self.micro_rows * moe.experts * moe.row_capacity(self.length)
        return own * moe.active

    @property
    def exchange_buffer(self) -> int:
        """Rows that a device takes in at a time; 0 where no expert axis splits the experts."""
        moe, ways = self.model.feed_forward, self.size("expert")
        if moe is None or ways == 1:
            return 0
        return -(-int(self.assignments * moe.buffer) // ways) * ways

    @functools.cached_property
    def passes(self) -> Passes:
        return Passes.of(
            layers=sum(self.layers_of_pass),
            alone=sum(run.slots for run in self.held) == 1,
            micro_batches=self.micro_batches,
            stages=self.size("stage"),
            pipeline=self.task.pipeline,
            tokens=self.tokens,
            tensor=self.size("tensor"),
        )


_ARRAYS: dict[Any, list["StoredArray"]] = {}
"""By all that they depend on: a search asks for the same ones again and again."""


def _frozen(mapping: Mapping[str, Any]) -> tuple:
    return tuple(sorted(mapping.items()))


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """A parameter, as a device holds it.

    Attributes:
        layers: How many layers it stacks; 1 for an array that belongs to none.
        stacked: Whether it belongs to the layers.
        place: Of layers: the number of their stack, and their place in its period.
        each: Elements of one layer of it, as a device computes with it.
        stored: Elements of it that rest on a device, all layers.
        gathered: The mesh axes that it is gathered over for each use.
        apart: The mesh axes that it is stored alike on, over which its gradient is summed once a step.
        turned: Whether it is gathered along another dimension than its first (above size 1): a collective wants that one first.
        travels: Whether it is moved to its stage, split over `stage` otherwise than by layers.
    """

    name: str
    layers: int
    stacked: bool
    place: tuple[int, int]
    each: int
    stored: int
    gathered: MeshAxes
    apart: MeshAxes
    turned: bool
    travels: bool

    @classmethod
    def of(cls, step: DecoderStep, name: str, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> "StoredArray":
        rules, mesh, stacked = step.fitted_rules, step.mesh, axes[0] == "layer"
        storage = assign(axes, shape, rules.storage, mesh, name)
        inner = slice(1, None) if stacked else slice(None)
        compute = assign(axes[inner], shape[inner], rules.compute, mesh, name)
        stored_over = {axis for dim in storage for axis in dim}
        computed_over = {axis for dim in compute for axis in dim}
        # A layer's weights are gathered within its stage.
        only = {axis for dim in storage[inner] for axis in dim} - computed_over - ({"stage"} if stacked else set())
        first = shape[inner][0] // step.ways(compute[0])
        return cls(
            name=name,
            layers=shape[0] if stacked else 1,
            stacked=stacked,
            place=_place(name) if stacked else (0, 0),
            each=math.prod(shape[inner]) // step.ways(computed_over),
            stored=math.prod(shape) // step.ways(stored_over),
            gathered=mesh_order(step, only),
            apart=mesh_order(step, set(MESH_AXES) - stored_over),
            turned=bool(mesh_order(step, only)) and not only & set(storage[inner][0]) and first > 1,
            travels=stacked and "stage" in {axis for dim in storage[1:] for axis in dim},
        )


def _place(name: str) -> tuple[int, int]:
    _, stack, _, place, *_ = name.split(".")
    return int(stack), int(place)


@functools.lru_cache(maxsize=64)
def decoder_arrays(model: DecoderConfig) -> tuple[tuple[str, tuple[str | None, ...], tuple[int, ...]], ...]:
    """(name, logical axes, shape) of each parameter; nothing is allocated."""
    import jax

    from panax.core import logical_axes
    from panax.models import Decoder

    params = jax.eval_shape(lambda key: Decoder.build(key, model), jax.random.key(0))
    return tuple((name, axes, leaf.shape) for name, leaf, axes in pair_axes(params, logical_axes(params)))


def local_heads(step: DecoderStep) -> tuple[int, int]:
    """Query heads on a device, and the key-value heads that they attend to."""
    heads, kv_heads, tensor = step.model.heads, step.model.num_kv_heads, step.size("tensor")
    if kv_heads % tensor == 0:
        return heads // tensor, kv_heads // tensor
    local, group = heads // tensor, heads // kv_heads
    each = math.gcd(local, group) if local % group and group % local else min(local, group)
    return local, local // each


def mesh_order(step: DecoderStep, axes: Iterable[str]) -> MeshAxes:
    wanted = set(axes)
    return tuple(axis for axis in MESH_AXES if axis in wanted and step.size(axis) > 1)
