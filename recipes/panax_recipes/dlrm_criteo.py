"""A ranking model in the shape of MLPerf's, on drawn click logs whose best area under the ROC curve is known."""

from panax.data import ExampleData, SyntheticClicks
from panax.layers import FeatureConfig, TableConfig, TablesConfig
from panax.models import DlrmConfig, DlrmTask
from panax.optim import AdamW, LazyAdam, Schedule
from panax.run import EvaluateConfig, Experiment

MLPERF_ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10, 2_209, 11_938, 155,
    4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip
"""Rows of the 26 tables of MLPerf's recommendation benchmark, v2."""

ROWS = tuple(min(rows, 100) for rows in MLPERF_ROWS)

CLICKS = SyntheticClicks(
    num_examples=8_000_000, rows=ROWS, numeric=13, zipf=1.1, linear=1.0, interaction=1.2, hidden=1, pairs=8
)


def dlrm_criteo() -> Experiment:
    """Learn drawn clicks: 13 numbers, 26 categories with Zipf-distributed ids, and products of categories in the logit.

    No model can rank better than the one that drew the labels, and a linear one ranks far worse.

    Command: panax train dlrm_criteo
    Hardware: two CPU cores, beside other programs: about five minutes.
    Expected: area under the ROC curve 0.7999, where 0.8012 is the best possible.
    """
    leaves = [f"c{number}" for number in range(1, len(ROWS) + 1)]
    tables = TablesConfig(
        tables=tuple(TableConfig(name=leaf, rows=0, width=16, features=(FeatureConfig(leaf=leaf),)) for leaf in leaves)
    )
    model = DlrmConfig(tables=tables, numeric=13, bottom=(64,), interaction="dot", top=(128, 64))
    return Experiment(
        name="dlrm_criteo",
        task=DlrmTask(model=model),
        data=ExampleData(examples=CLICKS, batch_size=2048, held_out=0.025),
        optimizer=AdamW(schedule=Schedule(peak=2e-3, warmup_steps=100, final=0.0)),
        embedding_optimizer=LazyAdam(schedule=Schedule(peak=2e-3, final=0.0)),
        num_steps=5000,
        evaluate=EvaluateConfig(every=1000),
        log_every=200,
    )
