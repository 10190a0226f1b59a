"""A tiny model of letters that learns from rollouts in a second or two."""

import dataclasses
import json
import os

from panax import Experiment
from panax.checkpoint import CheckpointConfig
from panax.data import BytePairTokenizer, PretrainedTokenizer, TextFiles
from panax.mesh import MeshShape
from panax.models import DecoderConfig, DecoderTask, PolicyGradient
from panax.optim import AdamW, Schedule
from panax.rollouts import PromptFiles, Reward, RolloutData
from panax.run import EvaluateConfig

REWARDS = __file__.replace("letters.py", "reward_functions.py")
PROMPTS = "abcdefghijklmnop"
MARK = "LETTERS_MARK"
"""Variable with the file by which rewards count: in the records it would change which prompts are held out."""

MESHES = [
    (MeshShape(fsdp=2), 2),
    (MeshShape(tensor=2), 2),
    (MeshShape(replica=2, fsdp=1, context=2), 4),
    (MeshShape(fsdp=1, stage=2), 2),
    (MeshShape(fsdp=2, tensor=2, context=2), 8),
]
"""Meshes on which runs equal one device, with their numbers of devices."""


def write_files(folder):
    """The prompts and a tokenizer of bytes."""
    os.environ[MARK] = str(folder / "mark")
    lines = [json.dumps({"prompt": letter}) for letter in PROMPTS]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "text.txt").write_text("abcdefgh " * 50)
    tokenizer = BytePairTokenizer(vocab_size=257).train(TextFiles(paths=(str(folder / "text.txt"),)))
    tokenizer.save(folder / "tokenizer")


def letters(folder, reward="share_of_letters", *, objective=None, data=None, model=None, **settings) -> Experiment:
    """Rollouts of four prompts with four answers of up to six tokens each."""
    rollouts = RolloutData(
        prompts=PromptFiles(paths=(str(folder / "prompts.jsonl"),)),
        rewards=(Reward(function=f"{REWARDS}:{reward}", seconds=5.0),),
        tokenizer=PretrainedTokenizer(path=str(folder / "tokenizer")),
        batch_size=4,
        samples=4,
        tokens=6,
        prompt_tokens=2,
        processes=1,
        rows=16,
        held_out=0.25,
    )
    return Experiment(
        **{
            "name": "letters",
            "task": DecoderTask(
                model=DecoderConfig(
                    **{"vocab_size": 257, "max_length": 16, "embed": 32, "num_layers": 1, "heads": 2, "ffn": 64}
                    | (model or {})
                ),
                objective=objective or PolicyGradient(),
            ),
            "data": dataclasses.replace(rollouts, **(data or {})),
            "optimizer": AdamW(schedule=Schedule(peak=2e-2, warmup_steps=1)),
            "num_steps": 6,
            "directory": str(folder / "run"),
            "evaluate": EvaluateConfig(every=0),
            "checkpoint": CheckpointConfig(every=1, keep_last=20, keep_best=0),
            "log_every": 1,
            **settings,
        }
    )
