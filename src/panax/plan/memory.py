"""The bytes that a decoder's training step takes on each device, by formula: what is kept, and the largest moment on top of it.

An estimate, to choose a layout by: compilers decide what shares a buffer. `tests/aot/test_memory.py` says how far it is from what
XLA plans for an H100. Attention is taken to keep no scores, whatever kernel runs.
"""

import dataclasses

from ..core.target import Target
from ..kernels.cross_entropy import chunk_tokens_within
from ..kernels.grouped import aligned_rows, choose_tile
from .communication import FLOAT32
from .decoder_step import DecoderStep, StoredArray, local_heads

MOMENTS = 2
"""Numbers that AdamW keeps for each parameter, in float32."""

_TARGET = Target("gpu")


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """Bytes on one device.

    Attributes:
        state: Parameters and moments, float32, as they rest.
        batch: The step's tokens with all that belongs to them.
        sums: Gradients in float32 that several micro-batches are added up in: shards where they are scattered at each use
            (ZeRO-3 and 2), whole otherwise. 0 for a single micro-batch.
        weights: In the compute dtype, kept for a step: ZeRO-2 and 1.
        kept: What the backward pass of one micro-batch needs, of all layers that it goes through.
        slots: Inputs and gradients that wait in a pipeline.
        layers: The last layer's backward pass with the gradients of all layers of one micro-batch.
        loss: The loss with its gradients.
    """

    state: int
    batch: int
    sums: int
    weights: int
    kept: int
    slots: int
    layers: int
    loss: int

    @property
    def arguments(self) -> int:
        """What lies on the device between steps."""
        return self.state + self.batch

    @property
    def temporaries(self) -> int:
        return self.sums + self.weights + self.kept + self.slots + max(self.layers, self.loss)

    @property
    def total(self) -> int:
        return self.arguments + self.temporaries


def step_memory(step: DecoderStep, *, moments: int = MOMENTS) -> StepMemory:
    """What `step` takes.

    Args:
        moments: Float32 numbers that the optimizer keeps for each parameter.
    """
    stored = sum(array.stored for array in step.arrays)
    summed = step.micro_batches > 1 or step.size("stage") > 1
    return StepMemory(
        state=(1 + moments) * FLOAT32 * stored,
        batch=(5 if step.packed else 3) * 4 * step.tokens * step.micro_batches,
        sums=sum(_gradient(step, array, step.layers_of(array)[1]) for array in step.arrays) if summed else 0,
        weights=sum(_weight(step, array) for array in step.arrays),
        kept=sum(n * _kept_of_layer(step, mixture) for n, mixture in zip(step.layers_of_pass, (False, True)) if n),
        slots=_slots(step),
        layers=_layers(step),
        loss=_loss(step),
    )


