"""The bytes that a decoder's training step takes on each device, by formula: what is kept, and the largest moment on top of it.

An estimate, to choose a layout by: compilers decide what shares a buffer. `tests/aot/test_memory.py` says how far it is from what
XLA plans for an H100. Attention is taken to keep no scores, whatever kernel runs.
"""

import dataclasses
import math

from ..kernels.cross_entropy import LOGITS_BUDGET_BYTES, chunk_tokens_within
from .communication import FLOAT32
from .decoder_step import DecoderStep, StoredArray, local_heads

MOMENTS = 2
"""Numbers that AdamW keeps for each parameter, in float32."""


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


def step_memory(step: DecoderStep, *, moments: int = MOMENTS, platform: str = "gpu") -> StepMemory:
    """What `step` takes.

    Args:
        moments: Float32 numbers that the optimizer keeps for each parameter.
    """
    stored = sum(array.stored for array in step.arrays)
    summed = step.micro_batches > 1 or step.size("stage") > 1
    return StepMemory(
        state=(1 + moments) * FLOAT32 * stored,
        batch=(5 if step.packed else 3) * 4 * step.tokens * step.micro_batches,
        sums=sum(_gradient(step, array, step.passes.held) for array in step.arrays) if summed else 0,
        weights=sum(_weight(step, array) for array in step.arrays),
        kept=step.passes.layers * _kept_of_layer(step),
        slots=_slots(step),
        layers=_layers(step),
        loss=_loss(step, platform),
    )


def _gradient(step: DecoderStep, array: StoredArray, layers: int) -> int:
    """Of `layers` layers of an array, or of a table, as it is added up."""
    whole = _computed(step, array, layers)
    if step.zero == "1":
        return FLOAT32 * whole
    return FLOAT32 * (whole // step.ways(array.gathered))


def _weight(step: DecoderStep, array: StoredArray) -> int:
    if step.zero == "3" or not array.gathered:
        return 0
    return step.compute_bytes * _computed(step, array, step.passes.held)


def _computed(step: DecoderStep, array: StoredArray, layers: int) -> int:
    """Elements of `layers` of the model's layers of an array, as a device computes with them: whole over fsdp."""
    if not array.stacked:
        return array.each
    return math.ceil(array.each * array.layers * layers / step.model.num_layers)


def _kept_of_layer(step: DecoderStep) -> int:
    """What one layer keeps of its forward pass for its backward pass, by the rematerialisation policy."""
    model, tensor, tokens, width = step.model, step.size("tensor"), step.tokens, step.compute_bytes
    residual = width * tokens * model.embed // tensor
    if step.task.remat == "full":
        return residual
    heads, kv_heads = local_heads(step)
    projected = width * tokens * model.head_size * (2 * heads + 2 * kv_heads)
    wide = width * tokens * model.ffn // tensor
    if step.task.remat == "products":
        return 3 * residual + projected + (2 if model.gated else 1) * wide
    # Besides: both gathered inputs, the steps of the activation function, of the rotation, and of the norms in float32.
    return 2 * tensor * residual + 10 * residual + 2 * projected + (7 if model.gated else 4) * wide


def _layers(step: DecoderStep) -> int:
    """The gradients of one micro-batch, all layers of a pass, and the backward pass of one more layer."""
    model, tensor, tokens, width = step.model, step.size("tensor"), step.tokens, step.compute_bytes
    stacked = [array for array in step.arrays if array.stacked]
    gradients = sum(_gradient(step, array, step.passes.layers) for array in stacked)
    turned = 2 * FLOAT32 * sum(array.stored for array in stacked if array.turned) if step.zero == "3" else 0
    of_layer = sum(array.each * array.layers for array in stacked) // model.num_layers
    # Twice, since the next layer's are gathered, and the last layer's scattered, meanwhile.
    weights = 2 * (width if step.zero == "3" else 0) * of_layer
    weights += 2 * (FLOAT32 if step.zero != "1" else 0) * of_layer
    heads, kv_heads = local_heads(step)
    wide = (5 if model.gated else 3) * width * tokens * model.ffn // tensor
    attended = 4 * width * tokens * model.head_size * (heads + kv_heads)
    # Gathered along positions, rows are turned round, there and back.
    copies = 7 if tensor > 1 and step.micro_rows > 1 else 3
    return gradients + turned + weights + wide + attended + copies * width * tokens * model.embed


def _loss(step: DecoderStep, platform: str) -> int:
    """The head whole, its gradient in float32 (added up over chunks, then once more turned round), a chunk's logits."""
    rows = model_rows(step)
    table, tokens = rows * step.model.embed, step.passes.loss_tokens
    chunk = chunk_tokens_within(LOGITS_BUDGET_BYTES[platform], tokens=tokens, vocab=rows)
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
