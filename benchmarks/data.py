"""Tokens a second of Panax's batches against PyTorch's DataLoader and Grain, on one memory-mapped file; and the data stall.

`speed`: two kinds of work, and each column of a kind is checked to do it before anything is timed.
  rows      shuffled windows of a flat file: `tokens` and `targets`, (rows, length) int32. Panax always adds three leaves.
  packed    documents in a shuffled order, packed into rows: also `segment`, `position` and `loss_mask`, float32. The columns
            of PyTorch and Grain compute the same leaves row by row from one fixed order of documents, as a plain dataset
            does; Panax's order of documents changes with each epoch. "grain packing" is Grain's own concat-then-split, which
            gives tokens, targets, segments and positions, but no mask.
Rounds are interleaved; each column's iterator and workers live through all rounds, and as many batches as may be buffered are
drawn before each clock. Every column shuffles windows (or documents). Worker processes: 2 where it says so. Grain reads with 16
threads, its default, where it does not say "no threads". "numpy by hand" is what a loop over the memory map can do at best.

`stall`: the quickstart recipe for some steps, and what its log says of `seconds/data_stall`.

    python benchmarks/data.py speed [--rounds 7] [--tokens 64000000] [--rows 32] [--length 1024]
    python benchmarks/data.py stall [--steps 60]
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

VOCABULARY, END = 8192, 0
MEAN_DOCUMENT_TOKENS = 600
AHEAD = 16
WARM_BATCHES = 48
"""More than two workers' buffers hold: what was made before the clock is drawn before the clock."""


