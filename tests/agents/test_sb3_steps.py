"""One training step of DQN and SAC against stable-baselines3's own `train`, which `sb3_steps.py` called on the same numbers.

The tolerance is of float32: each number is a chain of at most 6 sums, forwards and backwards through three layers, of at most
6 terms, and one of 16 rows, with some ten elementwise operations at each level. Each rounds by at most 2^-24 of its result;
128 of them at most are 8e-6 of the largest number of the same array.

What differs by design, and so is not compared: SAC's actor moves after the critics there, and with them here, so that its loss
is compared at their critics "after"; the temperature has Adam there, so that its gradient is compared, not where it leads to.
`Dqn` is double by default, theirs never is. Its Huber form is the one that both have.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from panax.agents import Dqn, PerceptronPolicy, Sac
from panax.agents.off_policy import OffPolicy
from panax.agents.policies import Layers
from panax.core import named_leaves
from panax.environments import Box, Discrete, Environment, EnvironmentStep, Space
from panax.environments.batch import row_keys
from panax.optim import Schedule, Sgd
from panax.train import Program, StepConfig

GOLDEN = json.loads((Path(__file__).parent / "sb3_steps.json").read_text())
ROWS, RATE, CLIP, KEY = 16, 0.05, 0.5, 5
"""As sb3_steps.py has them."""

TOLERANCE = 128 * 2.0**-24


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nowhere(Environment):
    """Only spaces: it stays where it is."""

    actions: Space

    @property
    def action_space(self) -> Space:
        return self.actions

    @property
    def observation_space(self) -> Box:
        return Box(low=-np.inf, high=np.inf, shape=(3,))

    def reset(self, key):
        return jnp.int32(0), jnp.zeros(3)

    def step(self, state, action, key):
        return EnvironmentStep(state, jnp.zeros(3), jnp.float32(0.0), jnp.bool_(False), jnp.bool_(False))


POLICY = PerceptronPolicy(hidden=(6, 5), activation="relu")
COMMON: dict[str, Any] = {"policy": POLICY, "batch_size": ROWS, "capacity": 128, "warmup": 1, "discount": 0.97}
DQN = Dqn(environment=Nowhere(actions=Discrete(count=3)), double=False, **COMMON)
SAC = Sac(
    environment=Nowhere(actions=Box(low=-1.0, high=1.0, shape=(2,))),
    critic_hidden=(6, 5),
    target_entropy=-1.5,
    tau=0.1,
    **COMMON,
)


def batch_of(numbers: dict[str, Any]) -> dict[str, jax.Array]:
    """What their buffer drew. Only what terminated is told, as our buffer keeps it; theirs was told what was truncated, too."""
    drawn = np.array(numbers["drawn"])
    batch = {
        name: np.array(numbers[name])[drawn] for name in ("reward", "terminated", "observation", "next_observation")
    }
    assert batch["terminated"].any() and np.array(numbers["truncated"])[drawn].any()
    action = np.array(numbers["action"])[drawn]
    batch["action"] = action.astype(np.int32 if action.ndim == 1 else np.float32)
    batch = {name: leaf.astype(np.float32) if leaf.dtype == np.float64 else leaf for name, leaf in batch.items()}
    return {name: jnp.asarray(leaf) for name, leaf in {**batch, "row": np.arange(ROWS, dtype=np.int32)}.items()}


def layers_of(numbers: dict[str, Any], *names: tuple[str, ...]) -> Layers:
    """Dense layers with torch's weights, each by its name there; of several names, side by side."""
    layers = Layers.build(jax.random.key(0), 1, [1] * len(names), activation="relu")

    def joined(which: tuple[str, ...], kind: str) -> jax.Array:
        return jnp.asarray(np.concatenate([np.array(numbers[f"{name}.{kind}"], np.float32) for name in which]).T)

    params_and_state = (
        dataclasses.replace(layer, w=joined(which, "weight"), b=joined(which, "bias"))
        for layer, which in zip(layers.layers, names)
    )
    return dataclasses.replace(layers, layers=tuple(params_and_state))


def network_of(numbers: dict[str, Any], name: str) -> Layers:
    return layers_of(numbers, *((f"{name}.{place}",) for place in (0, 2, 4)))


def actor_of(numbers: dict[str, Any]) -> Layers:
    return layers_of(numbers, ("latent_pi.0",), ("latent_pi.2",), ("mu", "log_std"))


def drawn_params(task: OffPolicy) -> Any:
    return task.networks(jax.random.key(0))


def assert_equal(found: Any, expected: Any) -> None:
    """Each leaf to within `TOLERANCE` of its largest number."""
    expected_leaves = named_leaves(expected)
    assert named_leaves(found).keys() == expected_leaves.keys()
    for name, leaf in named_leaves(found).items():
        largest = np.abs(expected_leaves[name]).max()
        assert largest > 0, name
        np.testing.assert_allclose(leaf, expected_leaves[name], rtol=0, atol=TOLERANCE * largest, err_msg=name)


def dqn_params(numbers: dict[str, Any]) -> Any:
    params: Any = drawn_params(DQN)
    actor = network_of(numbers, "q_net")
    return dataclasses.replace(params, policy=dataclasses.replace(params.policy, actor=actor))


