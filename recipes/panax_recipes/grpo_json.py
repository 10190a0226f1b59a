"""Reinforcement learning of answers in JSON, after sft_json."""

import dataclasses

from panax.models import DecoderTask, PolicyGradient
from panax.optim import AdamW, Schedule
from panax.rollouts import PromptFiles, Reward, RolloutData
from panax.run import EvaluateConfig, Experiment

from .json_objects import objects_folder, objects_tokenizer
from .sft_json import sft_json


def grpo_json() -> Experiment:
    """Teach the model of sft_json to answer with JSON that is valid by the request's own schema and holds its values.

    Command: panax train grpo_json (after panax train sft_json; needs panax[rl])
    Hardware: two CPU cores (AMD EPYC); about 70 s of CPU time.
    Expected: nine in ten greedy answers to requests with values that are new together are right (0.990 and 0.905, two seeds).
    """
    begun = sft_json()
    assert isinstance(begun.task, DecoderTask)
    return dataclasses.replace(
        begun,
        name="grpo_json",
        init="checkpoint:runs/sft_json",
        task=dataclasses.replace(begun.task, objective=PolicyGradient()),
        data=RolloutData(
            prompts=PromptFiles(paths=(str(objects_folder() / "prompts.jsonl"),)),
            # As text: the function's own module needs an extra.
            rewards=(Reward(function="panax.rollouts:json_answer"),),
            tokenizer=objects_tokenizer(),
            batch_size=32,
            samples=8,
            prompt_tokens=32,
            tokens=32,
            rows=256,
            held_out=0.05,
        ),
        optimizer=AdamW(schedule=Schedule(peak=5e-4, warmup_steps=5)),
        num_steps=30,
        evaluate=EvaluateConfig(every=15),
    )
