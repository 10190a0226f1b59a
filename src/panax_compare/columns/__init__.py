"""The columns of a comparison: a short file each, written as its framework's users would write it.

A column's module has one function, `prepare(work) -> RunningColumn`. It is imported only in that column's
process, so that this table imports no framework. The files that a reader would have to write are named: they
are shown in the report, and counted.
"""

import dataclasses
import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any

from panax.core.errors import RecipeError, suggest_name

from ..workload.compared_work import Batch, Family

ALL: tuple[Family, ...] = ("vit", "llama", "mixtral")


@dataclasses.dataclass
class RunningColumn:
    """A column that is ready to train.

    Attributes:
        put: Sends a batch to the device, in the framework's form.
        step: Dispatches one training step; returns its loss, which may not have been computed yet.
        evaluate: Returns the loss of a batch with the current parameters, outside of training.
        wait: Blocks until the device has finished everything up to this loss.
        device: Description of the device.
        peak_bytes: Peak memory of the device so far; None if it is only known for the process (a CPU).
        product: FLOP/s of a large matmul in the work's precision.
        registers: FLOP/s of multiplications and additions on registers alone; None if they can't be measured.
        tracing_seconds: Time for tracing and compiling before the first step.
        sent_bytes: Bytes that this process sends to others in one step; None for a single process.
        notes: Remarks on this column for the reader.
    """

    put: Callable[[Batch], Any]
    step: Callable[[Any], Any]
    evaluate: Callable[[Any], Any]
    wait: Callable[[Any], None]
    device: str
    peak_bytes: Callable[[], int | None]
    product: Callable[[], float]
    registers: Callable[[], float | None] = lambda: None
    tracing_seconds: float = 0.0
    sent_bytes: Callable[[], int] | None = None
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column:
    """Static description of a column.

    Attributes:
        module: Its module in this package.
        requires: Modules that must be installed.
        install: The command that installs them.
        shares: Other files that are part of its program.
        families: Files that hold the model, for each family that the column supports; () for a library's
            model.
        model_source: Origin of the model that it trains, as text.
        unavailable_reason: Reason why it does not support the other families.
        framework: "torch" or "jax", which its process imports.
        python: Environment variable that names another interpreter, if the column needs one.
        is_panax: True if Panax runs the step: its process then sets the allocator as `panax train` does.
        processes: Number of processes that take a step together.
        devices: Number of simulated devices of each process; 1 for the machine's devices.
        layout: The mesh axis over which the model or the batch is sharded, for a distributed column.
    """

    name: str
    title: str
    module: str
    requires: tuple[str, ...]
    install: str
    shares: tuple[str, ...] = ()
    model_source: str
    families: dict[Family, tuple[str, ...]]
    unavailable_reason: str = ""
    framework: str
    is_panax: bool = False
    processes: int = 1
    devices: int = 1
    layout: str = ""
    python: str = ""

    def files(self, family: Family) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the files of this package that are this column's program, and those that are its model."""
        return (self.module, *self.shares), self.families.get(family, ())

    def missing(self) -> list[str]:
        """List the required modules that are not installed; nothing is imported."""
        if self.python:
            return [] if os.path.isfile(os.environ.get(self.python, "")) else [*self.requires]
        return [name for name in self.requires if importlib.util.find_spec(name) is None]

    def prepare(self, work: Any) -> RunningColumn:
        """Import the framework, build the model, and compile as far as possible. Called only in the column's
        process."""
        prepare = importlib.import_module(f"{__name__}.{self.module}").prepare
        return prepare(work, self.layout) if self.layout else prepare(work)


_TRANSFORMERS: dict[Family, tuple[str, ...]] = dict.fromkeys(ALL, ())
_TORCH = "pip install torch transformers"

COLUMNS: tuple[Column, ...] = (
    Column(
        name="torch_eager",
        title="PyTorch eager",
        module="torch.torch_eager",
        model_source="the class of transformers, unchanged",
        requires=("torch", "transformers"),
        install=_TORCH,
        families={**_TRANSFORMERS, "dlrm": ("torch.torch_dlrm",)},
        framework="torch",
    ),
    Column(
        name="torch_compile",
        title="torch.compile",
        module="torch.torch_compile",
        shares=("torch.torch_eager",),
        model_source="the class of transformers, unchanged",
        requires=("torch", "transformers"),
        install=_TORCH,
        families=_TRANSFORMERS,
        framework="torch",
    ),
    Column(
        name="torch_xla",
        title="PyTorch/XLA",
        module="torch.torch_xla",
        shares=("torch.torch_eager",),
        model_source="the class of transformers, unchanged",
        requires=("torch", "transformers", "torch_xla"),
        install="pip install 'torch_xla[tpu]' (or the wheel of the torch_xla releases that fits your torch)",
        families=_TRANSFORMERS,
        framework="torch",
    ),
    Column(
        name="plain_jax",
        title="Plain JAX",
        module="jax.plain_jax",
        shares=("jax.optax_optimizer",),
        model_source="written by hand in jax.numpy",
        requires=("jax", "optax"),
        install="pip install jax optax",
        families={"vit": ("jax.plain_vit",), "llama": ("jax.plain_decoder",), "mixtral": ("jax.plain_decoder",)},
        framework="jax",
    ),
    Column(
        name="flax",
        title="Flax NNX",
        module="jax.flax_nnx",
        shares=("jax.optax_optimizer",),
        model_source="written by hand of Flax's layers",
        requires=("jax", "flax", "optax"),
        install="pip install 'panax-jax[flax]'",
        families={"vit": ("jax.flax_vit",), "llama": ("jax.flax_decoder",)},
        unavailable_reason="Flax has no mixture of experts, and none is written here",
        framework="jax",
    ),
    Column(
        name="adapted",
        title="PyTorch adapted",
        module="ours.adapted_torch",
        shares=("torch.torch_eager",),
        model_source="the class of transformers, unchanged",
        requires=("jax", "torch", "transformers"),
        install="pip install 'panax-jax[torch]' transformers",
        families=_TRANSFORMERS,
        framework="jax",
        is_panax=True,
    ),
    Column(
        name="panax",
        title="Panax",
        module="ours.panax_own",
        model_source="Panax's own",
        requires=("jax",),
        install="pip install panax-jax",
        families={**_TRANSFORMERS, "dlrm": ("ours.panax_dlrm",)},
        framework="jax",
        is_panax=True,
    ),
)

