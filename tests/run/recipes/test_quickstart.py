"""The quickstart learns something that a person can read, and what says so can say no."""

import dataclasses
import importlib.util
import random
import string
import sys
from pathlib import Path

import pytest

import panax
from panax_recipes.quickstart import quickstart

BENCHMARK = Path(__file__).parents[3] / "benchmarks/quickstart.py"

GOOD = '''def fold_seventeen(self, walrus, teapot=None):
    """Return the teapot."""
    if teapot is None:
        raise WalrusError("no teapot: %r" % walrus)
    for spoon in walrus.spoons(
            teapot, 3):
        self.stir(spoon, [teapot, walrus
'''


@pytest.fixture(scope="module")
def judging():
    spec = importlib.util.spec_from_file_location("quickstart_samples", BENCHMARK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["quickstart_samples"] = module
    spec.loader.exec_module(module)
    return module


def test_a_good_sample_passes(judging):
    text = GOOD[: judging.CHARACTERS]
    assert len(text) == judging.CHARACTERS
    judged = judging.judge(text, "another corpus")
    assert judged.good and not judged.copy, judged


def test_noise_fails(judging):
    draw = random.Random(0)
    noise = ["".join(draw.choices(string.printable, k=judging.CHARACTERS)) for _ in range(50)]
    assert not any(judging.judge(text, "").good for text in noise)
    # Today's words in an order of their own are no Python either.
    words = GOOD.split()
    assert not judging.judge((" ".join(draw.choices(words, k=80)))[: judging.CHARACTERS], "").good


def test_a_copied_span_is_found_whatever_its_white_space(judging):
    corpus = judging.one_space("x = 1\nif   teapot is None:\n\traise WalrusError(17)\n")
    text = GOOD[: judging.CHARACTERS]
    judged = judging.judge(text, corpus)
    assert judged.copied == " if teapot is None: raise WalrusError(" and judged.copy
    assert not judging.judge(text, corpus.replace("None", "True")).copy
    # What most classes begin with is no copy, and what stands around it is two pieces.
    head = "class Walrus(Sea): def __init__(self, teapot, spoons): "
    assert len(judging.judge(head, head).copied) == len("class Walrus(Sea): ") == len(", teapot, spoons): ")
    assert judging.longest_copy("abc", "xyz") == ""


def test_what_ends_early_is_no_sample(judging):
    requests = []

    def generate(prompt, *, tokens, seed, temperature):
        requests.append((prompt, seed))
        return " f(): pass\n" if seed % 3 == 0 else f" f{seed}():" + GOOD

    complete, ended = judging.samples_of(generate, 4)
    assert [len(text) for text in complete] == [judging.CHARACTERS] * 4 and len(set(complete)) == 4
    assert [text.partition(" ")[0] for text in complete] == ["def", "class", "def", "class"]
    assert ended == ["def f(): pass\n"] * 2
    assert [seed for _, seed in requests] == list(range(6))
    assert judging.parses(ended[0]) and not judging.parses("def f(:")
    # A model that never writes so much: no samples, and an end.
    assert judging.samples_of(lambda prompt, **_: " f(): pass\n", 4) == ([], ["def f(): pass\n"] * 40)


@pytest.mark.parametrize(
    ("lines", "fault", "block"),
    [
        ("def f(x):\n    return x\n", "", True),
        ("x = 1\ny = 2\n", "", False),
        ("def f(x):\n", "", False),
        ("def f(x): return x\n", "", False),
        ("def f(x):\n    # nothing but this\n", "", False),
        ("def f(x):\n    return (x,\n", "", False),  # the bracket is open at the cut
        ('def f(x):\n    """Say\n    more\n', "", False),
        ("x = 1\n    y = 2\n", "", False),  # further in, but under no colon
        ("class A:\n\n    # why\n\n    x = 1\n", "", True),
        ("def f(x):\n        return x\n    y = 1\n", "unindent", True),
        ("def f(x):\n    return (x]\n", "']' closes", False),
        ("def f(x):\n    return x)\n", "')' closes", False),
        ("x = 'abc\ny = 1\n", "", False),
        ("x = 1 $ 2\n", "'$'", False),
    ],
)
def test_what_is_wrong_with_whole_lines(judging, lines, fault, block):
    found, holds = judging.read_lines(lines)
    if "'abc" in lines:
        assert found  # Python 3.12 says it in other words than 3.11.
        return
    assert (fault in found if fault else not found) and holds == block, found


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_it_writes_python_that_it_did_not_copy(judging, tmp_path):
    """The criterion of the recipe, at its own setting: two minutes of two idle cores."""
    result = panax.fit(dataclasses.replace(quickstart(), directory=str(tmp_path)), quiet=True)
    corpus = judging.known_text()
    whole, _ = judging.samples_of(panax.load(tmp_path).generate)
    judged = [judging.judge(text, corpus) for text in whole]
    assert len({one.text for one in judged}) == len(judged) == judging.SAMPLES
    assert sum(one.good for one in judged) >= judging.GOOD_SAMPLES, "\n".join(judging.report(judged, 20))
    assert judging.held_out_figures(tmp_path)["bits_per_byte"] == result.evaluation["bits_per_byte"]
