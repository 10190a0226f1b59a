"""A run's log as a table; a result and a loaded model in one line each."""

import json
import sys

import pytest

from panax.core import DataError
from panax.run.reporting.history import METRICS_FILE, read_history, to_dataframe


def logged(folder, *rows, end=""):
    (folder / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows) + end)
    return read_history(folder)


def test_training_and_evaluation_of_a_step_are_one_row(tmp_path):
    rows = logged(
        tmp_path, {"step": 1, "train/loss": 3.0}, {"step": 2, "train/loss": 2.0}, {"step": 2, "evaluation/loss": 2.5}
    )
    assert rows == [{"step": 1, "train/loss": 3.0}, {"step": 2, "train/loss": 2.0, "evaluation/loss": 2.5}]


def test_steps_that_were_taken_again_count_as_they_went_the_last_time(tmp_path):
    steps = [{"step": n, "train/loss": float(n)} for n in (1, 2, 3)]
    assert logged(tmp_path, *steps, {"step": 2, "train/loss": 9.0}) == [steps[0], {"step": 2, "train/loss": 9.0}]


def test_a_line_that_a_crash_cut_off_is_left_out_and_a_broken_one_is_named(tmp_path):
    assert read_history(tmp_path) == []
    assert logged(tmp_path, {"step": 1}, end='{"step": 2, "tr') == [{"step": 1}]
    for line in ("nonsense\n", "[1]\n", '{"loss": 1}\n', '{"step": "3"}\n', '{"step": true}\n'):
        with pytest.raises(DataError, match=r"metrics.jsonl, line 2 (is not JSON|has no step)"):
            logged(tmp_path, {"step": 1}, end=line + '{"step": 4}\n')


def test_a_table_is_pandas_where_there_is_pandas(monkeypatch):
    pandas = pytest.importorskip("pandas")
    rows = [{"step": 1, "train/loss": 3.0}, {"step": 2, "train/loss": 2.0, "evaluation/loss": 2.5}]
    found = to_dataframe(rows)
    assert isinstance(found, pandas.DataFrame) and found.index.tolist() == [1, 2]
    assert found["evaluation/loss"].isna().tolist() == [True, False] and to_dataframe([]).empty
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert to_dataframe(rows) is rows