@pytest.fixture(scope="module")
def dqn_step() -> tuple[Any, Any]:
    """The parameters after our whole update, clipped and by SGD, and its scalars."""
    theirs = GOLDEN["dqn"]
    program = Program.create(
        DQN, Sgd(schedule=Schedule(peak=RATE, decay="constant")), num_steps=1, config=StepConfig(clip_norm=CLIP)
    )
    target = dqn_params(theirs["before"]["target"])
    params_and_state = dqn_params(theirs["before"]["network"]), {"target": target, "updates_made": jnp.int32(0)}
    state = program.initial_state(jax.random.key(0), params_and_state)
    after, scalars = jax.jit(program.one_step)(state, batch_of(theirs["transitions"]))
    return after.params, scalars


def test_a_whole_update_of_dqn(dqn_step):
    """Loss, gradient by SGD at a rate that is known, its norm's limit, and the weights that it leads to."""
    theirs = GOLDEN["dqn"]
    params, scalars = dqn_step
    assert float(scalars["loss"]) == pytest.approx(theirs["loss"], rel=TOLERANCE)
    assert float(scalars["gradient_norm"]) > CLIP
    assert_equal(params.policy.actor, network_of(theirs["after"], "q_net"))


def test_the_gradient_of_dqn():
    """Their clipped gradient, in its own scale: that of a weight is small beside the weight."""
    theirs = GOLDEN["dqn"]
    state = {"target": dqn_params(theirs["before"]["target"])}

    def loss(params: Any) -> jax.Array:
        actual = DQN.losses(params, state, batch_of(theirs["transitions"]), jax.random.key(0)).losses["value"]
        return actual.sum / actual.weight

    actual = jax.jit(jax.grad(loss))(dqn_params(theirs["before"]["network"])).policy.actor
    norm = np.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(actual)))
    clipped = jax.tree.map(lambda leaf: leaf * (CLIP / norm), actual)
    assert_equal(clipped, network_of(theirs["clipped_gradient"], "q_net"))


def sac_params(actor: dict[str, Any], critic: dict[str, Any]) -> Any:
    params: Any = drawn_params(SAC)
    return dataclasses.replace(
        params,
        actor=dataclasses.replace(params.actor, actor=actor_of(actor)),
        critics=critics_of(critic),
        log_temperature=jnp.float32(GOLDEN["sac"]["before"]["log_temperature"]),
    )


def critics_of(numbers: dict[str, Any]) -> Any:
    made = drawn_params(SAC).critics
    return dataclasses.replace(made, each=tuple(network_of(numbers, f"qf{number}") for number in range(2)))


@functools.cache
def sac_losses(critics: str) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """Each loss, a mean, and its gradient, with their critics "before" or "after" they moved."""
    theirs = GOLDEN["sac"]
    params = sac_params(theirs["before"]["actor"], theirs[critics]["critic"])
    state = {"target": critics_of(theirs["before"]["critic_target"])}
    batch = batch_of(theirs["transitions"])

    @jax.jit
    def both(params: Any) -> tuple[Any, Any]:
        def means(params: Any) -> dict[str, jax.Array]:
            actual = SAC.losses(params, state, batch, jax.random.key(KEY)).losses
            return {name: loss.sum / loss.weight for name, loss in actual.items()}

        return means(params), jax.jacrev(means)(params)

    return both(params)


def test_the_noise_is_theirs():
    """Theirs was handed what ours is drawn from."""
    keys = jax.random.split(jax.random.key(KEY))
    for key, expected in zip(keys, GOLDEN["sac"]["noise"]):
        drawn = SAC.distribution.sample(jnp.zeros((ROWS, 4)), row_keys(key, jnp.arange(ROWS)))
        # The same bits give the same uniform numbers; the inverse error function after them is a polynomial, of which compilers
        # fuse other multiplications and additions at each optimization level: up to 4 units in the last place.
        np.testing.assert_array_max_ulp(np.asarray(drawn), np.array(expected, np.float32), maxulp=4)


@pytest.mark.parametrize(("name", "critics"), [("critic", "before"), ("temperature", "before"), ("actor", "after")])
def test_losses_of_sac_and_their_gradients(name, critics):
    theirs = GOLDEN["sac"]
    losses, gradients = sac_losses(critics)
    assert float(losses[name]) == pytest.approx(theirs["losses"][name], rel=TOLERANCE)
    gradient, expected = gradients[name], theirs["gradient"]
    if name == "critic":
        assert_equal(gradient.critics, critics_of(expected["critic"]))
    elif name == "actor":
        assert_equal(gradient.actor.actor, actor_of(expected["actor"]))
    else:
        assert float(gradient.log_temperature) == pytest.approx(expected["log_temperature"], rel=TOLERANCE)


def test_critics_and_their_targets_after_a_step_of_sac():
    """By SGD; target networks then follow what moved."""
    theirs = GOLDEN["sac"]
    before = sac_params(theirs["before"]["actor"], theirs["before"]["critic"])
    gradient = sac_losses("before")[1]["critic"].critics
    moved = jax.tree.map(lambda weight, slope: weight - RATE * slope, before.critics, gradient)
    assert_equal(moved, critics_of(theirs["after"]["critic"]))
    state = {"target": critics_of(theirs["before"]["critic_target"]), "updates_made": jnp.int32(0)}
    followed = SAC.update_state(dataclasses.replace(before, critics=moved), state)["target"]
    assert_equal(followed, critics_of(theirs["after"]["critic_target"]))
