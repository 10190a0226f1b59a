"""A first run of preference learning, after sft_quickstart."""

import dataclasses

from panax.data import Preferences, TextData
from panax.models import DecoderTask, Preference
from panax.optim import AdamW, Schedule
from panax.run import EvaluateConfig, Experiment

from .choices import choices_folder
from .sft_quickstart import sft_quickstart


def dpo_quickstart() -> Experiment:
    """Teach the model of sft_quickstart, by DPO, to prefer the word that comes first in the alphabet.

    Command: panax train dpo_quickstart (after panax train sft_quickstart)
    Hardware: two CPU cores (AMD EPYC); 32 s.
    Expected: nine in ten answers to questions of two new words are the first word (0.89 over five seeds).
    """
    begun = sft_quickstart()
    assert isinstance(begun.task, DecoderTask) and isinstance(begun.data, TextData)
    pairs = Preferences(paths=(str(choices_folder() / "pairs.jsonl"),))
    return dataclasses.replace(
        begun,
        name="dpo_quickstart",
        init="checkpoint:runs/sft_quickstart",
        task=dataclasses.replace(begun.task, objective=Preference(beta=0.1, sft_weight=1.0)),
        data=dataclasses.replace(begun.data, corpus=pairs, batch_size=16, held_out=200),
        optimizer=AdamW(schedule=Schedule(peak=5e-4, warmup_steps=10)),
        num_steps=150,
        evaluate=EvaluateConfig(every=50),
    )
