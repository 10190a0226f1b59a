"""What layouts cost: each one's step time on 8 simulated devices against plain FSDP's, and the machinery's on a single device.

    python benchmarks/layouts.py devices [--rounds 7]
    python benchmarks/layouts.py overhead [--rounds 15]

`devices`: every layout trains the same decoder on the same batches; the losses of the first steps are asserted equal, then the
layouts take steps in turn, round after round. Eight devices share the machine's cores, so what is seen is work that a layout adds
(recomputation, idle halves of a pipeline that are computed all the same, copies), not what it waits for a network.

`overhead`: a step on one device against the same model as one jitted function of plain jnp, written by hand, with optax's AdamW
and donation: once with jnp's attention and loss, once with this project's kernels, so that only the machinery differs.
"""

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

DEVICES, WARM = 8, 2
VOCAB, EMBED, LAYERS, HEADS, HEAD_DIM, FFN = 1024, 128, 4, 8, 16, 384
ROWS, LENGTH, MICRO_BATCHES = 32, 64, 4
RATE, BETAS, EPSILON, CLIP = 1e-3, (0.9, 0.95), 1e-8, 1.0

# Float32 sums of the same terms in another order, through a few updates.
SAME_LOSS = 2e-5

PLAIN = "fsdp8"
LAYOUTS: Mapping[str, Mapping[str, int]] = {
    PLAIN: {"fsdp": 8},
    "replica8": {"replica": 8},
    "replica2·fsdp4": {"replica": 2, "fsdp": 4},
    "fsdp4·expert2": {"fsdp": 4, "expert": 2},
    "fsdp4·tensor2": {"fsdp": 4, "tensor": 2},
    "tensor8": {"tensor": 8},
    "fsdp4·context2": {"fsdp": 4, "context": 2},
    "fsdp4·stage2": {"fsdp": 4, "stage": 2},
    "fsdp2·stage4": {"fsdp": 2, "stage": 4},
    "fsdp2·context2·tensor2": {"fsdp": 2, "context": 2, "tensor": 2},
    "fsdp2·stage2·tensor2": {"fsdp": 2, "stage": 2, "tensor": 2},
}
# Variants of a layout: what else its step is told.
VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    f"{PLAIN}, zero 1": (PLAIN, {"zero": "1"}),
    f"{PLAIN}, zero 2": (PLAIN, {"zero": "2"}),
    "fsdp4·context2, ring": ("fsdp4·context2", {"context_attention": "ring"}),
    "fsdp4·stage2, interleaved": ("fsdp4·stage2", {"schedule": "interleaved", "chunks": 2}),
    "fsdp4·stage2, gpipe": ("fsdp4·stage2", {"schedule": "gpipe"}),
}

Step = Callable[[Mapping[str, Any]], float]
"""Takes one step on a host batch, waits for it, and gives its loss."""


def batches(count: int) -> list[dict[str, Any]]:
    import numpy as np

    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, VOCAB, (ROWS, LENGTH + 1)).astype(np.int32) for _ in range(count)]
    mask = np.ones((ROWS, LENGTH), np.float32)
    return [{"tokens": t[:, :-1], "targets": t[:, 1:], "loss_mask": mask} for t in tokens]


def compiled_step(
    sizes: Mapping[str, int], *, zero: str = "auto", context_attention: str = "auto", **pipeline: Any
) -> Any:
    import jax

    from panax.mesh import MeshShape, Placement, Rules
    from panax.models import DecoderConfig, DecoderTask
    from panax.optim import AdamW, Schedule
    from panax.parallel import Pipeline
    from panax.train import CompiledStep, Program, StepConfig

    config = DecoderConfig(
        vocab_size=VOCAB, max_length=LENGTH, embed=EMBED, num_layers=LAYERS, heads=HEADS, head_dim=HEAD_DIM, ffn=FFN
    )
    task = DecoderTask(model=config, context_attention=context_attention, pipeline=Pipeline(**pipeline))  # pyright: ignore
    optimizer = AdamW(
        schedule=Schedule(peak=RATE, decay="constant"), b1=BETAS[0], b2=BETAS[1], epsilon=EPSILON, weight_decay=0.0
    )
    many = MICRO_BATCHES if math.prod(sizes.values()) > 1 else 1
    program = Program.create(task, optimizer, num_steps=1000, config=StepConfig(micro_batches=many, clip_norm=CLIP))
    shape = MeshShape(**({"fsdp": 1} | dict(sizes)))
    placement = Placement.create(shape, Rules(zero=zero), jax.devices()[: math.prod(sizes.values())])  # pyright: ignore
    axes = dict.fromkeys(("tokens", "targets", "loss_mask"), ("batch", "seq"))
    return CompiledStep(program, placement, axes)


