"""Supervised training on sums with answers of which a fifth is right: grpo_arithmetic continues."""

from panax.data import Jsonl, TextData
from panax.generate.scoring import QuestionConfig
from panax.models import DecoderConfig, DecoderTask
from panax.optim import AdamW, Schedule
from panax.run import EvaluateConfig, Experiment

from .sums import sums_folder, sums_tokenizer


def sft_arithmetic() -> Experiment:
    """Train a small decoder on sums of two numbers, with answers of which a fifth is right and the others are one too large or
    too small.

    Command: panax train sft_arithmetic
    Hardware: two CPU cores (AMD EPYC); a minute or two.
    Expected: few greedy answers are right: the wrong ones are twice as frequent each.
    """
    folder = sums_folder()
    model = DecoderConfig(max_length=128, embed=128, num_layers=4, heads=4, ffn=384, qk_norm=True)
    return Experiment(
        name="sft_arithmetic",
        task=DecoderTask(model=model),
        data=TextData(
            corpus=Jsonl(paths=(str(folder / "answered.jsonl"),), prompt="prompt", answer="answer"),
            tokenizer=sums_tokenizer(),
            sequence_length=16,
            packing=False,
            batch_size=64,
        ),
        optimizer=AdamW(schedule=Schedule(peak=1e-3, warmup_steps=20, decay="constant")),
        num_steps=900,
        evaluate=EvaluateConfig(every=300),
        questions=QuestionConfig(files=(str(folder / "questions.jsonl"),), tokens=5, rows=64),
    )
