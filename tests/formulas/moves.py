"""What one layer of a decoder sends for its activations, move by move: along the sequence, and to experts and back."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from panax.mesh.rules import MeshAxes

from .decoder_step import DecoderStep

WIDE = 4
"""Bytes of a float32 and of an int32."""

ANSWERS = {
    "all-gather": "reduce-scatter",
    "reduce-scatter": "all-gather",
    "ragged-all-to-all": "ragged-all-to-all",
}

ACTIVATIONS, EXCHANGE = "activations", "expert exchange"


@dataclasses.dataclass(frozen=True)
class Move:
    """One collective of a layer's forward pass.

    Attributes:
        size: Bytes of the whole array; of an exchange, of the rows that a device sends.
        answered: Whether a cotangent goes the other way in the backward pass.
        result: Whether it gives what `remat` does not compute again: a layer's result; of a pipeline's unit, the last layer's.
        routed: True if it comes after the router, the losses of which are read wherever a mixture is run.
        ring: Whether `rules.overlap` cuts it into sends.
    """

    kind: Literal["all-gather", "reduce-scatter", "ragged-all-to-all"]
    axes: MeshAxes
    purpose: str
    size: int
    answered: bool = True
    result: bool = False
    routed: bool = False
    ring: bool = False

    def times(self, step: DecoderStep) -> tuple[int, int]:
        """How often it is done in a step for one layer of a pass, and how often it is answered."""
        passes, remat = step.passes, step.task.remat
        unread = self.result and not step.model.post_norms
        if remat == "full":
            again = not unread
            spared = passes.alone and (self.routed or not step.layers_of_pass[1])
        else:
            again = remat == "products" and self.kind == "all-gather"
            spared = passes.alone and unread
        done = passes.forward + passes.differentiated * (1 + again - spared)
        return done, passes.differentiated * self.answered


def layer_moves(step: DecoderStep, *, mixture: bool) -> Iterator[Move]:
    """Of one dense layer, or of one with a mixture of experts."""
    model, token_bytes = step.model, step.compute_bytes * step.tokens
    latent = model.latent
    if latent is None:
        yield _gather(token_bytes * model.embed, ring=True)
    else:
        yield _gather(token_bytes * ((latent.q_rank or model.embed) + latent.kv_rank + latent.rope_dim))
    yield _scatter(token_bytes * model.embed, ring=True)
    for move in _feed_forward(step, mixture=mixture):
        yield dataclasses.replace(move, routed=mixture)


def _feed_forward(step: DecoderStep, *, mixture: bool) -> Iterator[Move]:
    model, token_bytes = step.model, step.compute_bytes * step.tokens
    moe = model.feed_forward
    if not mixture or moe is None or moe.shared:
        yield _gather(token_bytes * model.embed, ring=True)
        # Mixtures are the last layers of their units.
        inside = not mixture and any(len(run.kinds) > 1 for run in step.held)
        yield _scatter(token_bytes * model.embed, ring=True, result=not inside)
    if mixture and moe is not None:
        yield from _to_experts(step, shared=moe.shared > 0)


def exchanged_rows(step: DecoderStep) -> tuple[int, int]:
    """Bytes that a device sends in one dispatch or return of rows, and of the buffer that takes them in; or 0."""
    if not step.exchange_buffer:
        return 0, 0
    row = step.compute_bytes * step.model.embed
    return step.assignments * row, step.exchange_buffer * row


def _to_experts(step: DecoderStep, *, shared: bool) -> Iterator[Move]:
    moe, token_bytes = step.model.feed_forward, step.compute_bytes * step.tokens * step.model.embed
    assert moe is not None
    ways, tensor = step.size("expert"), step.size("tensor")
    if ways == 1:
        # What the shared expert gathers and scatters is gathered and scattered with the others': compilers do it once.
        if not shared:
            yield _gather(token_bytes)
            yield _scatter(token_bytes, result=True)
        each = WIDE * step.assignments * tensor
        yield _gather(each, answered=False)
        yield _gather(each)
        return
    rows, buffer = exchanged_rows(step)
    counts = WIDE * ways * moe.experts
    yield Move("all-gather", ("expert",), EXCHANGE, counts, answered=False)
    yield Move("ragged-all-to-all", ("expert",), EXCHANGE, rows)
    yield Move("ragged-all-to-all", ("expert",), EXCHANGE, WIDE * step.assignments)
    for size, answered in ((buffer, True), (WIDE * step.exchange_buffer, True), (WIDE * step.exchange_buffer, False)):
        yield Move("all-gather", ("tensor",), EXCHANGE, size * tensor, answered=answered)
    yield Move("reduce-scatter", ("tensor",), EXCHANGE, buffer * tensor, result=True)
    yield Move("ragged-all-to-all", ("expert",), EXCHANGE, rows, result=True)


def _gather(size: int, *, answered: bool = True, ring: bool = False) -> Move:
    return Move("all-gather", ("tensor",), ACTIVATIONS, size, answered=answered, ring=ring)


def _scatter(size: int, *, ring: bool = False, result: bool = False) -> Move:
    return Move("reduce-scatter", ("tensor",), ACTIVATIONS, size, ring=ring, result=result)
