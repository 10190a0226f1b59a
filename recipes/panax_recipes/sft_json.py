"""Supervised training on answers in JSON, of which a third are right: grpo_json continues."""

from panax.data import Jsonl, TextData
from panax.generate.scoring import QuestionConfig
from panax.models import DecoderConfig, DecoderTask
from panax.optim import Muon, Schedule
from panax.run import EvaluateConfig, Experiment

from .json_objects import objects_folder, objects_tokenizer


def sft_json() -> Experiment:
    """Train a small decoder to answer requests for JSON objects as a careless writer does.

    The model is weak because two thirds of the answers that it learns from are wrong. It is also trained too little to
    copy two tags in their order each time.

    Command: panax train sft_json
    Hardware: two CPU cores (AMD EPYC); about a minute.
    Expected: at most one in ten greedy answers is right: most numbers, lists, true and false are written as texts.
    """
    folder = objects_folder()
    model = DecoderConfig(max_length=64, embed=128, num_layers=2, heads=4, ffn=384, qk_norm=True)
    return Experiment(
        name="sft_json",
        task=DecoderTask(model=model),
        data=TextData(
            corpus=Jsonl(paths=(str(folder / "answered.jsonl"),), prompt="prompt", answer="answer"),
            tokenizer=objects_tokenizer(),
            sequence_length=64,
            batch_size=32,
        ),
        optimizer=Muon(schedule=Schedule(peak=1e-2, warmup_steps=20)),
        num_steps=360,
        evaluate=EvaluateConfig(every=120),
        questions=QuestionConfig(files=(str(folder / "questions.jsonl"),), tokens=32, rows=64),
    )