def _gradient(step: DecoderStep, array: StoredArray, layers: int) -> int:
    """Of `layers` layers of an array, or of a table, as it is added up."""
    whole = array.each * (layers if array.stacked else 1)
    if step.zero == "1":
        return FLOAT32 * whole
    return FLOAT32 * (whole // step.ways(array.gathered))


def _weight(step: DecoderStep, array: StoredArray) -> int:
    if step.zero == "3" or not array.gathered:
        return 0
    return step.compute_bytes * array.each * (step.layers_of(array)[1] if array.stacked else 1)


def _kept_of_layer(step: DecoderStep, mixture: bool) -> int:
    """What one layer keeps of its forward pass for its backward pass, by the rematerialisation policy."""
    model, tensor, tokens, width = step.model, step.size("tensor"), step.tokens, step.compute_bytes
    residual = width * tokens * model.embed // tensor
    if step.task.remat == "full":
        return residual
    heads, kv_heads = local_heads(step)
    projected = width * tokens * model.head_size * (2 * heads + 2 * kv_heads)
    wide, gated = _feed_forward(step, mixture)
    products, steps = (2, 7) if gated else (1, 4)
    experts = _ExpertRows.of(step) if mixture else None
    if step.task.remat == "products":
        kept = 3 * residual + projected + products * wide
        return kept if experts is None else kept + experts.arrived + experts.laid_out + products * experts.hidden
    # Besides: both gathered inputs, the steps of the activation function, of the rotation, and of the norms in float32.
    kept = 2 * tensor * residual + 10 * residual + 2 * projected + steps * wide
    return kept if experts is None else kept + experts.arrived + 2 * experts.laid_out + steps * experts.hidden


def _feed_forward(step: DecoderStep, mixture: bool) -> tuple[int, bool]:
    """Bytes of the hidden features of the feed-forward that all tokens go through, and whether it is gated."""
    model, moe = step.model, step.model.feed_forward
    each = step.compute_bytes * step.tokens // step.size("tensor")
    if not mixture or moe is None:
        return each * model.ffn, model.gated
    return each * moe.shared, model.gated if moe.gated is None else moe.gated


@dataclasses.dataclass(frozen=True)
class _ExpertRows:
    """Bytes of the rows that a device's experts work on at a time, whatever their loads.

    Attributes:
        arrived: As they come from other devices; 0 without an exchange.
        laid_out: By expert, each beginning at a tile's first row.
        hidden: The experts' hidden features of these.
    """

    arrived: int
    laid_out: int
    hidden: int

    @classmethod
    def of(cls, step: DecoderStep) -> "_ExpertRows":
        moe, tensor, width = step.model.feed_forward, step.size("tensor"), step.compute_bytes
        assert moe is not None
        arrived = step.exchange_buffer * tensor
        experts, rows = moe.experts // step.size("expert"), arrived or step.assignments * tensor
        rows = aligned_rows(rows, experts, choose_tile(_TARGET, rows=rows, groups=experts))
        hidden = rows * (moe.ffn or step.model.ffn) // tensor
        return cls(width * arrived * step.model.embed, width * rows * step.model.embed, width * hidden)

    def backward(self, gated: bool) -> int:
        """The most that is alive at a time: rows and gradients as they arrive and as they are laid out, or hidden features."""
        return 2 * self.laid_out + max(2 * self.arrived, (3 if gated else 2) * self.hidden)


def _layers(step: DecoderStep) -> int:
    """The gradients of one micro-batch, all layers of a pass, and the backward pass of one more layer, of the larger kind."""
    stacked = [array for array in step.arrays if array.stacked]
    gradients = sum(_gradient(step, array, step.layers_of(array)[0]) for array in stacked)
    turned = 2 * FLOAT32 * sum(array.stored for array in stacked if array.turned) if step.zero == "3" else 0
    kinds = (mixture for count, mixture in zip(step.layers_of_pass, (False, True)) if count)
    return gradients + turned + max(_layer(step, mixture) for mixture in kinds)


def _layer(step: DecoderStep, mixture: bool) -> int:
    """The backward pass of one layer."""
    model, tensor, tokens, width = step.model, step.size("tensor"), step.tokens, step.compute_bytes
    of_layer = _elements_of_layer(step, mixture)
    # Twice, since the next layer's are gathered, and the last layer's scattered, meanwhile. Those of experts are scattered before
    # the next come; but an exchange adds up those of its rounds.
    weights = 2 * (width if step.zero == "3" else 0) * of_layer
    weights += (1 if mixture and not step.exchange_buffer else 2) * (FLOAT32 if step.zero != "1" else 0) * of_layer
    if mixture and step.held and step.zero == "1":
        # Grouped products read a copy of the layer's slice.
        weights += (width + FLOAT32) * of_layer
    heads, kv_heads = local_heads(step)
    hidden, gated = _feed_forward(step, mixture)
    wide = (5 if gated else 3) * hidden
    attended = 4 * width * tokens * model.head_size * (heads + kv_heads)
    # Gathered along positions, rows are turned round, there and back.
    copies = 7 if tensor > 1 and step.micro_rows > 1 and not mixture else 3
    taken = weights + wide + attended + copies * width * tokens * model.embed
    return taken + _ExpertRows.of(step).backward(gated) if mixture else taken


def _elements_of_layer(step: DecoderStep, mixture: bool) -> int:
    """Of the weights of one layer, as a device computes with them."""
    of_place: dict[tuple[int, int], int] = {}
    for array in step.arrays:
        if array.stacked:
            of_place[array.place] = of_place.get(array.place, 0) + array.each
    stacks = step.model.stacks
    return max(size for (n, place), size in of_place.items() if stacks[n][0][place].mixture == mixture)


def _loss(step: DecoderStep) -> int:
    """The head whole, its gradient in float32 (added up over chunks, then once more turned round), a chunk's logits."""
    rows = model_rows(step)
    table, tokens = rows * step.model.embed, step.passes.loss_tokens
    chunk = chunk_tokens_within(_TARGET.traits.logits_bytes, tokens=tokens, vocab=rows)
    logits = (2 * FLOAT32 + step.compute_bytes) * chunk * rows
    head = step.compute_bytes * table if step.zero == "3" else 0
    states = 2 * step.compute_bytes * tokens * step.model.embed
    if chunk >= tokens:
        return max(head + logits, FLOAT32 * table) + states
    return head + 2 * FLOAT32 * table + logits + states


def model_rows(step: DecoderStep) -> int:
    """Rows of the vocabulary on a device."""
    return step.model.vocab_rows // step.size("tensor")


def _slots(step: DecoderStep) -> int:
    return step.passes.slots * step.compute_bytes * step.tokens * step.model.embed // step.size("tensor")
