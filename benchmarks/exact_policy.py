"""The cost of equal bits in training and generation: `python benchmarks/exact_policy.py [--dtype bfloat16] [--rounds 5]`.

A decoder of 15 million parameters, with the kernels that are the fastest here and with `exact_policy`, one after the other in
each round: gradients of four packed rows of 512 tokens, and answers of 64 tokens to 16 prompts of 128 in eight rows. Prints
medians of the rounds and their ratios, and the largest difference of a token's log-probability between generation and training.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROWS, LENGTH, PROMPT, ANSWER = 4, 512, 128, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--experts", type=int, default=0, help="of a mixture, two for each token; 0: a dense model")
    options = parser.parse_args()
    from panax.core import current_target
    from panax.generate import GenerationEngine, GenerationRequest, Sampling
    from panax.kernels import Kernels, choose_by_timing, linear_log_probabilities, use_kernels
    from panax.layers import Context, MoE
    from panax.models import DecoderConfig, DecoderTask

    choose_by_timing()
    moe = MoE(experts=options.experts, active=2, ffn=384) if options.experts else None
    config = DecoderConfig(
        vocab_size=16384, max_length=LENGTH, embed=256, num_layers=8, heads=8, kv_heads=4, ffn=768, feed_forward=moe
    )
    task = DecoderTask(model=config)
    params, state = task.init(jax.random.key(0))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab_size, (ROWS, LENGTH)).astype(np.int32)
    segment = np.repeat([[1, 2]], LENGTH // 2, axis=1).repeat(ROWS, axis=0).astype(np.int32)
    position = np.tile(np.arange(LENGTH // 2), (ROWS, 2)).astype(np.int32)
    prompts = [tuple(rng.integers(0, config.vocab_size, PROMPT).tolist()) for _ in range(16)]
    asked = [GenerationRequest(prompt, Sampling(tokens=ANSWER, seed=index)) for index, prompt in enumerate(prompts)]

    def loss(params: Any, tokens: Any, segment: Any, position: Any) -> tuple[jax.Array, jax.Array]:
        hidden, _ = params(tokens, Context(position, segment=segment), dtype=jnp.dtype(options.dtype), state=None)
        targets = jnp.roll(tokens, -1, axis=1).reshape(-1)
        values = linear_log_probabilities(
            hidden.reshape(-1, config.embed),
            params.output_table,
            targets,
            jnp.ones(targets.size),
            target=current_target(),
        )
        return values.sum(), values.reshape(tokens.shape)

    columns: dict[str, tuple[Callable[[], Any], GenerationEngine]] = {}
    for name, kernels in (("fastest", Kernels()), ("exact", Kernels(exact_policy=True))):
        with use_kernels(kernels.names):
            step = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(params, tokens, segment, position).compile()
        model = task.incremental_model(params, state, options.dtype)
        engine = GenerationEngine(model, rows=8, length=LENGTH, kernels=kernels)
        columns[name] = (lambda step=step: jax.block_until_ready(step(params, tokens, segment, position))), engine

    seconds: dict[tuple[str, str], list[float]] = {}
    for round_number in range(options.rounds + 1):
        for name, (step, engine) in columns.items():
            for part, run in (("gradients", step), ("answers", lambda engine=engine: engine.generate(asked))):
                begin = time.perf_counter()
                run()
                if round_number:  # the first warms up
                    seconds.setdefault((part, name), []).append(time.perf_counter() - begin)
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    print(f"{options.dtype}, {options.experts or 'no'} experts, medians of {options.rounds} rounds")
    for (part, name), value in medians.items():
        print(f"{part:10} {name:8} {value:.3f} s  ({min(seconds[part, name]):.3f} to {max(seconds[part, name]):.3f})")
    for part in ("gradients", "answers"):
        print(f"{part}: exact takes {medians[part, 'exact'] / medians[part, 'fastest']:.2f} times the fastest")
    for name, (_, engine) in columns.items():
        print(f"{name}: largest difference {_difference(engine, asked, loss, params, name):.1e}")


def _difference(engine: Any, asked: list[Any], loss: Any, params: Any, name: str) -> float:
    """Return the largest difference between the log-probabilities of drawn tokens and those of the training forward."""
    from panax.kernels import Kernels, use_kernels

    answers = engine.generate(asked)
    rows = np.array([request.prompt + answer.ids for request, answer in zip(asked, answers, strict=True)], np.int32)
    position = np.tile(np.arange(rows.shape[1]), (len(rows), 1)).astype(np.int32)
    with use_kernels(Kernels(exact_policy=name == "exact").names):
        (_, values), _ = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, rows, np.ones_like(rows), position)
    trained = np.asarray(values)[:, PROMPT - 1 : PROMPT + ANSWER - 1]
    drawn = np.array([[token.log_probability for token in answer.tokens] for answer in answers])
    return float(np.abs(trained - drawn).max())


if __name__ == "__main__":
    main()
