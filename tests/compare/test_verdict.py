"""The verdict follows the figures, whichever column is faster."""

import copy
import dataclasses
import math

import pytest
from comparing import COMPILED, EAGER, OWN, column, comparison

from panax_compare.questions import answer_questions, describe_new_shape
from panax_compare.verdict import comparison_peak, compute_rows, describe_verdict
from panax_compare.workload.equality import compare_losses, tolerances


def said(found):
    rows = compute_rows(found)
    return " ".join(describe_verdict(found, rows)), {row.name: row for row in rows}


def test_a_slower_panax_is_reported_as_slower():
    text, rows = said(comparison(EAGER, COMPILED, OWN))
    assert text.startswith("torch.compile is the fastest: 0.95 s a step")
    assert "Panax takes 2.00 times as long as torch.compile" in text and "Panax is number 3 of 3" in text
    assert rows["panax"].ratio == pytest.approx((2.0, 2.0, 2.0))
    assert rows["torch_eager"].ratio[0] == pytest.approx(1.1 / 0.95)


def test_a_faster_panax_is_measured_against_the_fastest_pytorch():
    quick = column("panax", "Panax", "jax", (0.5, 0.5, 0.5))
    text, rows = said(comparison(EAGER, COMPILED, quick))
    assert text.startswith("Panax is the fastest: 0.5 s a step")
    assert rows["panax"].ratio[0] == pytest.approx(0.5 / 0.95)
    assert rows["torch_compile"].ratio == (1.0, 1.0, 1.0)


def test_a_lead_that_not_every_round_shows_is_no_lead():
    near = column("panax", "Panax", "jax", (0.89, 0.96, 0.99))
    text, _ = said(comparison(COMPILED, near))
    assert "but not in every round" in text and "is the fastest" not in text


def test_medians_that_contradict_the_ratios_give_no_verdict():
    """By medians of seconds the one is faster, within rounds the other: nothing is said that the table contradicts."""
    one = column("torch_eager", "PyTorch eager", "torch", (1.0, 2.0, 3.0))
    other = column("panax", "Panax", "jax", (2.1, 1.9, 2.9))
    text, rows = said(comparison(one, other))
    assert rows["torch_eager"].seconds < rows["panax"].seconds and rows["panax"].ratio[0] < 1.0
    assert "is the fastest" not in text and "does not distinguish it from Panax" in text
    assert (
        "Panax takes 0.97 times as long as PyTorch eager within a round (median; 0.95 to 2.10): not distinguishable."
        in text
    )


def test_ratios_are_of_the_same_round():
    loaded = column("torch_eager", "PyTorch eager", "torch", (1.0, 10.0, 1.0))
    other = column("panax", "Panax", "jax", (2.0, 20.0, 2.0))
    _, rows = said(comparison(loaded, other))
    assert rows["panax"].ratio == (2.0, 2.0, 2.0)


def test_other_work_gets_no_ratio_and_no_place():
    wrong = column("panax", "Panax", "jax", (0.1, 0.1, 0.1), losses=(2.0, 1.9, 1.7))
    text, rows = said(comparison(EAGER, COMPILED, wrong))
    assert not rows["panax"].compared and rows["panax"].ratio is None
    assert "Panax gets no ratio: not the same work: the loss of step 3 is 1.7, the reference's 1.8" in text
    assert text.startswith("torch.compile is the fastest")


def test_another_device_gets_no_ratio():
    elsewhere = dataclasses.replace(OWN, device="NVIDIA H200")
    _, rows = said(comparison(EAGER, elsewhere))
    assert not rows["panax"].compared and rows["panax"].remark == "ran on NVIDIA H200, the reference on cpu"


def test_a_column_cut_short_keeps_its_rounds():
    cut = dataclasses.replace(OWN, turns=OWN.turns[:1], state="pending")
    _, rows = said(comparison(EAGER, cut))
    assert rows["panax"].remark == "2 of 3 rounds are missing"
    assert rows["panax"].ratio == pytest.approx((1.8, 1.8, 1.8))


def test_a_busy_machine_is_mentioned():
    busy = copy.deepcopy(EAGER)
    for turn in busy.turns:
        turn["others"] = 1.2
    assert "Other programs used 0.0 to 1.2 cores" in said(comparison(busy, COMPILED))[0]
    assert "Other programs" not in said(comparison(EAGER, COMPILED))[0]


def test_utilization_divides_by_the_fastest_product_of_any():
    fast = dataclasses.replace(OWN, product=2e11)
    _, rows = said(comparison(EAGER, fast))
    assert rows["torch_eager"].utilization == pytest.approx(1e9 / 1.1 / 2e11)


def test_of_a_processor_it_divides_by_what_registers_do():
    told = dataclasses.replace(OWN, registers=4e11)
    one = comparison(EAGER, told)
    _, rows = said(one)
    assert rows["torch_eager"].utilization == pytest.approx(1e9 / 1.1 / 4e11)
    assert (
        "on registers alone" in comparison_peak(one).source
        and "of any column" in comparison_peak(comparison(EAGER)).source
    )


def test_tolerances_are_of_the_precision_and_of_what_a_nudge_does():
    reference = [2.0, 1.9, 1.8]
    alone = tolerances(reference, None, "f32")
    assert alone == pytest.approx([16 * 2**-24 * loss for loss in reference])
    nudged = tolerances(reference, [2.0, 1.9 + 1e-4, 1.8], "f32")
    assert nudged[0] == pytest.approx(alone[0])
    assert nudged[1] == pytest.approx(alone[1] + 8e-4, rel=1e-3) and nudged[2] == pytest.approx(
        alone[2] + 8e-4, rel=1e-3
    )
    assert tolerances(reference, None, "bf16")[0] == pytest.approx(4 * 2**-9 * 2.0)


def test_what_rounding_explains_is_the_same_work_and_nothing_else_is():
    reference = [6.9, 6.8]
    allowed = tolerances(reference, None, "f32")
    assert compare_losses([6.9 + 1e-6, 6.8], reference, allowed).is_equal
    for losses in ([6.9, 6.8 + 1e-4], [math.nan, 6.8], [6.9], [math.inf, 6.8]):
        assert not compare_losses(losses, reference, allowed).is_equal


def test_answers_come_from_what_was_probed():
    step = {"seconds": 0.01, "finite": True}
    probe = {"another_shape": [{"seconds": 3.0, "finite": True}, step], "wrong": [step]}
    assert describe_new_shape(probe, 0.01) == ("recompiled, unasked, in 3.00 s; the next such batch took 10 ms", False)
    probe["another_shape"] = [{"seconds": 0.011, "finite": True}, step]
    assert describe_new_shape(probe, 0.01) == ("taken as it is (11 ms)", True)
    probed = dataclasses.replace(EAGER, probe=probe)
    answers = answer_questions(comparison(probed, OWN), compute_rows(comparison(probed, OWN)))
    assert [answer.question for answer in answers] == [
        "Abstraction and extensibility",
        "Performance",
        "Distributed training",
        "Prototyping and debugging",
        "Ecosystem",
    ]
    assert "gives no answer about distributed" in answers[2].answer
    assert "without compiling by PyTorch eager" in answers[3].answer
    assert any("no error: it was trained on" in line for line in answers[3].evidence)


def test_nothing_measured_is_no_verdict():
    none = dataclasses.replace(EAGER, losses=[], turns=[], state="failed", reason="it broke")
    text, rows = said(dataclasses.replace(comparison(none), reference=""))
    assert text == "No column has figures that can be compared."
    assert rows["torch_eager"].remark == "it broke"
