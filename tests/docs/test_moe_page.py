"""docs/models/moe.md and docs/parallelism/expert-parallelism.md list what mixtures are set by and what is watched of them."""

import dataclasses
import re
import shlex

import numpy as np
from pages import ROOT, table_rows
from test_markdown import check_command

from panax.layers import MoE
from panax.layers.moe.expert_load import load_statistics

PAGE = ROOT / "docs/models/moe.md"


def test_every_setting_of_a_mixture_is_described():
    listed = [name for cells in table_rows(PAGE, "fields") for name in re.findall(r"`([a-z_]+)`", cells[0])]
    assert sorted(listed) == sorted(field.name for field in dataclasses.fields(MoE))


def test_every_figure_is_described():
    listed = [cells[0].strip("`") for cells in table_rows(PAGE, "figure")]
    assert sorted(listed) == sorted([*load_statistics(np.ones((1, 2))), "entropy", "router_z", "dropped"])


def test_every_line_of_flags_is_understood(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for cells in table_rows(ROOT / "docs/parallelism/expert-parallelism.md", "flags"):
        check_command(["train", "moe_quickstart", *shlex.split(cells[0].strip("`"))], cells[0])
