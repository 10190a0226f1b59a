"""A first agent: PPO that balances a pole."""

from panax.agents import PerceptronPolicy, Ppo
from panax.environments import CartPole
from panax.optim import AdamW, Schedule
from panax.run import EvaluateConfig, Experiment
from panax.train import StepConfig


def ppo_cartpole() -> Experiment:
    """PPO on CartPole.

    Command: panax train ppo_cartpole
    """
    task = Ppo(
        environment=CartPole(),
        policy=PerceptronPolicy(hidden=(64, 64)),
        environments=8,
        steps=128,
        collections=7,
        epochs=4,
        minibatches=4,
        entropy_weight=0.01,
        evaluation_episodes=100,
        evaluation_steps=500,
    )
    return Experiment(
        task=task,
        name="ppo_cartpole",
        optimizer=AdamW(schedule=Schedule(peak=1e-3), weight_decay=0.0),
        num_steps=14,
        step=StepConfig(clip_norm=0.5),
        evaluate=EvaluateConfig(every=2),
        log_every=1,
    )
