"""Continuous actions, learned from a replay buffer: SAC that swings a pendulum up."""

from panax.agents import Film, PerceptronPolicy, Sac
from panax.environments import Pendulum
from panax.optim import AdamW, Schedule
from panax.run import EvaluateConfig, Experiment
from panax.train import StepConfig


def sac_pendulum() -> Experiment:
    """SAC on Pendulum: a mean return of at least -200 within a million steps.

    Command: panax train sac_pendulum

    80,000 steps, a minute on two CPU cores, compilation included. Three seeds end with -144, -145 and -154.
    """
    task = Sac(
        environment=Pendulum(),
        policy=PerceptronPolicy(hidden=(64, 64), activation="relu"),
        critic_hidden=(64, 64),
        environments=8,
        steps=1,
        rollouts_per_step=250,
        updates=2,
        batch_size=128,
        capacity=64_000,
        warmup=125,
        evaluation_episodes=64,
        evaluation_steps=200,
    )
    return Experiment(
        task=task,
        name="sac_pendulum",
        optimizer=AdamW(schedule=Schedule(peak=1e-3, decay="linear", final=0.05), weight_decay=0.0),
        num_steps=40,
        step=StepConfig(clip_norm=None),
        evaluate=EvaluateConfig(every=10),
        hooks=(Film(),),
        log_every=1,
    )
