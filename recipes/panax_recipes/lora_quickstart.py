"""A first run of adapters, after sft_quickstart."""

import dataclasses

from panax.data import Jsonl, TextData
from panax.models import DecoderTask, LoRA
from panax.optim import AdamW, Schedule
from panax.run import Experiment

from .choices import choices_folder
from .sft_quickstart import sft_quickstart


def lora_quickstart() -> Experiment:
    """Teach the model of sft_quickstart, by adapters of rank 8, to answer with the word that comes first in the alphabet.

    Command: panax train lora_quickstart (after panax train sft_quickstart)
    Hardware: two CPU cores (AMD EPYC); 41 s.
    Expected: nine in ten answers to questions of two new words are the first word (0.94 over five seeds at rank 16).
    """
    begun = sft_quickstart()
    assert isinstance(begun.task, DecoderTask) and isinstance(begun.data, TextData)
    answers = Jsonl(paths=(str(choices_folder() / "first.jsonl"),), prompt="prompt", answer="answer")
    return dataclasses.replace(
        begun,
        name="lora_quickstart",
        init="checkpoint:runs/sft_quickstart",
        task=dataclasses.replace(begun.task, adapter=LoRA.of_rank(8)),
        data=dataclasses.replace(begun.data, corpus=answers),
        optimizer=AdamW(schedule=Schedule(peak=5e-3, warmup_steps=10)),
        num_steps=250,
    )
