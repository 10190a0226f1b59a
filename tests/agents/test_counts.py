"""What agents count and report, under early stops, over many leaves and past 2**31."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from panax.agents import Dqn, PerceptronPolicy, Ppo, Seeds
from panax.agents.distributions import SquashedGaussian
from panax.agents.replay import Replay
from panax.agents.rollouts import check_rollout
from panax.core import Loss
from panax.core.errors import DataError, RecipeError
from panax.environments import Box, CartPole
from panax.mesh import MeshShape, Placement
from panax.optim import AdamW, Schedule, Shampoo, Soap
from panax.train import CompiledStep, Program, StepConfig
from panax.train.update import collect_scalars

SMALL = {
    "environment": CartPole(max_steps=50), "policy": PerceptronPolicy(hidden=(8,)), "environments": 4, "steps": 8, "epochs": 4,
    "minibatches": 2, "evaluation_episodes": 4, "evaluation_steps": 5,
}  # fmt: skip
DECAY = AdamW(schedule=Schedule(peak=0.1, decay="linear", warmup_steps=0), weight_decay=0.0)


def stepped(task, steps: int) -> tuple[Any, Any]:
    program = Program.create(task, DECAY, num_steps=steps, config=StepConfig(clip_norm=None))
    step = CompiledStep(program, Placement.create(MeshShape(), devices=jax.devices()[:1]), {"row": ("batch",)})
    state, scalars = step.init(0), {}
    for _ in range(steps):
        state, scalars = step(state, step.put({"row": np.arange(task.rows, dtype=np.int32)}))
    return state, scalars


def test_an_early_stop_holds_no_schedule_back():
    task = Ppo(**SMALL, target_kl=1e-5)
    state, scalars = stepped(task, 3)
    assert float(scalars["updates"]) < task.updates
    assert int(state.optimizer_state["count"]) == 3 * task.updates
    rate = DECAY.learning_rate(3 * task.updates)
    np.testing.assert_allclose(float(scalars["learning_rate"]), float(rate(3 * task.updates - 1)), rtol=1e-6)


@pytest.mark.parametrize("optimizer", [Soap(), Shampoo()])
def test_optimizers_that_renew_between_steps_are_refused(optimizer):
    with pytest.raises(
        RecipeError, match=r"makes 8 updates in a step, which can't be combined with (Soap|Shampoo), which renews"
    ):
        Program.create(Ppo(**SMALL), optimizer, num_steps=5, config=StepConfig(clip_norm=None))


def test_more_updates_than_32_bits_count_are_refused():
    with pytest.raises(RecipeError, match="set at most 268,435,455 steps"):
        Program.create(Ppo(**SMALL), DECAY, num_steps=2**28)


@pytest.mark.parametrize("count", [2, 11, 20])
def test_memories_are_read_in_their_own_order(count):
    leaves = {f"memory{number}": jnp.full((1,), number) for number in range(count)}
    shuffled = dict(sorted({**leaves, "memory_of_something_else": jnp.zeros(1)}.items()))
    seen = []

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Remembering(PerceptronPolicy):
        def initial_carry(self, rows: int) -> Any:
            return [jnp.zeros(rows)] * count

        def unroll(self, params: Any, memory: Any, observation: Any, begins: Any) -> Any:
            seen.extend(int(leaf[0]) for leaf in memory)
            raise StopIteration

    task = dataclasses.replace(Ppo(**SMALL), policy=Remembering(hidden=(8,)))
    batch = {**shuffled, "observation": jnp.zeros((1, 4)), "begins": jnp.zeros(1, bool), "drawn": jnp.zeros(1)}
    with pytest.raises(StopIteration):
        task.losses(task.init(jax.random.key(0))[0], {}, batch, jax.random.key(0))
    assert seen == list(range(count))


@pytest.mark.parametrize("numbers", [(0.3, -1.0), (0.0, 0.0), (-2.0, 0.5)])
def test_the_entropy_of_a_squashed_normal_has_its_own_gradient(numbers):
    family = SquashedGaussian(space=Box(low=-1.0, high=1.0, shape=(1,)))
    drawn = family.sample(jnp.zeros((1, 2)), jax.random.split(jax.random.key(0), 1))
    columns = jnp.array([numbers], jnp.float32)
    value, gradient = jax.value_and_grad(lambda x: family.entropy(x, drawn).sum())(columns)
    # The mean over draws that move with the distribution, in double precision: z is a fine grid of the normal's quantiles.
    z = np.sort(np.random.default_rng(0).standard_normal(2_000_001))
    mean, deviation = numbers[0], np.exp(numbers[1])

    def entropy(mean: float, log_deviation: float) -> float:
        u = mean + np.exp(log_deviation) * z
        slope = 2 * (np.log(2) - u - np.logaddexp(0, -2 * u))
        return float(log_deviation + 0.5 * np.log(2 * np.pi * np.e) + slope.mean())

    # The spread of slope over the draws, over the root of their number, three times.
    tolerance = 3 * 4 * max(deviation, 1.0) / np.sqrt(len(z))
    assert float(value) == pytest.approx(entropy(*numbers), abs=tolerance)
    step = 1e-3
    wanted = [
        (entropy(mean + step, numbers[1]) - entropy(mean - step, numbers[1])) / (2 * step),
        (entropy(mean, numbers[1] + step) - entropy(mean, numbers[1] - step)) / (2 * step),
    ]
    np.testing.assert_allclose(gradient[0], wanted, atol=tolerance)


def replay_of(added: int, places: int = 24) -> Replay:
    abstract = Replay.create(CartPole().observation_space, jax.ShapeDtypeStruct((), jnp.int32), 2, places)
    return dataclasses.replace(abstract, added=jnp.int32(added))


@pytest.mark.parametrize("added", [1_048_575, 1_048_576, 1_100_000, 2**30])
def test_exploring_ends_for_good(added):
    task = Dqn(
        environment=CartPole(max_steps=50), policy=PerceptronPolicy(hidden=(8,)), environments=2048, steps=1, batch_size=2048,
        capacity=2048 * 128, warmup=1, epsilon=(1.0, 0.05), epsilon_steps=1_000_000, evaluation_episodes=2, evaluation_steps=5,
    )  # fmt: skip
    assert float(task.current_epsilon(replay_of(added))) == pytest.approx(0.05)


def test_the_count_of_transitions_stays_in_32_bits():
    replay = replay_of(2**30 - 8)
    place = int(replay.added) % replay.capacity
    for _ in range(3):
        seen = jax.tree.map(lambda leaf: jnp.zeros((8, 2, *leaf.shape[2:]), leaf.dtype), replay.experience)
        replay, place = replay.add(seen), (place + 8) % replay.capacity
        assert replay.capacity <= int(replay.added) < 2**30 + 8
        assert int(replay.added) % replay.capacity == place


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("what", ["reward", "observation"])
def test_no_number_of_an_environment_is_overlooked(what, value):
    given = {"reward": jnp.zeros((3, 2)), "observation": jnp.zeros((3, 2, 4))}
    given[what] = given[what].at[1].set(value)
    found = check_rollout(**given)
    assert bool(found.has_failed)
    with pytest.raises(DataError, match=f"{what} that is not finite: {value}"):
        found.raise_if_failed("the batch of step 1")
    assert not bool(check_rollout(jnp.zeros(3), jnp.full(3, -1e30)).has_failed)


def test_seeds_report_the_mean_of_their_losses():
    task = Seeds(task=Ppo(**SMALL), count=3)
    losses = {"value": Loss(jnp.float32(6.0), jnp.float32(2.0))}
    assert float(collect_scalars(losses, {}, task.num_runs)["loss/value"]) == 1.0
