"""A decoder's training step on a mesh, as numbers: what each parameter is on a device, and how often what runs in a step."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping

from ..core.axes import pair_axes
from ..core.errors import LayoutError
from ..mesh.rules import MESH_AXES, MeshAxes, Rules, assign
from ..mesh.topology import data_parallel_size
from ..models import DecoderConfig, DecoderTask
from ..parallel.schedules import Schedule, build, layers_by_stage


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
        """Whether a pipeline's layers are stored where they are computed."""
        return self.task.layers_rest_on_stages(self.size("stage"))

    @functools.cached_property
    def fitted_rules(self) -> Rules:
        """The rules with what the model can't split laid out otherwise."""
        sizes = {axis: n for _, axes, shape in decoder_arrays(self.model) for axis, n in zip(axes, shape) if axis}
        return self.rules.fitted(sizes, self.mesh, layers_rest_on_stages=self.layers_rest)

    @functools.cached_property
    def arrays(self) -> list["StoredArray"]:
        """Every parameter.

        Raises:
            LayoutError: One does not divide over the mesh.
        """
        return [StoredArray.of(self, *array) for array in decoder_arrays(self.model)]

    @functools.cached_property
    def passes(self) -> "Passes":
        return Passes.of(self)


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """A parameter, as a device holds it.

    Attributes:
        layers: How many layers it stacks; 1 for an array that belongs to none.
        stacked: Whether it belongs to the layers.
        each: Elements of one layer of it, as a device computes with it.
        stored: Elements of it that rest on a device, all layers.
        gathered: The mesh axes that it is gathered over for each use.
        apart: The mesh axes that it is stored alike on, over which its gradient is summed once a step.
        turned: Whether it is gathered along another dimension than its first: a collective's layout wants that one first.
        travels: Whether it is moved to its stage, split over `stage` otherwise than by layers.
    """

    name: str
    layers: int
    stacked: bool
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
        return cls(
            name=name,
            layers=shape[0] if stacked else 1,
            stacked=stacked,
            each=math.prod(shape[inner]) // step.ways(computed_over),
            stored=math.prod(shape) // step.ways(stored_over),
            gathered=mesh_order(step, only),
            apart=mesh_order(step, set(MESH_AXES) - stored_over),
            turned=bool(mesh_order(step, only)) and not only & set(storage[inner][0]),
            travels=stacked and "stage" in {axis for dim in storage[1:] for axis in dim},
        )


@dataclasses.dataclass(frozen=True)
class Passes:
    """How often one device runs what in a step, whether it has work there or waits for others who do.

    Attributes:
        forward: Passes through `layers` layers that are not differentiated.
        differentiated: Passes forward, and then backward, through as many.
        embedded: Look-ups of a micro-batch's tokens.
        embedded_back: Their backward passes.
        losses: Losses, of `loss_tokens` tokens each, with their gradients.
        looked_up_or_lost: Parts of the step in which there is a look-up, a loss or both.
        sent: Activations and gradients that are sent to a neighbouring stage.
        layers: Layers of one pass.
        held: Layers whose weights a device computes with in the step.
        loss_tokens: Of one loss on one device.
    """

    forward: int
    differentiated: int
    embedded: int
    embedded_back: int
    losses: int
    looked_up_or_lost: int
    sent: int
    layers: int
    held: int
    loss_tokens: int
    schedule: Schedule | None = None

    @property
    def alone(self) -> bool:
        """Whether a stage runs one layer at a time: nobody then reads what the layer gives before it is differentiated."""
        return self.schedule is not None and self.layers == 1

    @classmethod
    def of(cls, step: DecoderStep) -> "Passes":
        count, layers, stages = step.micro_batches, step.model.num_layers, step.size("stage")
        if stages == 1:
            return cls(0, count, count, count, count, count, 0, layers, layers, step.tokens)
        pipeline = step.task.pipeline
        schedule = build(pipeline, stages=stages, micro_batches=count)
        held = layers_by_stage(layers, stages=stages, chunks=pipeline.chunks)
        most = max(len(chunk) for stage in held for chunk in stage)
        residual = step.tokens // step.size("tensor")
        forward, backward = _ticks(schedule, "forward"), _ticks(schedule, "backward")
        return cls(
            forward=forward,
            differentiated=backward,
            embedded=_ticks(schedule, "forward_first"),
            embedded_back=_ticks(schedule, "backward_first"),
            losses=_ticks(schedule, "loss"),
            looked_up_or_lost=_ticks(schedule, "forward_first", "loss"),
            # A last tick that is no loop sends nothing: nobody receives it.
            sent=forward + backward - (schedule.phases[-1][2] == 1),
            layers=most,
            held=most * pipeline.chunks,
            loss_tokens=-(-residual // stages) * step.size("tensor"),
            schedule=schedule,
        )


def _ticks(schedule: Schedule, *what: str) -> int:
    """The ticks of all phases in which some stage does one of these at some time: all stages then run it in each."""
    start = found = 0
    for *_, count in schedule.phases:
        rows = schedule.rows[start : start + count]
        found += count if any(row[name] for name in what for stages in rows for row in stages) else 0
        start += count
    return found


@functools.lru_cache(maxsize=64)
def decoder_arrays(model: DecoderConfig) -> tuple[tuple[str, tuple[str | None, ...], tuple[int, ...]], ...]:
    """(name, logical axes, shape) of each parameter; nothing is allocated."""
    import jax

    from ..core import logical_axes
    from ..models import Decoder

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
