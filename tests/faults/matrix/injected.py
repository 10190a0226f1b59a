"""In a worker that is to fail: reaches a phase, reports it, and fails there, or waits for a fault from outside.

Production code knows nothing of this: its functions are replaced by ones that do the same and then this.
"""

import ctypes
import dataclasses
import functools
import hashlib
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from panax.checkpoint import checkpointer, chunk_reader
from panax.data.text.token_source import PackedSource
from panax.models import DecoderTask
from panax.models.decoder.model import Decoder
from panax.stores.local import LocalStore

LONG = "PANAX_TEST_LONG_SAVE"
"""Seconds for which one file is written, for a long save."""

FAULT = "PANAX_TEST_FAULT"
"""The file with the fault and its process."""

OUTSIDE_SECONDS = 30.0
"""For whoever injects a fault from outside."""

WITHIN = ("forward", "optimizer")
"""Phases inside a compiled step; their places in hold.c."""

ACTIONS = {"hang in data": 0, "corrupted value": 2, "exception": 3, "out of memory": 4, "hang with the lock": 5}
"""What hold.c does; it waits for any other fault."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault of one process.

    Attributes:
        kind, phase: As in the matrix.
        process: Index of the process.
        call: In which step, counted from the process's start; or which batch.
        announce: Exists as soon as the phase was reached, and holds the process's number: a fault comes once.
        go: Made by whoever injects a fault from outside, when that is done.
    """

    kind: str
    phase: str
    process: int
    call: int
    announce: str
    go: str

    def reach(self) -> None:
        """Fail here."""
        Path(self.announce).write_text(str(os.getpid()))
        if self.kind == "exception":
            raise RuntimeError("injected")
        if self.kind == "out of memory":
            jax.block_until_ready(jnp.zeros((1 << 20, 1 << 30), jnp.float32))
        elif self.kind == "hang with the lock":
            ctypes.PyDLL(None).sleep(100_000)
        elif self.kind != "hang in data":
            end = time.monotonic() + OUTSIDE_SECONDS
            while time.monotonic() < end and not Path(self.go).exists():
                time.sleep(0.01)


def fault_of_this_process() -> Fault | None:
    """The fault that is still to come, of the worker that is to have it."""
    if FAULT not in os.environ or "PANAX_PROCESS" not in os.environ:
        return None
    fault = Fault(**json.loads(Path(os.environ[FAULT]).read_text()))
    mine = fault.process == int(os.environ["PANAX_PROCESS"])
    return fault if mine and not Path(fault.announce).exists() else None


def install(fault: Fault) -> None:
    """Have this process fail when it comes to the phase; the phase `teardown` is the recipe's hook."""
    if fault.kind == "hang in data":
        _before_batches(lambda number: _sleep_after(fault.announce))
    if fault.phase in WITHIN:
        announce, go = fault.announce.encode(), fault.go.encode()
        library().hold_at(WITHIN.index(fault.phase), fault.call, ACTIONS.get(fault.kind, 1), announce, go)
    elif fault.phase == "start":
        fault.reach()
    elif fault.phase == "restore":
        real_read = chunk_reader.Checkpoint._read_checked

        def read(*args: Any, **kwargs: Any) -> Any:
            if not Path(fault.announce).exists():
                fault.reach()
            return real_read(*args, **kwargs)

        chunk_reader.Checkpoint._read_checked = read
    elif fault.kind == "long save":
        real_write = LocalStore.write

        def write(self: LocalStore, path: str, parts: Any) -> None:
            if path.endswith(".bin") and not Path(fault.announce).exists():
                fault.reach()
                time.sleep(float(os.environ[LONG]))
            real_write(self, path, parts)

        LocalStore.write = write  # type: ignore[method-assign]
    elif fault.phase == "save":
        real_save = checkpointer.Checkpointer.save

        def save(*args: Any, **kwargs: Any) -> bool:
            # Its files are written meanwhile.
            saved = real_save(*args, **kwargs)
            if not Path(fault.announce).exists():
                fault.reach()
            return saved

        checkpointer.Checkpointer.save = save  # type: ignore[method-assign]
    elif fault.phase == "data":
        _before_batches(lambda number: fault.reach() if number == fault.call else None)


def _before_batches(call: Callable[[int], Any]) -> None:
    """Have this called, with its number, before each batch that the process draws."""
    real = PackedSource.batches_of

    def batches_of(*args: Any, **kwargs: Any) -> Any:
        for number, batch in enumerate(real(*args, **kwargs), start=1):
            call(number)
            yield batch

    PackedSource.batches_of = batches_of  # type: ignore[method-assign]


def _sleep_after(announce: str) -> None:
    while Path(announce).exists():
        time.sleep(1000)


@functools.cache
def library() -> ctypes.CDLL:
    """hold.c, compiled, its calls known to XLA."""
    source = Path(__file__).with_name("hold.c")
    digest = hashlib.sha256(source.read_bytes() + jax.__version__.encode()).hexdigest()[:16]
    made = Path(os.environ["PANAX_TEST_LIBRARY"], f"hold-{digest}.so")
    if not made.exists():
        beside = made.with_suffix(f".{os.getpid()}")
        include = f"-I{jax.ffi.include_dir()}"
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", include, str(source), "-o", str(beside)], check=True)
        os.replace(beside, made)
    loaded = ctypes.CDLL(str(made))
    for place in WITHIN:
        target = f"panax_test_{place}"
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(loaded, target)), platform="cpu")
    return loaded


@jax.custom_jvp
def hold_forward(values: jax.Array) -> jax.Array:
    """The values, through hold.c."""
    return _call("forward", values)


@hold_forward.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return hold_forward(*primals), tangents[0]


def hold_optimizer(value: jax.Array) -> jax.Array:
    """The value, through hold.c."""
    return _call("optimizer", value)


def _call(place: str, values: jax.Array) -> jax.Array:
    assert values.dtype == np.float32
    library()
    result = jax.ShapeDtypeStruct(values.shape, values.dtype)
    return jax.ffi.ffi_call(f"panax_test_{place}", result, vmap_method="sequential")(values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldTask(DecoderTask):
    """A decoder with embedded tokens that go through hold.c, before anything of the step is sent but the weights."""

    def enter(self, params: Decoder, batch: Any, context: Any) -> jax.Array:
        return hold_forward(super().enter(params, batch, context))
