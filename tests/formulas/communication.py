"""The bytes that each device sends in one training step of a decoder, by formula: from the algorithm, not from a program.

`docs/parallelism/communication.md` derives each formula; `tests/aot` compares them with what compiled programs send. As
everywhere in this room, a collective over n devices is counted as a ring sends it: gathering or scattering an array of B bytes,
or exchanging all parts of it, sends B·(n-1)/n from each device; an all-reduce twice that; a permutation B.

Left out: scalars (losses, metrics, the gradient's norm), and how many tokens chose each expert.
"""

import dataclasses
from collections.abc import Iterable

from panax.kernels.attention.mask import MaskRule
from panax.mesh.rules import MeshAxes
from panax.parallel.context import LocalSizes
from panax.parallel.context_choice import choose_context_attention
from panax.parallel.ring import ring_bytes
from panax.parallel.ulysses import ulysses_bytes

from .decoder_step import DecoderStep, StoredArray, local_heads, mesh_order
from .held import windows_of_chunks
from .moves import ANSWERS, layer_moves

FLOAT32 = 4
"""Bytes of a parameter, and of its gradient wherever it travels."""


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What one device sends in one step, for one purpose.

    Attributes:
        kind: As in `collectives.KINDS`.
        axes: The mesh axes that it goes over, in the mesh's order.
        wire_bytes: All of a step.
        purpose: What it is for: `layer weights`, `activations`.
    """

    kind: str
    axes: MeshAxes
    wire_bytes: int
    purpose: str


def decoder_traffic(step: DecoderStep) -> list[Traffic]:
    """What each device sends in `step`; of stages that differ, the one that sends most.

    >>> from panax.models import DecoderConfig, DecoderTask
    >>> task = DecoderTask(model=DecoderConfig(vocab_size=512), compute_dtype="bfloat16")
    >>> step = DecoderStep(task=task, mesh={"fsdp": 8}, rows=8, length=1024)
    >>> sorted({(traffic.kind, traffic.axes) for traffic in decoder_traffic(step)})
    [('all-gather', ('fsdp',)), ('all-reduce', ('fsdp',)), ('reduce-scatter', ('fsdp',))]
    """
    ledger = _Ledger(step)
    _weights(step, ledger)
    _once_a_step(step, ledger)
    _residual_stream(step, ledger)
    _loss(step, ledger)
    _attention(step, ledger)
    _stages(step, ledger)
    merged: dict[tuple[str, MeshAxes, str], int] = {}
    for one in ledger.found:
        key = one.kind, one.axes, one.purpose
        merged[key] = merged.get(key, 0) + one.wire_bytes
    return [Traffic(kind, axes, size, purpose) for (kind, axes, purpose), size in merged.items() if size]


def traffic_totals(traffic: Iterable[Traffic]) -> dict[tuple[str, MeshAxes], int]:
    """Bytes by kind and mesh axes."""
    totals: dict[tuple[str, MeshAxes], int] = {}
    for one in traffic:
        totals[one.kind, one.axes] = totals.get((one.kind, one.axes), 0) + one.wire_bytes
    return totals


class _Ledger:
    """Collects traffic. Sizes are bytes of the whole array on a device; axes of size 1 send nothing."""

    def __init__(self, step: DecoderStep):
        self.step = step
        self.found: list[Traffic] = []

    def add(self, kind: str, axes: Iterable[str], purpose: str, size: int, times: int = 1) -> None:
        axes = mesh_order(self.step, axes)
        ways = self.step.ways(axes)
        if ways > 1 and size * times:
            share = {"all-reduce": 2 * (ways - 1) / ways, "collective-permute": 1.0}.get(kind, (ways - 1) / ways)
            self.found.append(Traffic(kind, axes, round(size * share * times), purpose))


def _weights(step: DecoderStep, ledger: _Ledger) -> None:
    """Weights in the compute layout and dtype, gradients in float32 in the storage layout."""
    passes, zero, wide = step.passes, step.zero, FLOAT32
    for array in step.arrays:
        narrow = _gathered_bytes(step, array)
        if array.stacked:
            count = step.layers_of(array)
            purpose, of_pass, held = "layer weights", array.each * count[0], array.each * count[1]
            again = 1 if _not_run_before(step, array.name) else 2
            gathers, scatters = passes.forward + again * passes.differentiated, passes.differentiated
        else:
            purpose, of_pass, held = "tables", array.each, array.each
            gathers, scatters = _uses_of_table(step, array.name)
        once = {"gather": zero != "3", "scatter": zero == "1"}
        gathered, gathers = (held, 1) if once["gather"] else (of_pass, gathers)
        scattered, scatters = (held, 1) if once["scatter"] else (of_pass, scatters)
        ledger.add("all-gather", array.gathered, purpose, narrow * gathered, gathers)
        ledger.add("reduce-scatter", array.gathered, purpose, wide * scattered, scatters)
        if array.travels:
            gathered_elements = array.each // step.ways(array.gathered) * step.layers_of(array)[1]
            ledger.add(
                "all-to-all", ("stage",), "layers to stages", gathered_elements * (wide if zero == "3" else narrow)
            )
            ledger.add("all-to-all", ("stage",), "layers to stages", gathered_elements * wide)


def _gathered_bytes(step: DecoderStep, array: StoredArray) -> int:
    """Of an element as it is gathered: a router multiplies in float32."""
    return FLOAT32 if array.name.endswith(".router.w") else step.compute_bytes


def _not_run_before(step: DecoderStep, name: str) -> bool:
    """Whether a weight's product is left out of the forward pass that comes before a differentiated one.

    So it is if the pass is one layer with an unread result: `full` computes all of it again anyhow, the other policies
    need all but the last product.
    """
    if not step.passes.alone:
        return False
    if step.task.remat == "full":
        # A router's losses are read, and so all that comes before it is run.
        return not step.layers_of_pass[1] or ".experts." in name or ".shared." in name
    return name.endswith(".w_down") and not step.model.post_norms


def _uses_of_table(step: DecoderStep, name: str) -> tuple[int, int]:
    """(gathers, scatters) of an embedding, a head or both in one, where each use has its own."""
    passes = step.passes
    if name == "head.table":
        return passes.losses, passes.losses
    if name == "embedding.table" and step.model.tied:
        # Compilers see that the look-up and the loss gather the same, and do it once.
        return passes.looked_up_or_lost, passes.embedded_back + passes.losses
    return passes.embedded, passes.embedded_back


def _once_a_step(step: DecoderStep, ledger: _Ledger) -> None:
    """Gradients, summed over the mesh axes on which their parameters are stored alike."""
    for array in step.arrays:
        ledger.add("all-reduce", array.apart, "gradients once a step", FLOAT32 * array.stored)


def _residual_stream(step: DecoderStep, ledger: _Ledger) -> None:
    """What layers send for activations, move by move; the embedding's sequence over `tensor`."""
    passes, size = step.passes, step.compute_bytes * step.tokens * step.model.embed
    for count, mixture in zip(step.layers_of_pass, (False, True)):
        for move in layer_moves(step, mixture=mixture) if count else ():
            for kind, times in zip((move.kind, ANSWERS[move.kind]), move.times(step)):
                if move.ring and step.rules.overlap:
                    # In as many sends as there are other devices, of a part each: as many bytes.
                    tensor, kind = step.size("tensor"), "collective-permute"
                    ledger.add(kind, move.axes, move.purpose, move.size // tensor * (tensor - 1), times * count)
                else:
                    ledger.add(kind, move.axes, move.purpose, move.size, times * count)
    ledger.add("reduce-scatter", ("tensor",), "embedding", size, passes.embedded)
    ledger.add("all-gather", ("tensor",), "embedding", size, passes.embedded_back)


def _loss(step: DecoderStep, ledger: _Ledger) -> None:
    """The hidden states over `tensor`, and four float32 numbers of each token: maximum, sum, the target's logit, ties."""
    passes = step.passes
    size = step.compute_bytes * passes.loss_tokens * step.model.embed
    ledger.add("all-gather", ("tensor",), "loss", size, passes.losses)
    ledger.add("reduce-scatter", ("tensor",), "loss", size, passes.losses)
    ledger.add("all-reduce", ("tensor",), "loss", 4 * FLOAT32 * passes.loss_tokens, passes.losses)


def _attention(step: DecoderStep, ledger: _Ledger) -> None:
    """Rows over `context`: keys and values around a ring, or heads exchanged for positions."""
    if step.size("context") == 1:
        return
    passes = step.passes
    sent = [_ring_or_ulysses(step, window) for window in _windows(step)]
    for kind in sorted({kind for parts in sent for part in parts.values() for kind in part}):

        def of(pass_: str, kind: str = kind) -> int:
            return sum(parts[pass_].get(kind, 0) for parts in sent)

        again = {"none": 0, "products": of("again"), "full": of("forward")}[step.task.remat]
        unread = passes.alone and step.task.remat == "full" and not step.layers_of_pass[1]
        before = 0 if unread else of("forward")
        each = before + again + of("backward")
        total = passes.forward * of("forward") + passes.differentiated * each
        ledger.found.append(Traffic(kind, ("context",), total, "attention"))


def _windows(step: DecoderStep) -> list[int]:
    """Of the layers of one pass; in a pipeline, of the stage with the widest windows."""
    stages = step.size("stage")
    if stages == 1:
        return [kind.window for kind in step.model.kinds]
    held = windows_of_chunks(step.model, stages, step.task.pipeline.chunks)
    return list(max(held, key=lambda windows: sum(window or step.length for window in windows)))


def _ring_or_ulysses(step: DecoderStep, window: int) -> dict[str, dict[str, int]]:
    """Bytes of one layer by kind: `forward`, `backward`, and `again` where products and attention's output are kept."""
    heads, kv_heads = local_heads(step)
    context, head_dim, width = step.size("context"), step.model.head_size, step.compute_bytes
    sizes = LocalSizes(
        batch=step.micro_rows,
        local_seq=step.length // context,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        itemsize=width,
        packed=step.packed,
    )
    chosen = choose_context_attention(heads, kv_heads, context, step.task.context_attention)
    if chosen == "ring":
        ring = ring_bytes(sizes, context, mask=MaskRule(causal=True, window=window or None))
        # The logsumexp is not kept, and so the output too is computed once more for the backward pass.
        forward, backward = {"collective-permute": ring.forward}, {"collective-permute": ring.backward}
        return {"forward": forward, "again": forward, "backward": backward}
    exchanged = ulysses_bytes(dataclasses.replace(sizes, packed=False), context)
    output = step.tokens * heads * head_dim * width // context * (context - 1)
    segments = (context - 1) * step.tokens * 4 if step.packed else 0
    return {
        "forward": {"all-to-all": exchanged.forward, "all-gather": segments},
        "again": {"all-to-all": exchanged.forward - output, "all-gather": segments},
        "backward": {"all-to-all": exchanged.backward},
    }


def _stages(step: DecoderStep, ledger: _Ledger) -> None:
    """Activations and their gradients from stage to stage in each tick, and a finished micro-batch to all stages for its loss."""
    if step.size("stage") == 1:
        return
    passes, row = step.passes, step.compute_bytes * step.model.embed
    residual = step.tokens // step.size("tensor")
    ledger.add("collective-permute", ("stage",), "stage to stage", row * residual, passes.sent)
    shared = row * passes.loss_tokens // step.size("tensor") * step.size("stage")
    ledger.add("reduce-scatter", ("stage",), "loss over stages", shared, passes.losses)
    ledger.add("all-gather", ("stage",), "loss over stages", shared, passes.losses)
