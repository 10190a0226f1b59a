"""What updates cost: each optimizer's alone, on simulated devices, against AdamW's and against optax's own.

    python benchmarks/optimizers.py [--rounds 15] [--devices 8] [--mesh fsdp=8]

One set of parameters (8 layers of a decoder, 6.7 million numbers), one gradient, no model: `update` and the addition, jitted,
with donation. All take updates in turn, round after round; the ratios are the medians of each round's ratio to AdamW's. optax's
chains see each layer unstacked (`Optax`), as XLA splits them. Devices share the machine's cores, so what is seen is work: an
update that every device repeats costs all of it. What SOAP and Shampoo renew after every tenth step is a row of its own.
"""

import argparse
import os
import statistics
import time
from typing import Any

EMBED, HEADS, HEAD_DIM, FFN, LAYERS, VOCAB = 256, 4, 64, 704, 8, 1024
PLAIN = "AdamW"


def parameters() -> tuple[dict[str, Any], dict[str, Any]]:
    """Shapes and logical axes of a decoder's parameters."""
    shapes = {
        "query": (LAYERS, EMBED, HEADS, HEAD_DIM), "key": (LAYERS, EMBED, HEADS, HEAD_DIM),
        "value": (LAYERS, EMBED, HEADS, HEAD_DIM), "out": (LAYERS, HEADS, HEAD_DIM, EMBED),
        "gate": (LAYERS, EMBED, FFN), "up": (LAYERS, EMBED, FFN), "down": (LAYERS, FFN, EMBED),
        "norm": (LAYERS, EMBED), "table": (VOCAB, EMBED),
    }  # fmt: skip
    into = ("layer", "embed", "heads", "head_dim")
    axes = {
        "query": into, "key": into, "value": into, "out": ("layer", "heads", "head_dim", "embed"),
        "gate": ("layer", "embed", "ffn"), "up": ("layer", "embed", "ffn"), "down": ("layer", "ffn", "embed"),
        "norm": ("layer", "norm"), "table": ("vocab", "embed"),
    }  # fmt: skip
    return shapes, axes


def optimizers() -> dict[str, Any]:
    import optax

    from panax.optim import Adafactor, AdamW, Lamb, Lars, Lion, Muon, Optax, Shampoo, Soap

    return {
        PLAIN: AdamW(), "AdamW, int8 moments": AdamW(moments="int8"),
        "optax.adamw": Optax(transformation=optax.adamw(1e-3)), "Lamb": Lamb(),
        "optax.lamb": Optax(transformation=optax.lamb(1e-3)), "Lars": Lars(), "Lion": Lion(), "Adafactor": Adafactor(),
        "optax.adafactor": Optax(transformation=optax.adafactor(1e-3)), "Muon": Muon(), "Muon, float32": Muon(dtype="float32"),
        "optax.muon": Optax(transformation=optax.contrib.muon(1e-3)), "Shampoo": Shampoo(block=256), "Soap": Soap(),
    }  # fmt: skip


def updates(mesh: dict[str, int]) -> tuple[dict[str, Any], dict[str, float]]:
    """Of each optimizer a function that takes an update and waits for it; and the seconds that compiling took."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from panax.mesh import MeshShape, Placement
    from panax.optim.transformation import apply_updates

    shapes, axes = parameters()
    random = np.random.default_rng(0)
    placement = Placement.create(MeshShape(**{"fsdp": 1, **mesh}))

    def drawn() -> dict[str, Any]:
        return {name: jnp.asarray(random.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}

    lies = placement.storage_shardings(drawn(), axes)
    gradients = jax.device_put(drawn(), lies)
    found, seconds = {}, {}
    for name, optimizer in optimizers().items():
        transformation = optimizer.build(axes, 1000)
        params = jax.device_put(drawn(), lies)
        state = transformation.init(params)
        described = {key: (leaf.shape, axes[key]) for key, leaf in params.items()}
        rests = placement.storage_shardings(state, transformation.axes(state, described))

        def step(params: Any, state: Any, gradients: Any, transformation: Any = transformation) -> tuple[Any, Any]:
            changes, state = transformation.update(gradients, state, params)
            return apply_updates(params, changes), state

        with placement.activate():
            jitted = jax.jit(step, out_shardings=(lies, rests), donate_argnums=(0, 1))
            began = time.perf_counter()
            held = [params, jax.device_put(state, rests)]
            compiled = jitted.lower(*held, gradients).compile()
            seconds[name] = time.perf_counter() - began

        def take(compiled: Any = compiled, held: list[Any] = held) -> None:
            held[:] = compiled(*held, gradients)
            jax.block_until_ready(held)

        found[name] = take
        if transformation.renewal is not None:
            found[f"{name}, renewal"], seconds[f"{name}, renewal"] = renewal(transformation, held, rests, placement)
    return found, seconds


def renewal(transformation: Any, held: list[Any], rests: Any, placement: Any) -> tuple[Any, float]:
    """A function that renews the state in `held`, and the seconds that compiling took."""
    import jax

    params, state = held

    def renew(state: Any) -> Any:
        return transformation.renewal.renew(state, params)

    with placement.activate():
        began = time.perf_counter()
        compiled = jax.jit(renew, out_shardings=rests, donate_argnums=0).lower(state).compile()
        seconds = time.perf_counter() - began

    def take() -> None:
        held[1] = compiled(held[1])
        jax.block_until_ready(held)

    return take, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--mesh", default="fsdp=8", help="sizes by axis, as fsdp=4,tensor=2 (%(default)s)")
    asked = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={asked.devices}"
    mesh = {axis: int(size) for axis, _, size in (part.partition("=") for part in asked.mesh.split(","))}
    taken, compiling = updates(mesh)
    times: dict[str, list[float]] = {name: [] for name in taken}
    for take in taken.values():
        take()
    for _ in range(asked.rounds):
        for name, take in taken.items():
            began = time.perf_counter()
            take()
            times[name].append(time.perf_counter() - began)
    print(f"{asked.mesh}, {asked.rounds} rounds")
    print("| update | ms | times AdamW's | compiled in, s |\n|---|---|---|---|")
    for name, each in times.items():
        ratios = [one / plain for one, plain in zip(each, times[PLAIN])]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        usual = f"{1e3 * statistics.median(each):.1f} | {statistics.median(ratios):.2f} ({spread})"
        print(f"| {name} | {usual} | {compiling[name]:.1f} |")


if __name__ == "__main__":
    main()
