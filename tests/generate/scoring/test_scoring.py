"""Scores are those of their definitions, computed from whole logits; their intervals are by row."""

import dataclasses
import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawing import drawn

from panax.core.errors import DataError, RecipeError
from panax.generate import GenerationEngine, Sampling
from panax.generate.scoring import AnswerFormat, QuestionKind, score_file
from panax.generate.scoring.questions import encode_windows
from panax.generate.scoring.statistics import estimate_ratio, pass_at_k
from panax.layers import Context
from panax.models import DecoderConfig, DecoderTask, compute_logits


class Letters:
    """A tokenizer of single characters."""

    start_of_document, end_of_document, end_ids = (), 255, (255,)
    chat_templates: dict[str, str] = {}  # noqa: RUF012

    def encode(self, text):
        return [ord(letter) for letter in text]

    def encode_pairs(self, pairs):
        return [(self.encode(first), self.encode(second)) for first, second in pairs]

    def decode(self, ids):
        return "".join(map(chr, ids))


TASK = DecoderTask(model=DecoderConfig(vocab_size=256, max_length=32, embed=16, num_layers=1, heads=2, ffn=24))
LETTERS = Letters()


@pytest.fixture(scope="module")
def params():
    made, _ = drawn(TASK.init)
    return jax.tree.map(lambda leaf: leaf * 3.0 if leaf.ndim > 2 else leaf, made)


@pytest.fixture(scope="module")
def engine(params):
    return GenerationEngine(TASK.incremental_model(params, {}), LETTERS, rows=3, chunk=8)


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@jax.jit
def whole_logits(params, row):
    """One program for texts of all lengths: a token's logits depend on none after it."""
    hidden, _ = params(row, Context(jnp.arange(row.shape[1])[None]), dtype=jnp.float32)
    return compute_logits(params, hidden)


def log_probabilities(params, ids):
    """Of each token after the first, from whole logits in float64."""
    row = np.zeros((1, TASK.model.max_length), np.int32)
    row[0, : len(ids)] = ids
    logits = np.asarray(whole_logits(params, row), np.float64)[0, : len(ids)]
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return [logs[place, token] for place, token in enumerate(ids[1:])]


def test_choices_are_ranked_by_their_log_probability_and_by_it_per_byte(params, engine, tmp_path):
    questions = [
        {"prompt": "a b ", "choices": ["xyz", "x", "longer one"], "answer": 1},
        {"prompt": "c", "choices": [" ä", " ab"], "answer": 0},
        {"prompt": "too long" * 9, "choices": ["a", "b"], "answer": 0},
    ]
    result = score_file(engine, LETTERS, write(tmp_path / "t.jsonl", *questions[:2]), Sampling())
    right = {"acc": [], "acc_norm": []}
    for question, sample in zip(questions, result.samples[:2], strict=False):
        # The space at the end of a prompt is scored with the choice.
        cut = len(question["prompt"].rstrip(" "))
        scores = [
            math.fsum(log_probabilities(params, LETTERS.encode(question["prompt"] + choice))[cut - 1 :])
            for choice in question["choices"]
        ]
        assert sample.log_probabilities == pytest.approx(scores, abs=2e-5)
        by_byte = [score / len(choice.encode()) for score, choice in zip(scores, question["choices"], strict=True)]
        right["acc"].append(float(np.argmax(scores) == question["answer"]))
        right["acc_norm"].append(float(np.argmax(by_byte) == question["answer"]))
    assert {name: each.value for name, each in result.scores.items()} == {k: np.mean(v) for k, v in right.items()}
    # One that is too long is counted, and nothing else changes.
    more = score_file(engine, LETTERS, write(tmp_path / "t.jsonl", *questions[1:]), Sampling())
    assert more.refused == 1 and "32 positions" in more.samples[1].error and more.scores["acc"].rows == 1
    assert more.samples[0].log_probabilities == result.samples[1].log_probabilities


def test_bits_per_byte_of_a_text_of_many_windows(params, engine, tmp_path):
    texts = ["short", "a longer text of several windows, with an ä in it, and more", "x"]
    result = score_file(engine, LETTERS, write(tmp_path / "t.jsonl", *({"text": text} for text in texts)), Sampling())
    losses, tokens = [], 0
    for text in texts:
        loss = 0.0
        for before, window in encode_windows(LETTERS, text, engine.limit - 2):
            loss -= math.fsum(log_probabilities(params, before + window))
            tokens += len(window)
        losses.append(loss)
    assert tokens == sum(map(len, texts)), "each character is scored once"
    size = sum(len(text.encode()) for text in texts)
    assert result.scores["bits_per_byte"].value == pytest.approx(sum(losses) / math.log(2) / size, rel=1e-6)
    assert result.scores["token_perplexity"].value == pytest.approx(math.exp(sum(losses) / tokens), rel=1e-6)


