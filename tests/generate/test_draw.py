"""Logits are processed as transformers does it, and draws follow the distribution that is left."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import torch
from transformers.generation import logits_process as theirs

from panax.generate.draw import AllowedTokens, RowHistory, RowSettings, draw_tokens, filter_logits, penalize_logits

VOCAB = 50
NO_SETTINGS = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition": 1.0, "presence": 0.0, "frequency": 0.0,
}  # fmt: skip
TOGETHER = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.03, "repetition": 1.3}
CASES = [
    {"temperature": 0.5}, {"top_k": 1}, {"top_k": 7}, {"top_k": 500}, {"top_p": 0.3}, {"top_p": 0.95}, {"top_p": 1e-6},
    {"min_p": 0.05}, {"min_p": 1.0}, {"repetition": 1.3}, {"repetition": 0.8}, {"bias": 2.0}, TOGETHER, TOGETHER | {"bias": 2.0},
]  # fmt: skip


def settings(rows, seed=0, index=0, **given):
    values = [
        jnp.full(rows, (NO_SETTINGS | given)[name], jnp.int32 if name == "top_k" else jnp.float32)
        for name in NO_SETTINGS
    ]
    free = AllowedTokens(jnp.zeros(rows, bool), jnp.zeros((rows, 1), jnp.uint32))
    return RowSettings(*values, jnp.full(rows, seed, jnp.uint32), jnp.full(rows, index, jnp.int32), free)


def history(rows, prompt=(), answer=(), bias=0.0):
    in_prompt = jnp.zeros((rows, VOCAB), bool).at[:, jnp.array(prompt, jnp.int32)].set(True)
    counts = jnp.zeros((rows, VOCAB), jnp.int32).at[:, jnp.array(answer, jnp.int32)].add(1)
    return RowHistory(in_prompt, counts, jnp.zeros((rows, VOCAB)).at[:, 3].set(bias))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_processed_logits_are_those_of_transformers(case):
    rows, prompt, answer = 70, (1, 2, 3, 2), (4, 5, 5)
    logits = np.random.default_rng(0).normal(0.0, 3.0, (rows, VOCAB)).astype(np.float32)
    given = {name: value for name, value in case.items() if name != "bias"}
    bias = case.get("bias", 0.0)
    ours = penalize_logits(jnp.asarray(logits), settings(rows, **given), history(rows, prompt, answer, bias))
    ours = np.asarray(filter_logits(ours, settings(rows, **given)))

    values = NO_SETTINGS | given
    processors = [theirs.SequenceBiasLogitsProcessor({(3,): bias})] if bias else []
    processors += [theirs.RepetitionPenaltyLogitsProcessor(values["repetition"])]
    processors += [theirs.TemperatureLogitsWarper(values["temperature"])]
    processors += [theirs.TopKLogitsWarper(values["top_k"])] if values["top_k"] else []
    processors += [theirs.TopPLogitsWarper(values["top_p"])] if values["top_p"] < 1.0 else []
    processors += [theirs.MinPLogitsWarper(values["min_p"])]
    ids = torch.tensor([prompt + answer] * rows)
    wanted = theirs.LogitsProcessorList(processors)(ids, torch.from_numpy(logits)).numpy()
    assert np.array_equal(np.isinf(ours), np.isinf(wanted))
    # One division or multiplication each, of float32.
    np.testing.assert_allclose(ours, wanted, rtol=1e-6)


def test_presence_and_frequency_penalties_are_their_definition():
    logits = np.random.default_rng(1).normal(size=(2, VOCAB)).astype(np.float32)
    answer = (4, 5, 5, 7, 5)
    penalized = penalize_logits(
        jnp.asarray(logits), settings(2, presence=0.25, frequency=0.5), history(2, prompt=(4, 9), answer=answer)
    )
    wanted = logits.copy()
    for token in set(answer):
        wanted[:, token] -= 0.25 + 0.5 * answer.count(token)
    np.testing.assert_allclose(penalized, wanted, rtol=1e-6)


def drawn_counts(logits, draws, kept=0, **given):
    """How often each token is drawn, with seeds 0, 1, 2, ..."""
    row_settings = settings(draws, **given)._replace(seed=jnp.arange(draws, dtype=jnp.uint32))
    tokens = draw_tokens(
        jnp.broadcast_to(jnp.asarray(logits)[None], (draws, VOCAB)),
        row_settings,
        history(draws),
        wants_top=jnp.bool_(False),
        kept=kept,
    ).token
    return np.bincount(np.asarray(tokens), minlength=VOCAB)


def p_value(counts, logits, **given):
    kept = np.asarray(filter_logits(jnp.asarray(logits)[None], settings(1, **given)))[0]
    expected = np.exp(kept - kept.max()).astype(np.float64)
    expected *= counts.sum() / expected.sum()
    assert counts[expected == 0].sum() == 0
    common = expected >= 5.0
    observed = [*counts[common], counts[~common].sum()]
    wanted = [*expected[common], expected[~common].sum()]
    if wanted[-1] < 5.0:
        observed, wanted = [*observed[:-2], sum(observed[-2:])], [*wanted[:-2], sum(wanted[-2:])]
    return scipy.stats.chisquare(observed, wanted).pvalue


@pytest.mark.parametrize(
    "given", [{"top_k": 6}, {"top_k": 6, "top_p": 0.6, "temperature": 0.7}, {"top_p": 0.5}], ids=str
)
def test_the_tokens_among_which_one_is_drawn_are_returned(given):
    """As transformers keeps them, at most as many as are recorded; with probabilities among these, from logits in float64."""
    rows, recorded = 40, 8
    logits = np.random.default_rng(4).normal(0.0, 1.5, (rows, VOCAB)).astype(np.float32)
    filtered = np.asarray(filter_logits(jnp.asarray(logits), settings(rows, **given)), np.float64)
    drawn = draw_tokens(
        jnp.asarray(logits),
        settings(rows, **given)._replace(seed=jnp.arange(rows, dtype=jnp.uint32)),
        history(rows),
        wants_top=jnp.bool_(False),
        kept=recorded,
    )
    assert drawn.kept.shape == (rows, recorded) and len(set(np.asarray(drawn.kept_count).tolist())) > ("top_p" in given)
    for row, (ids, count, token) in enumerate(zip(*map(np.asarray, (drawn.kept, drawn.kept_count, drawn.token)))):
        order = np.argsort(-filtered[row], kind="stable")
        wanted = [place for place in order if filtered[row, place] > -np.inf][:recorded]
        assert ids[:count].tolist() == wanted and len(set(ids.tolist())) == recorded and token in wanted
        expected = filtered[row, token] - np.log(np.exp(filtered[row, wanted]).sum())
        # Two sums of exponentials in float32, of numbers below 16: each an error of a few times 16 ulps of 1.
        np.testing.assert_allclose(drawn.sampling_log_probability[row], expected, atol=64 * np.finfo(np.float32).eps)


@pytest.mark.full
def test_draws_among_recorded_tokens_follow_their_distribution():
    logits = np.random.default_rng(3).normal(0.0, 1.5, VOCAB).astype(np.float32)
    given = {"top_k": 10, "top_p": 0.8}
    assert p_value(drawn_counts(logits, 100_000, kept=10, **given), logits, **given) > 0.001


def test_greedy_draws_are_the_same_with_and_without_a_record():
    logits = jnp.asarray(np.random.default_rng(5).normal(size=(4, VOCAB)).astype(np.float32))
    drawn = [
        draw_tokens(logits, settings(4, temperature=0.0), history(4), wants_top=jnp.bool_(False), kept=kept)
        for kept in (0, 3)
    ]
    assert np.array_equal(drawn[0].token, drawn[1].token) and not np.asarray(drawn[1].sampling_log_probability).any()


DISTRIBUTIONS = [{}, {"temperature": 0.5}, {"top_k": 10}, {"top_p": 0.8}, {"min_p": 0.1}]


@pytest.mark.parametrize(
    "group", [pytest.param(number, marks=pytest.mark.slow if number else pytest.mark.full) for number in range(4)]
)
def test_draws_follow_the_distribution(group):
    """Twenty distributions of 100,000 draws, five with the same settings in each group; corrected for their number by the first
    step of Holm's method, which compares the smallest value."""
    for number, given in enumerate(DISTRIBUTIONS, group * len(DISTRIBUTIONS)):
        logits = np.random.default_rng(number).normal(0.0, 1.5, VOCAB).astype(np.float32)
        assert 20 * p_value(drawn_counts(logits, 100_000, **given), logits, **given) > 0.001, given


@pytest.mark.full
def test_an_error_of_one_percent_is_found():
    """The check above is able to fail: the likeliest token has one percent too much of the probability."""
    logits = np.random.default_rng(0).normal(0.0, 1.5, VOCAB).astype(np.float32)
    probabilities = np.exp(logits) / np.exp(logits).sum()
    probabilities[probabilities.argmax()] += 0.01
    counts = drawn_counts(np.log(probabilities / probabilities.sum()), 100_000)
    assert p_value(counts, logits) < 0.001 / 20


def test_a_draw_depends_on_its_seed_and_index_alone():
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(3, VOCAB)).astype(np.float32))
    key = jax.random.fold_in(jax.random.key(9), 4)
    wanted = [int(jax.random.categorical(key, row)) for row in logits]
    drawn = draw_tokens(logits, settings(3, seed=9, index=4), history(3), wants_top=jnp.bool_(True))
    assert np.asarray(drawn.token).tolist() == wanted
    assert np.asarray(drawn.top_tokens[:, 0]).tolist() == np.asarray(logits).argmax(-1).tolist()
