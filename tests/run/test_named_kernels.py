"""A recipe names kernels, and a run reports once which ones it takes and why."""

import dataclasses

import pytest
import tiny
import tiny_recipe

import panax
from panax import fit
from panax.core import RecipeError
from panax.kernels import Kernels
from panax.optim import Schedule, Sgd


def run_of(folder, **kernels: str) -> panax.Experiment:
    steady = Sgd(schedule=Schedule(peak=0.1, decay="constant"))
    base = dataclasses.replace(tiny_recipe.tiny(), optimizer=steady, num_steps=2, directory=str(folder))
    return dataclasses.replace(base, kernels=Kernels(**kernels))


def said(experiment: panax.Experiment) -> list[str]:
    lines: list[str] = []
    fit(experiment, say=lines.append)
    return [line for line in lines if line.startswith("attention on cpu runs '")]


@pytest.mark.parametrize(("name", "reason"), [("auto", "the fastest on cpu"), ("reference", "it is named")])
def test_a_run_reports_once_which_kernel_it_takes(tmp_path, name, reason):
    taken = "blockwise" if name == "auto" else name
    lines = [line for line in said(run_of(tmp_path, attention=name)) if reason in line]
    assert lines == [f"attention on cpu runs {taken!r}: {reason}"]


def test_a_name_is_checked_when_the_recipe_is_built():
    with pytest.raises(RecipeError, match="unknown kernel 'blokwise' for attention; did you mean 'blockwise'"):
        Kernels(attention="blokwise")


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        ({"attention": "cudnn"}, "'cudnn' can't do this attention: it is for GPUs, and the target is cpu"),
        ({"grouped": "blocked"}, "kernels.grouped='blocked' has no effect: the step runs no grouped matmul"),
    ],
)
def test_a_name_that_can_not_be_followed_is_an_error(kernels, message):
    step = panax.compile_step(tiny.task(), tiny.batch(), axes=tiny.AXES, kernels=Kernels(**kernels))
    state = step.init()
    with pytest.raises(RecipeError, match=message):
        step(state, tiny.batch())
