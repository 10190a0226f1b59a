"""An arcade game of gymnax, played inside the compiled step: PPO on MinAtar's Breakout."""

from panax.agents import Film, PerceptronPolicy, Ppo
from panax.environments import Gymnax
from panax.optim import AdamW, Schedule
from panax.run import EvaluateConfig, Experiment
from panax.train import StepConfig


def ppo_breakout() -> Experiment:
    """PPO on Breakout for a million steps, with PureJaxRL's settings. Needs gymnax, which is for jax below 0.12.

    Command: panax train ppo_breakout

    999,424 steps, 24 s on two CPU cores, compilation included and films not. Three seeds ended with returns of 22.1 to 26.5;
    PureJaxRL's own code with 16.8 to 25.9.
    """
    task = Ppo(
        environment=Gymnax(name="Breakout-MinAtar"),
        policy=PerceptronPolicy(hidden=(64, 64), activation="relu"),
        environments=64,
        steps=128,
        rollouts_per_step=2,
        epochs=4,
        minibatches=8,
        clip=0.2,
        value_clip=0.2,
        vf_coef=0.5,
        ent_coef=0.01,
        evaluation_episodes=64,
        evaluation_steps=1000,
        stochastic_eval=True,
    )
    return Experiment(
        task=task,
        name="ppo_breakout",
        optimizer=AdamW(schedule=Schedule(peak=5e-3, decay="linear", final=0.0), weight_decay=0.0),
        num_steps=61,
        step=StepConfig(clip_norm=0.5),
        evaluate=EvaluateConfig(every=20),
        hooks=(Film(max_steps=400),),
        log_every=1,
    )
