"""Saving and restoring 1.5 GB of random state over 8 simulated devices: against the raw disk and torch.distributed.checkpoint.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python benchmarks/checkpoint.py [--rounds 5] [--directory DIR]

Columns take turns in each round; medians and spreads are over rounds. Everything written is flushed to the disk before the
clock is read, and dropped from the page cache before it is read back ("cached": read once more). What a column does:

- raw disk: one thread writes the bytes past the page cache (O_DIRECT) in 16 MiB pieces, then fsync; and reads them; or buffered.
- panax: `Checkpointer.save` until it is committed, checksums on; `restore` onto the 8 devices, checksums compared. "blocked" is
  what `save` keeps the training loop waiting; the next step's time beyond its usual one is a row of its own.
- torch: `dcp.save` with fsync (one thread and two); `dcp.async_save`, whose call is what blocks; `dcp.load` into tensors that are
  there. It writes no checksums.

As `panax train` does, the process keeps memory that was freed: fresh pages would cost more than all else.
"""

import argparse
import contextlib
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import psutil

from panax.checkpoint import Checkpointer, restore
from panax.mesh import MeshShape, Placement
from panax.system.allocator import keep_freed_memory

SHAPES = {f"layer{i}": (2048, 2048 * 6) for i in range(14)} | {"embedding": (8192, 2048), "norm": (2048,)}
DEVICES = 8


def random_state(placement: Placement) -> dict[str, jax.Array]:
    state = {}
    for i, (name, shape) in enumerate(SHAPES.items()):
        draw = jax.jit(jax.random.normal, static_argnums=1, out_shardings=placement.sharding("fsdp"))
        state[name] = draw(jax.random.key(i), shape)
    return state


