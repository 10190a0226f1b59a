"""Small models that judge the answers of `letters`: a teacher and a reward model, trained in a second or two."""

import json
import random

import jax

import panax
from panax import Experiment
from panax.checkpoint import CheckpointConfig
from panax.data import Preferences, PretrainedTokenizer, TextData, TextFiles
from panax.models import DecoderConfig, DecoderTask, RewardTask
from panax.optim import AdamW, Schedule
from panax.run import EvaluateConfig


def model(**settings) -> DecoderConfig:
    defaults = {"vocab_size": 257, "max_length": 16, "embed": 48, "num_layers": 2, "heads": 4, "ffn": 64}
    return DecoderConfig(**defaults | settings)


def _train(folder, name, task, data, num_steps) -> str:
    experiment = Experiment(
        name=name,
        task=task,
        data=data,
        optimizer=AdamW(schedule=Schedule(peak=1e-2, warmup_steps=1, decay="constant")),
        num_steps=num_steps,
        directory=str(folder / name),
        evaluate=EvaluateConfig(every=0),
        checkpoint=CheckpointConfig(keep_best=0),
    )
    panax.fit(experiment, devices=jax.devices()[:1], say=lambda line: None)
    return str(folder / name)


def train_teacher(folder, name="teacher", num_steps=60, **settings) -> str:
    """A model of another size than the student, which continues the alphabet; returns its run's folder."""
    return _train_on_text(folder, name, "abcdefghijklmnopqrstuvwxyz" * 40, model(**settings), num_steps)


def train_student(folder, name="student", num_steps=60) -> str:
    """A model of the size of `letters`, which continues the alphabet, but skips every other letter or so."""
    draw, text = random.Random(0), [0]
    for _ in range(2000):
        text.append((text[-1] + draw.choice((1, 2))) % 26)
    config = model(embed=32, num_layers=1, heads=2)
    return _train_on_text(folder, name, "".join(chr(97 + each) for each in text), config, num_steps)


def _train_on_text(folder, name, text, config, num_steps) -> str:
    (folder / f"{name}.txt").write_text(text)
    data = TextData(
        corpus=TextFiles(paths=(str(folder / f"{name}.txt"),)),
        tokenizer=PretrainedTokenizer(path=str(folder / "tokenizer")),
        sequence_length=16,
        batch_size=16,
        held_out=0,
        cache_dir=str(folder / "cache"),
    )
    return _train(folder, name, DecoderTask(model=config), data, num_steps)


def train_reward_model(folder, name="judge", num_steps=60) -> str:
    """A reward model that prefers answers of letters to answers of digits; returns its run's folder."""
    draws = [("abcdefghijklmnop"[at % 16], at) for at in range(64)]
    lines = [
        json.dumps({"prompt": letter, "chosen": "hgfedcba"[at % 5 : at % 5 + 4], "rejected": str(1000 + 37 * at)})
        for letter, at in draws
    ]
    (folder / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    data = TextData(
        corpus=Preferences(paths=(str(folder / "pairs.jsonl"),)),
        tokenizer=PretrainedTokenizer(path=str(folder / "tokenizer")),
        sequence_length=16,
        batch_size=8,
        held_out=0,
        cache_dir=str(folder / "cache"),
    )
    return _train(folder, name, RewardTask(model=model()), data, num_steps)
