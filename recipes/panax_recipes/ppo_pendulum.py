"""PPO with continuous actions."""

from panax.agents import Film, PerceptronPolicy, Ppo
from panax.environments import Pendulum
from panax.optim import AdamW, Schedule
from panax.run import EvaluateConfig, Experiment
from panax.train import StepConfig


def ppo_pendulum() -> Experiment:
    """Swing a pendulum up with PPO: 983,040 steps in 16 environments, observations and rewards normalized.

    An evaluation plays 100 episodes of 200 steps. Each ends by its time limit, and is bootstrapped from there: no state of a
    pendulum is a death.

    Command: panax train ppo_pendulum
    Hardware: two CPU cores that did other work too, 15 to 20 s in all.
    Expected: returns of -141 to -164 on 5 seeds, +- 20; an episode's own depends on where the pendulum begins.
    """
    task = Ppo(
        environment=Pendulum(),
        policy=PerceptronPolicy(hidden=(64, 64)),
        environments=16,
        steps=128,
        rollouts_per_step=20,
        epochs=10,
        minibatches=8,
        discount=0.95,
        normalize_observations=True,
        normalize_rewards=True,
        evaluation_episodes=100,
        evaluation_steps=200,
    )
    return Experiment(
        name="ppo_pendulum",
        task=task,
        optimizer=AdamW(
            schedule=Schedule(peak=1e-3, decay="linear", final=0.0), weight_decay=0.0, b2=0.999, epsilon=1e-5
        ),
        num_steps=24,
        step=StepConfig(clip_norm=0.5),
        hooks=(Film(),),
        evaluate=EvaluateConfig(every=8),
        log_every=2,
    )
