"""Panax on several processes, or on simulated devices of one: the layout is one entry of the mesh."""

import dataclasses
import functools

import jax

from panax.mesh import MeshShape
from panax.plan.collectives import count_collectives
from panax.run import PlainStep

from ...measure.job import ColumnJob
from ...workload.compared_work import ComparedWork
from .. import RunningColumn
from .panax_own import add_token_mask, train


def prepare(work: ComparedWork, layout: str) -> RunningColumn:
    """Prepare the same step as on one device, except for the mesh."""
    job = ColumnJob.from_environment()
    if job.processes > 1:
        address = f"127.0.0.1:{job.port}"
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, job.processes, job.rank, coordinator_bind_address=address)
    shape = dataclasses.replace(MeshShape(fsdp=1), **{layout: jax.device_count()})
    running, stepper = train(work, shape, jax.devices())
    if job.processes == 1:
        running.sent_bytes = functools.cache(lambda: count_sent_bytes(stepper, work))
    return running


def count_sent_bytes(stepper: PlainStep, work: ComparedWork) -> int:
    """Count the bytes that each device sends in a step, from the collectives of the compiled program."""
    program = stepper.compiled.lower(add_token_mask(work, work.batches()[0])).compile().as_text()
    return sum(found.total_wire_bytes for found in count_collectives(program, stepper.compiled.placement.sizes))