def test_answers_are_compared_and_counted(engine, tmp_path):
    sampling = Sampling(tokens=4, temperature=0.0)
    path = write(tmp_path / "t.jsonl", {"prompt": "abc", "answer": "?"}, {"prompt": "b", "answer": ["?"]})
    given = [sample.answers[0].text for sample in score_file(engine, LETTERS, path, sampling).samples]
    write(path, {"prompt": "abc", "answer": ["no", f" {given[0]} "]}, {"prompt": "b", "answer": "no"})
    result = score_file(engine, LETTERS, path, sampling)
    assert result.kind is QuestionKind.ANSWER and result.scores["exact_match"].value == 0.5
    assert result.cut == sum(sample.answers[0].finish == "length" for sample in result.samples)
    many = score_file(engine, LETTERS, path, dataclasses.replace(sampling, n=4, temperature=1.0))
    counts = [sum(each.right for each in sample.answers) for sample in many.samples]
    assert many.scores["exact_match"].value == sum(counts) / 8
    assert many.scores["pass@4"].value == sum(count > 0 for count in counts) / 2
    assert set(many.scores) == {"exact_match", "pass@2", "pass@4"}


def test_the_answer_is_the_last_match_of_a_pattern():
    assert AnswerFormat(r"-?\d+").extract("3 + 4 is 7. 8") == "8"
    assert AnswerFormat(r"answer: (\w+)").extract("answer: a, no, answer: b") == "b"
    assert AnswerFormat(r"\d+").extract("none") == "" and AnswerFormat().extract("  all of it\n") == "all of it"
    with pytest.raises(RecipeError, match="is not a regular expression"):
        AnswerFormat("(")


def test_pass_at_k_is_the_mean_over_all_choices_of_k_samples():
    for n, right, k in itertools.product((1, 3, 6), range(7), range(1, 7)):
        if right <= n and k <= n:
            results = [True] * right + [False] * (n - right)
            wanted = np.mean([any(chosen) for chosen in itertools.combinations(results, k)])
            assert pass_at_k(n, right, k) == pytest.approx(wanted)


def test_intervals_cover_at_their_rate():
    """Of a ratio over rows of different weight, 1,000 experiments of 60 rows."""
    rng, covered = np.random.default_rng(0), 0
    for _ in range(1000):
        sizes = rng.integers(1, 20, 60).astype(float)
        values = sizes * 0.5 + rng.normal(0.0, 1.0, 60) * sizes
        estimate = estimate_ratio(values.tolist(), sizes.tolist())
        covered += estimate.low <= 0.5 <= estimate.high
    # 95 % of 1,000, within 4 standard deviations below; a ratio's interval is a little short for so few rows.
    assert 0.92 < covered / 1000 < 0.978
    assert math.isnan(estimate_ratio([1.0], [1.0]).low) and math.isnan(estimate_ratio([], []).value)


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([], "has no questions; expected one of these forms"),
        ([{"other": 1}], "has neither text nor prompt"),
        ([{"prompt": "a", "answer": 3}], "answer=3; expected a text, or a list"),
        ([{"prompt": "a", "answer": []}], "answer=\\[\\]; expected"),
        ([{"prompt": "a", "choices": ["x"], "answer": 0}], "expected a list of two or more texts"),
        ([{"prompt": "a", "choices": ["x", ""], "answer": 0}], "expected a list of two or more texts"),
        ([{"prompt": "a", "choices": ["x", "y"], "answer": 2}], "expected the index of the right choice, 0 to 1"),
        ([{"prompt": "a", "choices": ["x", "y"], "answer": True}], "expected the index"),
        ([{"text": "a"}, {"prompt": "a", "answer": "b"}], "line 2 is of the form .* split the file"),
    ],
)
def test_questions_of_no_form_are_refused(records, words, engine, tmp_path):
    with pytest.raises(DataError, match=words):
        score_file(engine, LETTERS, write(tmp_path / "t.jsonl", *records), Sampling())


def test_a_file_of_which_nothing_can_be_asked_is_an_error(engine, tmp_path):
    path = write(tmp_path / "t.jsonl", {"prompt": "a" * 60, "answer": "b"})
    with pytest.raises(RecipeError, match=r"no question of .* can be asked; the first: 60 prompt tokens"):
        score_file(engine, LETTERS, path, Sampling(tokens=4))
