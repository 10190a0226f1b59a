"""Recommenders of sequences on real data: which film somebody rates next."""

import dataclasses

from panax.data import ExampleData, Sequences
from panax.models import DecoderConfig, HstuConfig, SequenceTask
from panax.optim import AdamW, Schedule
from panax.run import EvaluateConfig, Experiment

LENGTH = 50


def _data(target_times: bool = False) -> ExampleData:
    """MovieLens-100K as it ships in a package: 943 people, 1,682 films, 100,000 ratings in their order of time."""
    return ExampleData(
        examples=Sequences(
            paths=("package:recbole/dataset_example/ml-100k/ml-100k.inter",),
            user="user_id:token",
            item="item_id:token",
            time="timestamp:float",
            last=LENGTH,
            target_times=target_times,
        ),
        split="last",
        batch_size=128,
    )


def sasrec_ml100k() -> Experiment:
    """Predict each person's last film from those before it, by SASRec: attention over the sequence, ranked among all films.

    Command: panax train sasrec_ml100k
    Hardware: two CPU cores, beside other programs: about five minutes.
    Expected: NDCG@10 0.0536, hit rate at 10 0.119.
    """
    model = DecoderConfig(
        max_length=LENGTH, embed=64, num_layers=2, heads=2, ffn=256, gated=False, activation="gelu", norm="layer",
        rotary=None, dropout=0.3,
    )  # fmt: skip
    return Experiment(
        name="sasrec_ml100k",
        task=SequenceTask(model=model),
        data=_data(),
        optimizer=AdamW(weight_decay=0.01, schedule=Schedule(peak=1e-3, warmup_steps=50)),
        num_steps=1600,
        evaluate=EvaluateConfig(every=400),
        log_every=200,
    )


def hstu_ml100k() -> Experiment:
    """The same by HSTU, whose attention is pointwise and knows when events were, and when the film that it ranks was rated.

    Command: panax train hstu_ml100k
    Hardware: two CPU cores, beside other programs: about a quarter of an hour.
    Expected: NDCG@10 0.0576, hit rate at 10 0.120.
    """
    model = HstuConfig(max_length=LENGTH, embed=64, num_layers=4, heads=2, dropout=0.5)
    return dataclasses.replace(
        sasrec_ml100k(), name="hstu_ml100k", task=SequenceTask(model=model), data=_data(target_times=True)
    )