TABLE_COLUMNS: tuple[Column, ...] = (
    Column(
        name="torchrec",
        title="TorchRec's FBGEMM",
        module="torch.torch_fbgemm",
        shares=("torch.torch_dlrm",),
        model_source="FBGEMM's table-batched embeddings, as TorchRec uses them",
        requires=("torch", "fbgemm_gpu"),
        install="an environment with torch==2.13.0, numpy, safetensors, psutil and, by `pip install --no-deps`, "
        "fbgemm-gpu-cpu==1.8.0; name its python in $PANAX_TORCHREC_PYTHON",
        families={"dlrm": ("torch.torch_fbgemm",)},
        unavailable_reason="it is for tables",
        framework="torch",
        python="PANAX_TORCHREC_PYTHON",
    ),
)
"""Columns of tables only; other workloads do not use them."""

WAYS = 2
"""Number of processes, or simulated devices, over which the distributed columns shard their work."""

_DENSE: dict[Family, tuple[str, ...]] = {"vit": (), "llama": ()}
_LAYOUTS: tuple[tuple[str, str, str, dict[Family, tuple[str, ...]]], ...] = (
    ("replica", "ddp", "DDP", _TRANSFORMERS),
    ("fsdp", "fsdp2", "FSDP2", _TRANSFORMERS),
    ("tensor", "tensor", "tensor parallel", _DENSE),
)


def _distributed(layout: str, name: str, title: str, families: dict[Family, tuple[str, ...]]) -> tuple[Column, ...]:
    """Return PyTorch's and Panax's columns of one layout: each on processes, and Panax on simulated devices
    too."""
    why_not = "the column of PyTorch's tensor parallelism does not support mixtures of experts"
    ours = Column(
        name=f"panax_{layout}",
        title=f"Panax {layout}={WAYS}",
        module="ours.panax_distributed",
        shares=("ours.panax_own",),
        model_source="Panax's own",
        requires=("jax",),
        install="pip install panax-jax",
        families=families,
        unavailable_reason=why_not,
        framework="jax",
        is_panax=True,
        processes=WAYS,
        layout=layout,
    )
    simulated = dataclasses.replace(
        ours, name=f"{ours.name}_simulated", title=f"{ours.title}, simulated", processes=1, devices=WAYS
    )
    theirs = Column(
        name=f"torch_{name}",
        title=f"PyTorch {title}",
        module="torch.torch_distributed",
        shares=("torch.torch_eager",),
        model_source="the class of transformers, unchanged",
        requires=("torch", "transformers"),
        install=_TORCH,
        families=families,
        unavailable_reason=why_not,
        framework="torch",
        processes=WAYS,
        layout=layout,
    )
    return theirs, ours, simulated


DISTRIBUTED: tuple[Column, ...] = tuple(column for layout in _LAYOUTS for column in _distributed(*layout))


EVERY: tuple[Column, ...] = (*COLUMNS, *TABLE_COLUMNS, *DISTRIBUTED)
"""All columns, in the order of the report."""


def find_column(name: str) -> Column:
    """Return the column of this name.

    Raises:
        RecipeError: The name is unknown; the message has the nearest one.
    """
    for column in EVERY:
        if column.name == name:
            return column
    names = [column.name for column in EVERY]
    raise RecipeError(f"unknown column {name!r}; {suggest_name(name, names)}; columns are {', '.join(names)}")


def select_columns(names: Sequence[str]) -> list[Column]:
    """Return the columns of these names, or all columns of one process, in the order of the tables.

    Raises:
        RecipeError: A name is unknown, or appears twice.
    """
    if len(set(names)) != len(names):
        raise RecipeError(f"columns={','.join(names)} names one twice")
    requested = {find_column(name).name for name in names}
    return [column for column in EVERY if column.name in requested] if requested else list(COLUMNS)
