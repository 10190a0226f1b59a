"""Writes `sb3_steps.json`: one training step each of stable-baselines3's own `DQN.train` and `SAC.train`, from fixed numbers.

Run by hand where torch, stable-baselines3 2.9.2 and gymnasium are:
`python tests/agents/sb3_steps.py > tests/agents/sb3_steps.json`.

Nothing of theirs is written again here: their networks, their replay buffer and their optimizers are given weights and
transitions, `train(gradient_steps=1)` is called, and its results are read. Their noise is handed to them, as Panax
draws it from `KEY`. Their density's epsilon of 1e-6, which their authors call a guard against NaN, is set to 0.
"""

import json
import sys
from typing import Any

import gymnasium
import jax
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3 import DQN, SAC
from stable_baselines3.common.logger import configure
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from torch.distributions import normal

KEPT, BATCH, SEEN, ACTIONS, HIDDEN, KEY = 24, 16, 3, 2, [6, 5], 5
COMMON: dict[str, Any] = {
    "policy": "MlpPolicy", "learning_rate": 0.05, "buffer_size": KEPT, "batch_size": BATCH, "gamma": 0.97, "device": "cpu",
    "policy_kwargs": {"net_arch": HIDDEN, "activation_fn": torch.nn.ReLU, "optimizer_class": torch.optim.SGD},
}  # fmt: skip


class Nowhere(gymnasium.Env):
    """Only spaces: no step is taken in it."""

    def __init__(self, action_space: spaces.Space):
        self.observation_space = spaces.Box(-np.inf, np.inf, (SEEN,))
        self.action_space = action_space


def given_weights(generator: np.random.Generator, *networks: torch.nn.Module, scale: float = 0.8) -> None:
    for network in networks:
        for weight in network.parameters():
            drawn = generator.standard_normal(weight.shape, dtype=np.float32)
            weight.data = torch.tensor(drawn * np.float32(scale if weight.ndim == 2 else 0.3))


def filled(model: OffPolicyAlgorithm, generator: np.random.Generator) -> dict[str, Any]:
    """Put transitions into its buffer; what the next `sample` draws is put under "drawn" when it does."""
    buffer, buffer_arrays = model.replay_buffer, {}
    assert buffer is not None
    discrete = isinstance(model.action_space, spaces.Discrete)
    buffer_arrays["observation"] = generator.standard_normal((KEPT, SEEN), dtype=np.float32)
    buffer_arrays["next_observation"] = generator.standard_normal((KEPT, SEEN), dtype=np.float32)
    buffer_arrays["reward"] = generator.standard_normal(KEPT, dtype=np.float32)
    buffer_arrays["action"] = (
        generator.integers(3, size=KEPT) if discrete else generator.uniform(-0.95, 0.95, (KEPT, ACTIONS))
    ).astype(np.int64 if discrete else np.float32)
    buffer_arrays["terminated"] = generator.random(KEPT) < 0.25
    buffer_arrays["truncated"] = (generator.random(KEPT) < 0.3) & ~buffer_arrays["terminated"]
    for i in range(KEPT):
        done = buffer_arrays["terminated"][i] | buffer_arrays["truncated"][i]
        told = [{"TimeLimit.truncated": bool(buffer_arrays["truncated"][i])}]
        seen, following = buffer_arrays["observation"][i][None], buffer_arrays["next_observation"][i][None]
        buffer.add(
            seen, following, buffer_arrays["action"][i][None], buffer_arrays["reward"][i][None], np.array([done]), told
        )
    arrays = dict(buffer_arrays)
    theirs = buffer._get_samples

    def recorded(places: np.ndarray, env: Any = None) -> Any:
        arrays["drawn"] = np.array(places)
        return theirs(places, env)

    buffer._get_samples = recorded  # type: ignore[method-assign]
    model.set_logger(configure(None, []))
    return arrays


def weights(network: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: weight.detach().numpy().copy() for name, weight in network.named_parameters()}


