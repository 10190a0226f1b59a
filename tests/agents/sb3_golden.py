"""Writes `sb3_golden.json`: advantages, losses and densities of stable-baselines3 2.9.2 on fixed numbers.

Run by hand where torch and stable-baselines3 are: `python tests/agents/sb3_golden.py > tests/agents/sb3_golden.json`.
"""

import json
import sys

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.distributions import (
    CategoricalDistribution,
    DiagGaussianDistribution,
    SquashedDiagGaussianDistribution,
)

TIME, ENVIRONMENTS, DISCOUNT, TRACE = 12, 3, 0.97, 0.9


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def advantages() -> dict:
    """Of `RolloutBuffer`; a time limit's value is added to the reward, as `collect_rollouts` does it."""
    generator = np.random.default_rng(7)
    reward, value, final = drawn(1, TIME, ENVIRONMENTS), drawn(2, TIME, ENVIRONMENTS), drawn(3, TIME, ENVIRONMENTS)
    terminated = generator.random((TIME, ENVIRONMENTS)) < 0.15
    truncated = (generator.random((TIME, ENVIRONMENTS)) < 0.2) & ~terminated
    last = drawn(4, ENVIRONMENTS)
    buffer = RolloutBuffer(
        TIME,
        spaces.Box(-1, 1, (1,)),
        spaces.Discrete(2),
        device="cpu",
        gae_lambda=TRACE,
        gamma=DISCOUNT,
        n_envs=ENVIRONMENTS,
    )
    begins = np.ones(ENVIRONMENTS)
    for step in range(TIME):
        rewards = reward[step] + DISCOUNT * np.where(truncated[step], final[step], 0.0)
        zeros = np.zeros((ENVIRONMENTS, 1), np.float32)
        buffer.add(zeros, zeros, rewards, begins, torch.tensor(value[step]), torch.zeros(ENVIRONMENTS))
        begins = (terminated | truncated)[step].astype(np.float32)
    buffer.compute_returns_and_advantage(torch.tensor(last), begins)
    inputs = {"reward": reward, "value": value, "final": final, "terminated": terminated, "truncated": truncated}
    golden = {"advantage": buffer.advantages, "target": buffer.returns}
    return {name: array.tolist() for name, array in {**inputs, "last": last, **golden}.items()}


def losses() -> dict:
    """The lines of `PPO.train` between the policy's evaluation and the backward pass."""
    log_ratio, advantage = 0.4 * drawn(5, 64), drawn(6, 64)
    value, old, target = drawn(8, 64), drawn(9, 64), drawn(10, 64)
    ratio = torch.exp(torch.tensor(log_ratio))
    normal = torch.tensor(advantage)
    policy = -torch.min(normal * ratio, normal * torch.clamp(ratio, 0.8, 1.2)).mean()
    clipped = torch.tensor(old) + torch.clamp(torch.tensor(value - old), -0.3, 0.3)
    return {
        **{name: array.tolist() for name, array in (("log_ratio", log_ratio), ("advantage", advantage))},
        **{name: array.tolist() for name, array in (("value", value), ("old", old), ("target", target))},
        "policy_loss": policy.item(),
        "value_loss": torch.nn.functional.mse_loss(torch.tensor(target), clipped).item(),
        "divergence": ((ratio - 1) - torch.tensor(log_ratio)).mean().item(),
        "clipped": ((ratio - 1).abs() > 0.2).float().mean().item(),
    }


def densities() -> dict:
    mean, deviation, raw = drawn(11, 16, 3), 0.3 * drawn(12, 3), drawn(13, 16, 3)
    gaussian = DiagGaussianDistribution(3).proba_distribution(torch.tensor(mean), torch.tensor(deviation))
    squashed = SquashedDiagGaussianDistribution(3, epsilon=0.0).proba_distribution(
        torch.tensor(mean), torch.tensor(deviation)
    )
    logits, choice = drawn(14, 16, 4), np.arange(16) % 4
    categorical = CategoricalDistribution(4).proba_distribution(torch.tensor(logits))
    return {
        "mean": mean.tolist(),
        "log_deviation": deviation.tolist(),
        "drawn": raw.tolist(),
        "gaussian": gaussian.log_prob(torch.tensor(raw)).tolist(),
        "gaussian_entropy": gaussian.entropy().tolist(),
        "squashed": squashed.log_prob(torch.tanh(torch.tensor(raw)), torch.tensor(raw)).tolist(),
        "logits": logits.tolist(),
        "choice": choice.tolist(),
        "categorical": categorical.log_prob(torch.tensor(choice)).tolist(),
        "categorical_entropy": categorical.entropy().tolist(),
    }


if __name__ == "__main__":
    json.dump({"advantages": advantages(), "losses": losses(), "densities": densities()}, sys.stdout)
    print()
