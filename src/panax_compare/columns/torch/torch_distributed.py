"""PyTorch on several processes: DDP, FSDP2, or tensor parallelism of the same model, over Gloo or NCCL."""

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ...measure.job import ColumnJob
from ...workload.compared_work import Batch, ComparedWork
from .. import RunningColumn
from .torch_device import make_running_column, torch_dtype
from .torch_eager import build, compute_loss, make_optimizer, to_tensors

COLUMN_PARALLEL_LAYERS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1")
ROW_PARALLEL_LAYERS = ("o_proj", "down_proj", "fc2")


def data_parallel(module: torch.nn.Module, mesh: DeviceMesh, mixed: bool) -> torch.nn.Module:
    """Replicate the model in each process; gradients are averaged during the backward pass."""
    return DistributedDataParallel(module, device_mesh=mesh)


def fully_sharded(module: torch.nn.Module, mesh: DeviceMesh, mixed: bool) -> torch.nn.Module:
    """Shard every parameter over the processes; a layer's parameters are gathered when it runs."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if mixed else None
    options: dict[str, Any] = {"mesh": mesh, **({"mp_policy": policy} if policy else {})}
    for layer in find_layers(module):
        fully_shard(layer, **options)
    fully_shard(module, **options)
    return module


def tensor_parallel(module: torch.nn.Module, mesh: DeviceMesh, mixed: bool) -> torch.nn.Module:
    """Shard heads and columns of the feed-forward over the processes; all other parameters are replicated."""
    for layer in find_layers(module):
        plan = {}
        for name, part in layer.named_modules():
            if isinstance(part, torch.nn.Linear):
                kind = name.rpartition(".")[2]
                plan[name] = ColwiseParallel() if kind in COLUMN_PARALLEL_LAYERS else RowwiseParallel()
        parallelize_module(layer, mesh, plan)
    return module


LAYOUTS: dict[str, Callable[..., torch.nn.Module]] = {
    "replica": data_parallel,
    "fsdp": fully_sharded,
    "tensor": tensor_parallel,
}


def find_layers(module: torch.nn.Module) -> torch.nn.ModuleList:
    """Return the list of a model's blocks: its longest module list."""
    return max((part for part in module.modules() if isinstance(part, torch.nn.ModuleList)), key=len)


def split_parameter_groups(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Split the optimizer's groups into distributed and plain tensors: one fused update can't handle both."""
    optimizer.param_groups = [
        {**group, "params": params}
        for group in optimizer.param_groups
        for kind in (True, False)
        if (params := [p for p in group["params"] if isinstance(p, DTensor) == kind])
    ]
    return optimizer


def prepare(work: ComparedWork, layout: str) -> RunningColumn:
    """Prepare a step like that of a single process; each process gets its rows of a batch, or, for tensor
    parallelism, all rows."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    job = ColumnJob.from_environment()
    distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"tcp://127.0.0.1:{job.port}",
        rank=job.rank,
        world_size=job.processes,
    )
    if device == "cuda":
        torch.cuda.set_device(job.rank)
    mixed = work.precision.is_mixed
    mesh = init_device_mesh(device, (job.processes,))
    module = LAYOUTS[layout](build(work).to(device), mesh, mixed)
    optimizer = split_parameter_groups(make_optimizer(work, module))
    autocast = mixed and layout != "fsdp"

    def put(batch: Batch) -> dict[str, torch.Tensor]:
        dtype = torch_dtype(work.precision.stored)
        rows = batch if layout == "tensor" else {name: job.local_rows(leaf) for name, leaf in batch.items()}
        return {
            name: leaf.to(device, dtype if name == "image" else leaf.dtype) for name, leaf in to_tensors(rows).items()
        }

    def loss_in_precision(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            return compute_loss(module, batch)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_in_precision(batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return make_running_column(work, device, module, put, step, loss_in_precision)