def train_step(state: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return jax.tree.map(lambda x: x * 0.999, state)


def drop(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


class Raw:
    """Bytes from page-aligned memory to a file and back, by one thread."""

    def __init__(self, size: int, folder: Path) -> None:
        import mmap

        self.size = size // 4096 * 4096
        self.memory = mmap.mmap(-1, self.size)
        np.frombuffer(self.memory, np.uint8)[:] = np.random.default_rng(0).integers(0, 256, self.size, np.uint8)
        self.path = folder / "raw"

    def write(self, flags: int) -> None:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags, 0o600)
        view = memoryview(self.memory)
        for begin in range(0, self.size, 2**24):
            os.write(descriptor, view[begin : begin + 2**24])
        os.fsync(descriptor)
        os.close(descriptor)

    def read(self, flags: int) -> None:
        descriptor = os.open(self.path, os.O_RDONLY | flags)
        view = memoryview(self.memory)
        for begin in range(0, self.size, 2**24):
            os.preadv(descriptor, [view[begin : begin + 2**24]], begin)
        os.close(descriptor)


def panax_round(state: dict, step: Callable, folder: Path, found: dict[str, list[float]]) -> dict:
    checkpointer = Checkpointer(folder / "panax", say=lambda line: None)
    checkpointer.prepare(state)
    checkpointer._snapshot._touching.join()  # type: ignore[union-attr]  # as before the first save of a run
    usual = []
    for _ in range(3):
        start = time.perf_counter()
        state = jax.block_until_ready(step(state))
        usual.append(time.perf_counter() - start)
    start = time.perf_counter()
    checkpointer.save(state, 1, {})
    call = time.perf_counter() - start
    # The steps go on while the thread writes; here they stand still, for the disk's figure.
    checkpointer.finish()
    found["panax save s"].append(time.perf_counter() - start)
    found["panax blocked s"].append(call)
    checkpointer.save(state, 2, {})
    start = time.perf_counter()
    state = jax.block_until_ready(step(state))
    found["panax next step beyond usual s"].append(time.perf_counter() - start - statistics.median(usual))
    checkpointer.finish()
    drop(folder / "panax")
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    places = jax.tree.map(lambda x: x.sharding, state)
    for name in ("panax load s", "panax load cached s"):
        start = time.perf_counter()
        back = jax.block_until_ready(restore(checkpointer.open(2), abstract, places))
        found[name].append(time.perf_counter() - start)
        del back
    return state


def torch_round(tensors: dict, folder: Path, found: dict[str, list[float]]) -> None:
    import torch.distributed.checkpoint as dcp

    for threads in (1, 2):
        shutil.rmtree(folder / "torch", ignore_errors=True)
        writer = dcp.FileSystemWriter(folder / "torch", thread_count=threads, sync_files=True)
        name = f"torch save, {threads} thread{'s' * (threads > 1)} s"
        found[name].append(timed(lambda writer=writer: dcp.save(tensors, storage_writer=writer, no_dist=True)))
    drop(folder / "torch")
    for name in ("torch load s", "torch load cached s"):
        reader = dcp.FileSystemReader(folder / "torch")
        found[name].append(timed(lambda reader=reader: dcp.load(tensors, storage_reader=reader, no_dist=True)))
    shutil.rmtree(folder / "torch", ignore_errors=True)
    start = time.perf_counter()
    future = dcp.async_save(
        tensors, storage_writer=dcp.FileSystemWriter(folder / "torch", thread_count=2, sync_files=True)
    )
    found["torch async blocked s"].append(time.perf_counter() - start)
    (getattr(future, "upload_completion", None) or future).result()
    found["torch async save s"].append(time.perf_counter() - start)
    shutil.rmtree(folder / "torch", ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", default=None)
    options = parser.parse_args()
    assert jax.device_count() == DEVICES, "set XLA_FLAGS=--xla_force_host_platform_device_count=8"
    keep_freed_memory()
    placement = Placement.create(MeshShape(fsdp=DEVICES))
    state = random_state(placement)
    size = sum(x.nbytes for x in state.values())
    step = jax.jit(train_step, donate_argnums=0)
    state = step(state)
    names = [
        "raw direct write s", "raw direct read s", "raw buffered write s", "raw buffered read s",
        "panax save s", "panax blocked s", "panax next step beyond usual s", "panax load s", "panax load cached s",
        "torch save, 1 thread s", "torch save, 2 threads s", "torch load s", "torch load cached s", "torch async blocked s",
        "torch async save s",
    ]  # fmt: skip
    found = {name: [] for name in names}
    with contextlib.suppress(ImportError):
        import torch

        torch.set_num_threads(2)
        tensors = {name: torch.from_numpy(np.asarray(x).copy()) for name, x in state.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577"}
        torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    with tempfile.TemporaryDirectory(dir=options.directory) as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(name)
        raw = Raw(size, folder)
        loads = []
        for _ in range(options.rounds):
            loads.append(psutil.getloadavg()[0])
            for label, flags in (("direct", os.O_DIRECT), ("buffered", 0)):
                found[f"raw {label} write s"].append(timed(lambda flags=flags: raw.write(flags)))
                drop(folder)
                found[f"raw {label} read s"].append(timed(lambda flags=flags: raw.read(flags)))
            raw.path.unlink()
            state = panax_round(state, step, folder, found)
            shutil.rmtree(folder / "panax")
            torch_round(tensors, folder, found)
    show(found, size, loads)


def show(found: dict[str, list[float]], size: int, loads: list[float]) -> None:
    print(f"{size / 1e9:.2f} GB, {DEVICES} devices, {len(loads)} rounds, load {min(loads):.1f} to {max(loads):.1f}")
    print("| | seconds (median) | spread | MB/s |\n|---|---|---|---|")
    for name, values in found.items():
        middle = statistics.median(values)
        spread = (max(values) - min(values)) / middle if middle > 0 else 0
        speed = "" if "blocked" in name or "beyond" in name else f"{size / 1e6 / middle:.0f}"
        print(f"| {name.removesuffix(' s')} | {middle:.3f} | {spread:.0%} | {speed} |")
    medians = {name.removesuffix(" s"): statistics.median(values) for name, values in found.items()}
    raw = min(medians["raw direct write"], medians["raw buffered write"])
    saved = min(medians["torch save, 1 thread"], medians["torch save, 2 threads"])
    print(
        f"\nsave: {raw / medians['panax save']:.2f} of the raw disk, {saved / medians['panax save']:.2f} times torch's speed"
    )
    for kind in ("load", "load cached"):
        print(f"{kind}: {medians[f'torch {kind}'] / medians[f'panax {kind}']:.2f} times torch's speed")


if __name__ == "__main__":
    main()
