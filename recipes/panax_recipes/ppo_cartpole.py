"""A first agent: PPO that balances a pole."""

from panax.agents import Film, PerceptronPolicy, Ppo
from panax.environments import CartPole
from panax.optim import AdamW, Schedule
from panax.run import EvaluateConfig, Experiment
from panax.train import StepConfig


def ppo_cartpole() -> Experiment:
    """Balance a pole on a cart with PPO: 65,536 steps in 8 environments, in 8 calls of one compiled program.

    An evaluation plays 100 episodes with the likeliest actions. 500 is the best return there is.

    Command: panax train ppo_cartpole
    Hardware: two CPU cores: 8 s in all, 3.5 s of them compilation.
    Expected: a return of 499 or more on each of 10 seeds.
    """
    task = Ppo(
        environment=CartPole(),
        policy=PerceptronPolicy(hidden=(64, 64)),
        environments=8,
        steps=128,
        rollouts_per_step=8,
        epochs=10,
        minibatches=4,
        evaluation_episodes=100,
        evaluation_steps=500,
    )
    return Experiment(
        name="ppo_cartpole",
        task=task,
        optimizer=AdamW(
            schedule=Schedule(peak=1e-3, decay="linear", final=0.0), weight_decay=0.0, b2=0.999, epsilon=1e-5
        ),
        num_steps=8,
        step=StepConfig(clip_norm=0.5),
        hooks=(Film(),),
        evaluate=EvaluateConfig(every=4),
        log_every=1,
    )
