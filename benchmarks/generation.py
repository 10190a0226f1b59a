"""Generation beside transformers: `python benchmarks/generation.py [--model 15m|135m] [--dtype float32|bfloat16] [--rounds 5]`.

One model of random weights in both, on the same threads, greedy, in one process, the columns one after the other in each round:
batch 1 (answers one by one), and 8 at a time: here in rows that are filled as they become free, there in static batches padded on
the left, to the longest answer of each. Prompts of 16 to 512 tokens and answers of 16 to 256, lognormal with seed 0. Prints
tokens of answers per second, the medians of the rounds, and for batch 1 the bytes of weights that they read per second as a share
of a loop that reads memory.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np

SIZES = {
    "15m": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 8,
            "num_key_value_heads": 4, "vocab_size": 16384},
    "135m": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
             "num_key_value_heads": 3, "vocab_size": 49152},
}  # fmt: skip
LENGTH, ROWS = 768, 8


def workload(count: int, vocabulary: int) -> list[tuple[list[int], int]]:
    """Return prompts, and the number of tokens to add to each."""
    rng = np.random.default_rng(0)
    prompts = np.clip(rng.lognormal(np.log(90), 0.8, count), 16, 512).astype(int)
    answers = np.clip(rng.lognormal(np.log(64), 0.7, count), 16, 256).astype(int)
    return [(rng.integers(5, vocabulary, n).tolist(), int(m)) for n, m in zip(prompts, answers, strict=True)]


def bandwidth(seconds: float = 1.0) -> float:
    """Return the bytes per second that a loop over an array of 512 MiB reads, on all threads."""
    import torch

    array = torch.ones(1 << 27)
    array.sum()
    begin, loops = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        array.sum()
        loops += 1
    return loops * array.nbytes / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=SIZES, default="15m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=24, help="in the batches of 8; batch 1 takes a sixth of them")
    options = parser.parse_args()
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from panax.generate import GenerationEngine, GenerationRequest, Sampling
    from panax.kernels import choose_by_timing
    from panax.run.folder.trained_model import load_model  # noqa: F401  (imports everything before a clock runs)

    torch.manual_seed(0)
    config = LlamaConfig(**SIZES[options.model], max_position_embeddings=LENGTH, tie_word_embeddings=True)
    theirs = LlamaForCausalLM(config).to(getattr(torch, options.dtype)).eval()
    choose_by_timing()
    with tempfile.TemporaryDirectory() as folder:
        theirs.float().save_pretrained(folder)
        theirs.to(getattr(torch, options.dtype))
        model = load_ours(folder, options.dtype)
    one, many = (GenerationEngine(model, rows=rows, length=LENGTH) for rows in (1, ROWS))
    requests = workload(options.requests, config.vocab_size)
    few = requests[: max(1, len(requests) // 6)]

    def ours(engine: GenerationEngine, asked: list[tuple[list[int], int]]) -> int:
        made = [GenerationRequest(tuple(prompt), Sampling(tokens=n, temperature=0.0)) for prompt, n in asked]
        return sum(len(each.ids) for each in engine.generate(made))

    @torch.inference_mode()
    def static(batch: int, asked: list[tuple[list[int], int]]) -> int:
        tokens = 0
        for begin in range(0, len(asked), batch):
            part = asked[begin : begin + batch]
            width, count = max(len(prompt) for prompt, _ in part), max(n for _, n in part)
            ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in part])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in part])
            theirs.generate(
                ids, attention_mask=mask, min_new_tokens=count, max_new_tokens=count, do_sample=False, pad_token_id=0
            )
            tokens += sum(n for _, n in part)
        return tokens

    columns: dict[str, Callable[[], int]] = {
        "panax, batch 1": lambda: ours(one, few),
        "transformers, batch 1": lambda: static(1, few),
        f"panax, {ROWS} rows": lambda: ours(many, requests),
        f"transformers, static {ROWS}": lambda: static(ROWS, requests),
    }
    rates: dict[str, list[float]] = {name: [] for name in columns}
    reads = []
    for round_number in range(options.rounds + 1):
        reads.append(bandwidth())
        for name, run in columns.items():
            begin = time.perf_counter()
            tokens = run()
            if round_number:  # the first warms up
                rates[name].append(tokens / (time.perf_counter() - begin))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    weights = sum(parameter.nbytes for parameter in theirs.parameters())
    print(f"{options.model}, {options.dtype}, {torch.get_num_threads()} threads, medians of {options.rounds} rounds")
    for name, value in medians.items():
        print(f"{name:24} {value:8.1f} tokens/s  ({min(rates[name]):.1f} to {max(rates[name]):.1f})")
    print(f"batch 1: {medians['panax, batch 1'] / medians['transformers, batch 1']:.2f} times transformers")
    print(
        f"{ROWS} rows: {medians[f'panax, {ROWS} rows'] / medians[f'transformers, static {ROWS}']:.2f} times transformers"
    )
    share = medians["panax, batch 1"] * weights / statistics.median(reads)
    print(f"batch 1 reads {share:.2f} of {statistics.median(reads) / 1e9:.1f} GB/s (prompts included in its time)")


def load_ours(folder: str, dtype: str):
    """Return the model of a folder, prepared for generation."""
    import jax

    from panax.adapters.huggingface import config_from, load
    from panax.models import DecoderTask

    task = DecoderTask(model=config_from(folder))
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        jax.eval_shape(task.init, jax.random.key(0)),
    )
    return task.incremental_model(*load(folder, task, *abstract), dtype)


if __name__ == "__main__":
    main()
