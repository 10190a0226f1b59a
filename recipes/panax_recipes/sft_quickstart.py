"""A first run of supervised fine-tuning: questions with answers, of which the answers alone carry loss."""

from panax.data import Jsonl, TextData
from panax.generate.scoring import QuestionConfig
from panax.models import DecoderConfig, DecoderTask
from panax.optim import AdamW, Schedule
from panax.run import EvaluateConfig, Experiment

from .choices import choices_folder, choices_tokenizer


def sft_quickstart() -> Experiment:
    """Train a small decoder to answer "which of two words?" by either of them: dpo_quickstart begins with it.

    Command: panax train sft_quickstart
    Hardware: two CPU cores (AMD EPYC); 24 s.
    Expected: half of the answers are the word that comes first in the alphabet.
    """
    folder = choices_folder()
    model = DecoderConfig(max_length=64, embed=96, num_layers=2, heads=4, ffn=256, qk_norm=True)
    return Experiment(
        name="sft_quickstart",
        task=DecoderTask(model=model),
        data=TextData(
            corpus=Jsonl(paths=(str(folder / "either.jsonl"),), prompt="prompt", answer="answer"),
            tokenizer=choices_tokenizer(),
            sequence_length=64,
            batch_size=32,
        ),
        optimizer=AdamW(schedule=Schedule(peak=3e-3, warmup_steps=20)),
        num_steps=100,
        evaluate=EvaluateConfig(every=50),
        questions=QuestionConfig(files=(str(folder / "questions.jsonl"),), tokens=8),
    )