def stepping(step: Any) -> Step:
    import jax

    state = step.init(0)

    def one(batch: Mapping[str, Any]) -> float:
        nonlocal state
        state, scalars = step(state, step.put(batch))
        jax.block_until_ready(state)
        return float(scalars["loss"])

    return one


def by_hand(params: Any, attend: Callable, loss: Callable) -> Step:
    """The same model and update as one function; `params` are Panax's, read into a plain dictionary."""
    import jax
    import jax.numpy as jnp
    import optax

    block = params.stacks[0].blocks[0]
    attention, feed_forward = block.attention, block.feed_forward
    weights = {
        "table": params.embedding.table,
        "norm": params.final_norm.scale,
        "layers": {
            "norm1": block.attention_norm.scale,
            **{name: getattr(attention, name) for name in ("w_q", "w_k", "w_v", "w_o")},
            "norm2": block.feed_forward_norm.scale,
            **{name: getattr(feed_forward, name) for name in ("w_gate", "w_up", "w_down")},
        },
    }
    weights = jax.tree.map(jnp.copy, weights)
    rotary = attention.rotary.frequencies(HEAD_DIM)

    def normed(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        # Of two dimensions: XLA:CPU differentiates products of three into slower ones.
        return (x.reshape(-1, x.shape[-1]) @ w).reshape(*x.shape[:-1], -1)

    def rotated(x: jax.Array) -> jax.Array:
        angle = jnp.arange(LENGTH, dtype=jnp.float32)[None, :, None, None] * rotary
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def layer(x: jax.Array, w: Mapping[str, jax.Array]) -> tuple[jax.Array, None]:
        h = normed(x, w["norm1"])
        q, k, v = (
            product(h, w[name].reshape(EMBED, -1)).reshape(*h.shape[:2], HEADS, -1) for name in ("w_q", "w_k", "w_v")
        )
        attended = attend(rotated(q), rotated(k), v)
        x = x + product(attended.reshape(*h.shape[:2], -1), w["w_o"].reshape(-1, EMBED))
        h = normed(x, w["norm2"])
        x = x + product(jax.nn.silu(product(h, w["w_gate"])) * product(h, w["w_up"]), w["w_down"])
        # As in `scan_layers`: without the barrier XLA:CPU fuses the chain of residuals, and is slower for it.
        return jax.lax.optimization_barrier(x), None

    def mean_loss(weights: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
        x, _ = jax.lax.scan(layer, weights["table"][batch["tokens"]], weights["layers"], unroll=LAYERS)
        return loss(normed(x, weights["norm"]), weights["table"], batch["targets"], batch["loss_mask"])

    optimizer = optax.chain(
        optax.clip_by_global_norm(CLIP), optax.adamw(RATE, b1=BETAS[0], b2=BETAS[1], eps=EPSILON, weight_decay=0.0)
    )

    def step(weights: Any, moments: Any, batch: Mapping[str, jax.Array]) -> tuple[Any, Any, jax.Array]:
        value, gradients = jax.value_and_grad(mean_loss)(weights, batch)
        updates, moments = optimizer.update(gradients, moments, weights)
        return optax.apply_updates(weights, updates), moments, value

    run = jax.jit(step, donate_argnums=(0, 1))
    moments = jax.jit(optimizer.init)(weights)

    def one(batch: Mapping[str, Any]) -> float:
        nonlocal weights, moments
        weights, moments, value = run(weights, moments, jax.device_put(batch))
        jax.block_until_ready((weights, moments))
        return float(value)

    return one


def plain_attention(q: Any, k: Any, v: Any) -> Any:
    import jax
    import jax.numpy as jnp

    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * HEAD_DIM**-0.5
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)


def plain_loss(hidden: Any, table: Any, targets: Any, mask: Any) -> Any:
    import optax

    losses = optax.softmax_cross_entropy_with_integer_labels(hidden @ table.T, targets)
    return (losses * mask).sum() / mask.sum()


def kernel_attention(q: Any, k: Any, v: Any) -> Any:
    import jax

    from panax.core import Target
    from panax.kernels.attention.attention import attention

    return attention(q, k, v, target=Target(jax.default_backend()))


def kernel_loss(hidden: Any, table: Any, targets: Any, mask: Any) -> Any:
    from panax.layers import token_loss

    return token_loss(hidden, table, targets, mask).loss / mask.sum()


def assert_same_losses(steps: Mapping[str, Step], first: str) -> None:
    """Take the first steps; all must see the same losses before anything is timed."""
    found = {name: [step(batch) for batch in batches(WARM)] for name, step in steps.items()}
    for name, losses in found.items():
        distance = max(abs(a / b - 1) for a, b in zip(losses, found[first]))
        assert distance < SAME_LOSS, f"{name}: losses {losses} are not those of {first}, {found[first]}"


def timed(steps: Mapping[str, Step], rounds: int, inner: int) -> dict[str, list[float]]:
    """Seconds of a step for each column and round; in a round each column takes `inner` steps, in another order each time."""
    pool = batches(inner)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = time.perf_counter()
            for batch in pool:
                steps[name](batch)
            seconds[name].append((time.perf_counter() - start) / inner)
    return seconds


def report(seconds: Mapping[str, list[float]], base: str) -> None:
    width = max(map(len, seconds))
    for name, found in seconds.items():
        ratios = sorted(a / b for a, b in zip(found, seconds[base]))
        spread = f"[{min(found) * 1e3:.1f} .. {max(found) * 1e3:.1f}]"
        print(
            f"{name:{width}}  {statistics.median(found) * 1e3:8.1f} ms {spread:>20}   "
            f"of {base} {statistics.median(ratios):.3f} [{ratios[0]:.3f} .. {ratios[-1]:.3f}]"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("devices", "overhead"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--inner", type=int, default=4, help="steps of a column in one round")
    parser.add_argument("--only", default="", help="layouts to run beside the first, separated by commas")
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if options.part == "devices":
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={DEVICES}"
    from panax.system.allocator import keep_freed_memory

    keep_freed_memory()  # as `panax train` does
    import jax

    base = PLAIN
    steps: dict[str, Step] = {}
    if options.part == "devices":
        columns = {name: (name, {}) for name in LAYOUTS} | dict(VARIANTS)
        wanted = {base, *options.only.split(",")} if options.only else columns.keys()
        for name, (layout, told) in columns.items():
            if name in wanted:
                steps[name] = stepping(compiled_step(LAYOUTS[layout], **told))
    else:
        base = "by hand, same kernels"
        step = compiled_step({})
        params = step.init(0).params
        steps["by hand"] = by_hand(params, plain_attention, plain_loss)
        steps[base] = by_hand(params, kernel_attention, kernel_loss)
        steps["panax"] = stepping(step)
    assert_same_losses(steps, base)
    before = os.getloadavg()[0]
    seconds = timed(steps, options.rounds, options.inner)
    print(
        f"jax {jax.__version__}, {os.cpu_count()} cores, load before {before:.1f}, after {os.getloadavg()[0]:.1f}; "
        f"{options.rounds} rounds of {options.inner} steps; {LAYERS} layers of {EMBED}, {ROWS} x {LENGTH} tokens"
    )
    report(seconds, base)
    if options.part == "overhead":
        print("goal: panax at most 1.02 of by hand, same kernels")


if __name__ == "__main__":
    main()
