"""A recipe that trains in a second, on a few real files."""

import json

from panax import Experiment
from panax.checkpoint import CheckpointConfig
from panax.data import BytePairTokenizer, TextData, TextFiles
from panax.models import DecoderConfig, DecoderTask
from panax.optim import AdamW, Schedule
from panax.run import EvaluateConfig

FOLDER = json.__path__[0]


def tiny() -> Experiment:
    """A two-layer decoder on the sources of one package."""
    return Experiment(
        name="tiny",
        task=DecoderTask(
            model=DecoderConfig(max_length=64, embed=32, num_layers=2, heads=2, ffn=64, windows=(16,), dropout=0.1)
        ),
        data=TextData(
            corpus=TextFiles(paths=(FOLDER,), pattern="*.py"),
            tokenizer=BytePairTokenizer(vocab_size=300),
            sequence_length=64,
            batch_size=8,
            held_out=1,
        ),
        optimizer=AdamW(schedule=Schedule(peak=6e-3, warmup_steps=5)),
        num_steps=30,
        evaluate=EvaluateConfig(every=10, batches=2),
        checkpoint=CheckpointConfig(every=5, keep_last=2, keep_best=1),
        log_every=5,
    )
