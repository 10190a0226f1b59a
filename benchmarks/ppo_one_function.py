"""PPO on gymnax's CartPole as one jitted function: the form in which PureJaxRL trains, with the figures of its paper.

PureJaxRL is single files that no registry has. This is written from its description (Lu et al., Discovered Policy
Optimisation, NeurIPS 2022, and its README): 4 environments of 128 steps, 4 passes of 4 minibatches, Adam at 2.5e-4 with a
linear decay, two hidden layers of 64 with tanh, and everything from the first reset to the last update in one `jax.jit`. A time
limit is a death here, as there. Needs gymnax, which needs jax<0.12.
"""

import itertools
import time
from typing import Any, NamedTuple

import gymnax
import jax
import jax.numpy as jnp
import optax

ENVIRONMENTS, LENGTH, PASSES, PARTS = 4, 128, 4, 4
RATE, DISCOUNT, TRACE, CLIP, ENTROPY, VALUE, NORM = 2.5e-4, 0.99, 0.95, 0.2, 0.01, 0.5, 0.5


class Seen(NamedTuple):
    observation: jax.Array
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    reward: jax.Array
    done: jax.Array


def layers(key: jax.Array, sizes: tuple[int, ...], last_gain: float) -> list[tuple[jax.Array, jax.Array]]:
    gains = [2**0.5] * (len(sizes) - 2) + [last_gain]
    keys = jax.random.split(key, len(gains))
    shapes = itertools.pairwise(sizes)
    return [
        (jax.nn.initializers.orthogonal(gain)(key, shape, jnp.float32), jnp.zeros(shape[1]))
        for key, gain, shape in zip(keys, gains, shapes)
    ]


def applied(network: Any, x: jax.Array) -> jax.Array:
    for w, b in network[:-1]:
        x = jnp.tanh(x @ w + b)
    return x @ network[-1][0] + network[-1][1]


def train(key: jax.Array, num_updates: int) -> tuple[Any, dict[str, jax.Array]]:
    """All of a run. Returns the parameters, and for each update the mean return of episodes that ended in it."""
    environment, settings = gymnax.make("CartPole-v1")
    actor_key, critic_key, reset_key, run_key = jax.random.split(key, 4)
    params = {"actor": layers(actor_key, (4, 64, 64, 2), 0.01), "critic": layers(critic_key, (4, 64, 64, 1), 1.0)}
    schedule = optax.linear_schedule(RATE, 0.0, num_updates * PASSES * PARTS)
    optimizer = optax.chain(optax.clip_by_global_norm(NORM), optax.adam(schedule, eps=1e-5))
    reset = jax.vmap(environment.reset, (0, None))
    observation, state = reset(jax.random.split(reset_key, ENVIRONMENTS), settings)

    def act(carry: Any, key: jax.Array) -> tuple[Any, tuple[Seen, jax.Array]]:
        params, state, observation, total = carry
        draw_key, step_key = jax.random.split(key)
        logits, value = applied(params["actor"], observation), applied(params["critic"], observation)[:, 0]
        action = jax.random.categorical(draw_key, logits)
        log_prob = jax.nn.log_softmax(logits)[jnp.arange(ENVIRONMENTS), action]
        keys = jax.random.split(step_key, ENVIRONMENTS)
        stepped = jax.vmap(environment.step, (0, 0, 0, None))(keys, state, action, settings)
        after, state, reward = stepped[:3]
        # Three values follow where termination and truncation stand apart, two in older versions.
        done = stepped[3] if len(stepped) == 5 else stepped[3] | stepped[4]
        total = total + reward
        seen = Seen(observation, action, log_prob, value, reward, done)
        return (params, state, after, jnp.where(done, 0.0, total)), (seen, total)

    def loss(params: Any, seen: Seen, advantage: jax.Array, target: jax.Array) -> jax.Array:
        logits, value = applied(params["actor"], seen.observation), applied(params["critic"], seen.observation)[:, 0]
        logs = jax.nn.log_softmax(logits)
        ratio = jnp.exp(jnp.take_along_axis(logs, seen.action[:, None], axis=1)[:, 0] - seen.log_prob)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage).mean()
        clipped = seen.value + jnp.clip(value - seen.value, -CLIP, CLIP)
        error = 0.5 * jnp.maximum((value - target) ** 2, (clipped - target) ** 2).mean()
        entropy = -(jnp.exp(logs) * logs).sum(axis=-1).mean()
        return -gain + VALUE * error - ENTROPY * entropy

    def update(carry: Any, key: jax.Array) -> tuple[Any, tuple[jax.Array, jax.Array]]:
        params, moments, state, observation, total = carry
        act_key, order_key = jax.random.split(key)
        acted = jax.lax.scan(act, (params, state, observation, total), jax.random.split(act_key, LENGTH))
        (_, state, observation, total), (seen, totals) = acted
        last = applied(params["critic"], observation)[:, 0]

        def earlier(carry: Any, step: Seen) -> tuple[Any, jax.Array]:
            advantage, following = carry
            alive = 1.0 - step.done
            difference = step.reward + DISCOUNT * following * alive - step.value
            advantage = difference + DISCOUNT * TRACE * alive * advantage
            return (advantage, step.value), advantage

        _, advantage = jax.lax.scan(earlier, (jnp.zeros(ENVIRONMENTS), last), seen, reverse=True)
        rows = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), (seen, advantage, advantage + seen.value))

        def one_pass(carry: Any, key: jax.Array) -> tuple[Any, None]:
            order = jax.random.permutation(key, ENVIRONMENTS * LENGTH).reshape(PARTS, -1)

            def part(carry: Any, chosen: jax.Array) -> tuple[Any, None]:
                params, moments = carry
                gradient = jax.grad(loss)(params, *jax.tree.map(lambda leaf: leaf[chosen], rows))
                changes, moments = optimizer.update(gradient, moments)
                return (optax.apply_updates(params, changes), moments), None

            return jax.lax.scan(part, carry, order)[0], None

        (params, moments), _ = jax.lax.scan(one_pass, (params, moments), jax.random.split(order_key, PASSES))
        ended = seen.done.sum()
        mean = jnp.where(seen.done, totals, 0.0).sum() / jnp.maximum(ended, 1)
        return (params, moments, state, observation, total), (mean, ended)

    first = (params, optimizer.init(params), state, observation, jnp.zeros(ENVIRONMENTS))
    carry, (mean, ended) = jax.lax.scan(update, first, jax.random.split(run_key, num_updates))
    return carry[0], {"return": mean, "episodes": ended}


def measured(seed: int, steps: int) -> dict[str, float]:
    """Compile and run a training of so many steps of the environments."""
    num_updates = steps // (ENVIRONMENTS * LENGTH)
    start = time.perf_counter()
    compiled = jax.jit(train, static_argnums=1).lower(jax.random.key(seed), num_updates).compile()
    compile_seconds = time.perf_counter() - start
    start = time.perf_counter()
    _, curve = jax.block_until_ready(compiled(jax.random.key(seed)))
    seconds = time.perf_counter() - start
    reached = jnp.flatnonzero((curve["return"] >= 475) & (curve["episodes"] > 0))
    first = float("nan") if not reached.size else float(reached[0] + 1) * ENVIRONMENTS * LENGTH
    last = [float(r) for r, e in zip(curve["return"], curve["episodes"]) if e > 0][-20:]
    return {
        "compile_seconds": compile_seconds,
        "seconds": compile_seconds + seconds,
        "steps_per_second": num_updates * ENVIRONMENTS * LENGTH / seconds,
        "steps_to_475": first,
        "return": sum(last) / len(last),
    }