def write_files(folder: Path, num_tokens: int) -> None:
    """A token file of documents whose lengths are spread as those of web pages are, and the same ids as a flat file."""
    from panax.data import TokenWriter

    random = np.random.default_rng(0)
    lengths = np.maximum(random.lognormal(np.log(MEAN_DOCUMENT_TOKENS) - 0.5, 1.0, num_tokens // 400), 1).astype(int)
    with TokenWriter(folder / "documents", vocab_size=VOCABULARY, end_of_document=END) as writer:
        for length in lengths:
            if writer.num_tokens + length + 1 <= num_tokens:
                writer.append(random.integers(1, VOCABULARY, length))
    (folder / "flat.bin").symlink_to(folder / "documents" / "tokens.bin")


class Windows:
    """Row i of a flat file, as a dataset that PyTorch and Grain index; it opens the file in each worker."""

    def __init__(self, path: str, length: int) -> None:
        self.path, self.length = path, length
        self._tokens: np.ndarray | None = None

    @property
    def tokens(self) -> np.ndarray:
        if self._tokens is None:
            self._tokens = np.memmap(self.path, np.uint16, mode="r")
        return self._tokens

    def __len__(self) -> int:
        return (os.path.getsize(self.path) // 2 - 1) // self.length

    def __getitem__(self, index) -> dict[str, np.ndarray]:
        begin = int(index) * self.length
        ids = self.tokens[begin : begin + self.length + 1].astype(np.int32)
        return {"tokens": ids[:-1], "targets": ids[1:]}

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_tokens": None}


class PackedWindows(Windows):
    """Row i of documents laid end to end, with the leaves that attention and loss need."""

    def __init__(self, folder: str, length: int) -> None:
        super().__init__(f"{folder}/tokens.bin", length)
        self.offsets = np.fromfile(f"{folder}/offsets.bin", "<i8")

    def __getitem__(self, index) -> dict[str, np.ndarray]:
        leaves = super().__getitem__(index)
        begin = int(index) * self.length
        at = np.arange(begin, begin + self.length)
        first, last = np.searchsorted(self.offsets, [begin, begin + self.length - 1], side="right")
        ends = self.offsets[first : last + 1]
        cuts = np.minimum(ends, begin + self.length)
        starts = np.maximum(self.offsets[first - 1 : last], begin)
        counts = cuts - starts
        mask = np.ones(self.length, np.float32)
        mask[ends[ends <= begin + self.length] - 1 - begin] = 0
        leaves["targets"] = np.where(mask == 1, leaves["targets"], 0).astype(np.int32)
        leaves["loss_mask"] = mask
        leaves["segment"] = np.repeat(np.arange(1, len(counts) + 1, dtype=np.int32), counts)
        leaves["position"] = (at - np.repeat(starts, counts)).astype(np.int32)
        return leaves


class OfDocuments:
    """Document i, for Grain's own packing."""

    def __init__(self, folder: str) -> None:
        self.path = f"{folder}/tokens.bin"
        self.offsets = np.fromfile(f"{folder}/offsets.bin", "<i8")
        self._tokens: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index) -> dict[str, np.ndarray]:
        if self._tokens is None:
            self._tokens = np.memmap(self.path, np.uint16, mode="r")
        ids = self._tokens[self.offsets[index] : self.offsets[index + 1]].astype(np.int32)
        return {"tokens": ids, "targets": np.append(ids[1:], np.int32(0))}

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_tokens": None}


def numpy_column(dataset: Windows, rows: int):
    """What a loop by hand over the memory map does: the fastest plain way."""
    random = np.random.default_rng(1)
    tokens, length = dataset.tokens, dataset.length
    while True:
        order = random.permutation(len(dataset))
        for begin in range(0, len(order) - rows + 1, rows):
            made = np.empty((rows, length + 1), np.int32)
            for row, index in enumerate(order[begin : begin + rows].tolist()):
                made[row] = tokens[index * length : (index + 1) * length + 1]
            yield {"tokens": made[:, :-1], "targets": made[:, 1:]}


def torch_column(dataset, rows: int, workers: int):
    import torch

    random = torch.Generator().manual_seed(0)
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=rows,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        generator=random,
    )
    return itertools.chain.from_iterable(itertools.repeat(loader))


def grain_column(dataset, rows: int, workers: int, threads: int = 16):
    import grain.python as grain

    whole = grain.MapDataset.source(dataset).shuffle(seed=0).repeat().batch(rows, drop_remainder=True)
    # Its buffer is 500 batches unless told, which would be filled while other columns are timed.
    batches = whole.to_iter_dataset(
        grain.ReadOptions(num_threads=threads, prefetch_buffer_size=AHEAD if threads else 0)
    )
    if workers:
        from absl import flags

        flags.FLAGS.mark_as_parsed()  # Grain's workers read flags, which only an absl program has parsed
        batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
    return iter(batches)


def grain_packing_column(folder: str, rows: int, length: int):
    import grain.python as grain
    from grain.experimental import ConcatThenSplitIterDataset

    shuffled = grain.MapDataset.source(OfDocuments(folder)).shuffle(seed=0).repeat()
    documents = shuffled.to_iter_dataset(grain.ReadOptions(num_threads=16, prefetch_buffer_size=AHEAD * rows))
    sizes = {"tokens": length, "targets": length}
    return iter(ConcatThenSplitIterDataset(documents, length_struct=sizes).batch(rows, drop_remainder=True))


def panax_column(corpus, rows: int, length: int, cache: Path, ahead: bool):
    from panax.data import TextData, prefetch

    data = TextData(
        corpus=corpus, tokenizer=None, sequence_length=length, batch_size=rows, held_out=0, cache_dir=str(cache)
    )
    batches = data.open().train.batches()
    return (batch for batch, _ in (prefetch(batches) if ahead else batches))


def columns(folder: Path, options, kind: str) -> dict:
    """The iterators of one kind of work by name; a library that is not installed is said and left out."""
    from panax.data import TokenFile

    documents, cache = str(folder / "documents"), folder / "cache"
    flat = TokenFile(path=str(folder / "flat.bin"), dtype="uint16", vocab_size=VOCABULARY)
    corpus = flat if kind == "rows" else TokenFile(path=documents)
    windows = Windows if kind == "rows" else PackedWindows
    dataset = windows(str(folder / "flat.bin") if kind == "rows" else documents, options.length)
    makers = {
        "panax": lambda: panax_column(corpus, options.rows, options.length, cache, False),
        "panax, drawn ahead": lambda: panax_column(corpus, options.rows, options.length, cache, True),
    }
    if kind == "rows":
        makers["numpy by hand"] = lambda: numpy_column(dataset, options.rows)
    for workers in (0, 2):
        makers[f"torch, {workers} workers"] = lambda n=workers: torch_column(dataset, options.rows, n)
        makers[f"grain, {workers} workers"] = lambda n=workers: grain_column(dataset, options.rows, n)
    makers["grain, no threads"] = lambda: grain_column(dataset, options.rows, 0, threads=0)
    if kind == "packed":
        makers["grain packing"] = lambda: grain_packing_column(documents, options.rows, options.length)
    found = {}
    for name, make in makers.items():
        try:
            found[name] = make()
        except ImportError as error:
            print(f"{name}: left out, {error}")
    return found


def check(name: str, batch, options, kind: str) -> None:
    """Whether a batch is the work that the kind says."""
    batch = {leaf: np.asarray(values) for leaf, values in batch.items()}
    tokens, targets = batch["tokens"], batch["targets"]
    assert tokens.shape == targets.shape == (options.rows, options.length), (name, tokens.shape)
    assert tokens.dtype == targets.dtype == np.int32, (name, tokens.dtype)
    if kind == "rows":
        assert (tokens[:, 1:] == targets[:, :-1]).all(), name
        return
    segment = batch.get("segment", batch.get("tokens_segment_ids"))
    position = batch.get("position", batch.get("tokens_positions"))
    same = segment[:, 1:] == segment[:, :-1]
    assert (tokens[:, 1:] == targets[:, :-1])[same].all() and (np.diff(position)[same] == 1).all(), name
    assert (position[:, 1:][~same] == 0).all() and (segment[:, 0] == 1).all(), name
    if "loss_mask" in batch:
        assert ((tokens == END) == (batch["loss_mask"] == 0)).all(), name


def speed(options) -> None:
    with tempfile.TemporaryDirectory() as named:
        folder = Path(named)
        write_files(folder, options.tokens)
        for kind in ("rows", "packed"):
            opened = columns(folder, options, kind)
            for name, batches in opened.items():
                check(name, next(batches), options, kind)
            before = os.getloadavg()[0]
            rates: dict[str, list[float]] = {name: [] for name in opened}
            for _ in range(options.rounds):
                for name, batches in opened.items():
                    rates[name].append(rate(batches, options))
            show(kind, rates, before, options)
            for batches in opened.values():
                with contextlib.suppress(AttributeError):
                    batches.close()


def rate(batches, options) -> float:
    for _ in itertools.islice(batches, WARM_BATCHES):
        pass
    size = options.rows * options.length
    count = max(options.tokens_per_round // size, 1)
    start = time.perf_counter()
    for _ in itertools.islice(batches, count):
        pass
    return count * size / (time.perf_counter() - start)


def show(kind: str, rates: dict[str, list[float]], load: float, options) -> None:
    ours = statistics.median(rates["panax"])
    print(f"\n{kind}: {options.rows} rows of {options.length}; load {load:.1f} before, {os.getloadavg()[0]:.1f} after")
    print("| column | million tokens/s, median | lowest, highest round | panax is faster by |\n|---|---|---|---|")
    for name, found in rates.items():
        middle = statistics.median(found)
        print(f"| {name} | {middle / 1e6:.1f} | {min(found) / 1e6:.1f}, {max(found) / 1e6:.1f} | {ours / middle:.2f} |")


def stall(options) -> None:
    from panax import fit
    from panax_recipes.quickstart import quickstart

    with tempfile.TemporaryDirectory() as folder:
        base = dataclasses.replace(quickstart(), directory=folder, num_steps=options.steps, log_every=10)
        fit(base, say=lambda line: None)
        lines = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
        found = [line for line in lines if "seconds/data_stall" in line]
    print(f"quickstart, {options.steps} steps; load {os.getloadavg()[0]:.1f} after")
    print("| steps up to | data stall, ms a step | step, ms | share |\n|---|---|---|---|")
    for line in found:
        waited, whole = line["seconds/data_stall"] * 1e3, line["seconds/step"] * 1e3
        print(f"| {line['step']} | {waited:.4f} | {whole:.1f} | {waited / whole:.5%} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("speed", "stall"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=64_000_000, help="in the file")
    parser.add_argument("--tokens-per-round", type=int, default=8_000_000)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    print(f"Python {platform.python_version()}, numpy {np.__version__}, {os.cpu_count()} cores")
    speed(options) if options.what == "speed" else stall(options)


if __name__ == "__main__":
    main()
