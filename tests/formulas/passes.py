"""How often one device runs what in a training step: once per micro-batch, or once per tick of a pipeline."""

import dataclasses
import functools

from panax.parallel.schedules import Pipeline, PipelineSchedule, build_schedule


@dataclasses.dataclass(frozen=True)
class Ticks:
    """What a pipeline's schedule comes to, on every stage alike.

    Attributes:
        forward: Ticks in which some stage goes forward; all run the same program. So for the others.
        slots: Inputs and gradients that a stage keeps.
    """

    forward: int
    backward: int
    embedded: int
    embedded_back: int
    losses: int
    looked_up_or_lost: int
    sent: int
    slots: int

    @classmethod
    def of(cls, schedule: PipelineSchedule) -> "Ticks":
        forward, backward = _count(schedule, "forward"), _count(schedule, "backward")
        return cls(
            forward=forward,
            backward=backward,
            embedded=_count(schedule, "forward_first"),
            embedded_back=_count(schedule, "backward_first"),
            losses=_count(schedule, "loss"),
            looked_up_or_lost=_count(schedule, "forward_first", "loss"),
            # A last tick that is no loop sends nothing: nobody receives it.
            sent=forward + backward - (schedule.phases[-1][2] == 1),
            # One more of each than the schedule needs: what nobody waits for is written there.
            slots=schedule.slots + schedule.gradient_slots + 2,
        )


@functools.lru_cache(maxsize=1024)
def pipeline_ticks(pipeline: Pipeline, stages: int, micro_batches: int) -> Ticks:
    """The counts of a schedule, without building all of a long one.

    Once a pipeline is full each further group of `stages` micro-batches adds the same.

    >>> pipeline_ticks(Pipeline(), 4, 100).forward
    103
    """
    groups, rest = divmod(micro_batches, stages)
    short = groups - 4 if groups > 5 else 0
    first = _built(pipeline, stages, (groups - short) * stages + rest)
    if not short:
        return first
    following = _built(pipeline, stages, (groups - short + 1) * stages + rest)
    counts = {
        field.name: getattr(first, field.name) + short * (getattr(following, field.name) - getattr(first, field.name))
        for field in dataclasses.fields(Ticks)
    }
    return Ticks(**counts)


@functools.lru_cache(maxsize=1024)
def _built(pipeline: Pipeline, stages: int, micro_batches: int) -> Ticks:
    return Ticks.of(build_schedule(pipeline, stages=stages, micro_batches=micro_batches))


def _count(schedule: PipelineSchedule, *what: str) -> int:
    """The ticks of all phases in which some stage does one of these at some time: all stages then run it in each."""
    start = found = 0
    for *_, count in schedule.phases:
        rows = schedule.rows[start : start + count]
        found += count if any(row[name] for name in what for stages in rows for row in stages) else 0
        start += count
    return found


@dataclasses.dataclass(frozen=True)
class Passes:
    """How often one device runs what in a step, whether it has work there or waits for others who do.

    Attributes:
        piped: Whether there are stages.
        forward: Passes through `layers` layers that are not differentiated.
        differentiated: Passes forward, and then backward, through as many.
        embedded: Look-ups of a micro-batch's tokens.
        embedded_back: Their backward passes.
        losses: Losses, of `loss_tokens` tokens each, with their gradients.
        looked_up_or_lost: Parts of the step in which there is a look-up, a loss or both.
        sent: Activations and gradients that are sent to a neighboring stage.
        slots: Of these that a stage keeps.
        layers: Layers of one pass.
        held: Layers with weights that a device uses in the step.
        loss_tokens: Of one loss on one device.
        alone: Whether a stage runs one unit of layers at a time: nobody then reads its result before it is differentiated.
    """

    piped: bool
    forward: int
    differentiated: int
    embedded: int
    embedded_back: int
    losses: int
    looked_up_or_lost: int
    sent: int
    slots: int
    layers: int
    held: int
    loss_tokens: int
    alone: bool

    @classmethod
    def of(
        cls,
        *,
        layers: int,
        alone: bool,
        micro_batches: int,
        stages: int,
        pipeline: Pipeline,
        tokens: int,
        tensor: int,
    ) -> "Passes":
        """
        Args:
            layers: Of one pass.
            alone: Whether they are one unit.
            tokens: Of one micro-batch on one device, outside of the residual stream.
            tensor: How often these are split within it.
        """
        if stages == 1:
            count = micro_batches
            return cls(False, 0, count, count, count, count, count, 0, 0, layers, layers, tokens, False)
        ticks = pipeline_ticks(pipeline, stages, micro_batches)
        return cls(
            piped=True,
            forward=ticks.forward,
            differentiated=ticks.backward,
            embedded=ticks.embedded,
            embedded_back=ticks.embedded_back,
            losses=ticks.losses,
            looked_up_or_lost=ticks.looked_up_or_lost,
            sent=ticks.sent,
            slots=ticks.slots,
            layers=layers,
            held=layers * pipeline.chunks,
            loss_tokens=-(-(tokens // tensor) // stages) * tensor,
            alone=alone,
        )
