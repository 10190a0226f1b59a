"""The models' pages: up to date, complete, and with the figures that the code computes."""

import re

import pytest
from tools.models.__main__ import ROOT, outdated
from tools.models.census import LOADS, measure_census
from tools.models.figures import DEVICES, measure_memory, read_figures
from tools.models.pages import pages
from tools.models.subjects import subjects

from panax.adapters.huggingface.families import BUILT_IN
from panax.models import PRESETS, VIT_PRESETS


def test_the_pages_are_up_to_date():
    assert [path.name for path in outdated(ROOT)] == [], (
        "run `python -m tools.models` (with --measure if a preset is new)"
    )


def test_every_family_and_every_preset_is_on_one_page():
    everything = subjects()
    assert {each.name for each in everything} == {*BUILT_IN, "vit", "unreleased"}
    listed = [preset for each in everything for preset in each.presets]
    assert sorted(listed) == sorted([*PRESETS, *VIT_PRESETS])
    unreleased = next(each for each in everything if each.name == "unreleased")
    assert set(unreleased.presets) == {"mt_nlg_530b", "megatron_1t", "glam_64b_64e"}


def test_a_page_states_what_loads_and_how_close_it_is():
    text = pages(read_figures(ROOT))["qwen3_moe.md"]
    assert "`qwen3_30b_a3b`" in text and "30,532,122,624" in text and "3.3 billion" in text
    assert "`num_experts_per_tok`" in text and "panax export runs/qwen3_30b_a3b exported" in text
    assert re.search(r"logits \de-0\d, gradients at most \de-0\d \(20\d\d-\d\d-\d\d; jax ", text)


def test_a_new_preset_without_figures_is_an_error():
    figures = read_figures(ROOT)
    del figures["memory"]["gpt2"]
    with pytest.raises(KeyError, match="gpt2"):
        pages(figures)


@pytest.mark.slow
@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("name", ["gpt2", "mixtral_8x7b", "vit_b16"])
def test_the_recorded_memory_is_what_is_computed(name, devices):
    assert measure_memory(name, devices) == read_figures(ROOT)["memory"][name][str(devices)]


@pytest.mark.full
def test_the_census_is_of_today():
    """Every causal model of the installed `transformers` is read, or refused, as the page has it."""
    recorded, measured = read_figures(ROOT)["census"], measure_census()
    assert measured["types"] == recorded["types"]
    assert sum(outcome == LOADS for outcome, _ in measured["types"].values()) >= 65