def recording(optimizer: torch.optim.Optimizer, network: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """The gradients that the optimizer is given, once it is."""
    arrays: dict[str, np.ndarray] = {}

    def record(*_: Any) -> None:
        for name, weight in network.items():
            assert weight.grad is not None
            arrays[name] = weight.grad.detach().numpy().copy()

    optimizer.register_step_pre_hook(record)
    return arrays


def dqn() -> dict[str, Any]:
    """Its gradient is clipped: `max_grad_norm` is smaller than its norm."""
    generator = np.random.default_rng(11)
    model = DQN(env=Nowhere(spaces.Discrete(3)), max_grad_norm=0.5, **COMMON)
    given_weights(generator, model.q_net, model.q_net_target)
    transitions = filled(model, generator)
    before = {"network": weights(model.q_net), "target": weights(model.q_net_target)}
    clipped = recording(model.policy.optimizer, dict(model.q_net.named_parameters()))
    np.random.seed(3)
    model.train(gradient_steps=1, batch_size=BATCH)
    return {
        "transitions": transitions,
        "before": before,
        "loss": model.logger.name_to_value["train/loss"],
        "clipped_gradient": clipped,
        "after": weights(model.q_net),
    }


def sac() -> dict[str, Any]:
    """Temperature and critics move before the actor's loss is taken: that one is of the critics "after"."""
    generator = np.random.default_rng(12)
    space = spaces.Box(-1.0, 1.0, (ACTIONS,))
    model = SAC(env=Nowhere(space), tau=0.1, ent_coef="auto_0.4", target_entropy=-1.5, **COMMON)
    # Small enough that tanh does not round to 1 where the density has no epsilon.
    given_weights(generator, model.actor, scale=0.4)
    given_weights(generator, model.critic, model.critic_target)
    model.actor.action_dist.epsilon = 0.0
    transitions = filled(model, generator)
    before = {name: weights(getattr(model, name)) for name in ("actor", "critic", "critic_target")}
    log_temperature, temperature_optimizer = model.log_ent_coef, model.ent_coef_optimizer
    assert log_temperature is not None and temperature_optimizer is not None
    before_temperature = log_temperature.item()
    gradient = {
        "actor": recording(model.actor.optimizer, dict(model.actor.named_parameters())),
        "critic": recording(model.critic.optimizer, dict(model.critic.named_parameters())),
        "log_temperature": recording(temperature_optimizer, {"": log_temperature}),
    }
    # Theirs is first of what was seen, then of what followed; one row of the batch, one number.
    noise = np.stack([noise_of(key) for key in jax.random.split(jax.random.key(KEY))])
    left = iter(noise)
    setattr(normal, "_standard_normal", lambda shape, dtype, device: torch.tensor(next(left)).reshape(shape))  # noqa: B010
    np.random.seed(4)
    model.train(gradient_steps=1, batch_size=BATCH)
    assert next(left, None) is None
    logged = model.logger.name_to_value
    return {
        "transitions": transitions,
        "noise": noise,
        "before": {**before, "log_temperature": before_temperature},
        "losses": {
            "critic": logged["train/critic_loss"],
            "actor": logged["train/actor_loss"],
            "temperature": logged["train/ent_coef_loss"],
        },
        "gradient": {**gradient, "log_temperature": gradient["log_temperature"][""][0]},
        "after": {name: weights(getattr(model, name)) for name in ("critic", "critic_target", "actor")},
    }


def noise_of(key: jax.Array) -> np.ndarray:
    rows = jax.vmap(lambda row: jax.random.fold_in(key, row))(np.arange(BATCH))
    return np.asarray(jax.vmap(lambda own: jax.random.normal(own, (ACTIONS,), np.float32))(rows))


def written(value: Any) -> Any:
    """As JSON: the shortest decimals that are the same float32."""
    if isinstance(value, dict):
        return {name: written(each) for name, each in value.items()}
    if isinstance(value, np.ndarray) and value.ndim:
        return [written(each) for each in value]
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, int | np.integer):
        return int(value)
    return float(str(np.float32(value)))


if __name__ == "__main__":
    json.dump({"dqn": written(dqn()), "sac": written(sac())}, sys.stdout)
    print()
