"""What the quickstart's model writes after its two minutes: samples judged, held-out bits per byte, seconds.

    python benchmarks/quickstart.py                                        trains the recipe in a temporary folder
    python benchmarks/quickstart.py runs/quickstart                        takes a finished run
    python benchmarks/quickstart.py --recipe moe_dense --text definitions  trains what the recipe was before

A sample is a prompt, `def` and `class` in turn, and what the model writes after it, cut off at 200 characters; seeds are 0, 1, 2
and so on, the temperature is that of the recipe's own samples, the other settings those of `panax generate`. Where the model ends
the document before that, the next seed is tried, and what is too short is only counted. Of each sample it says

- whether its whole lines are tokens: the line that the cut goes through is left out; of the others, Python's `tokenize` finds
  nothing wrong, and each bracket that closes is of the kind that was opened. What is still open at the cut, a bracket or a string
  of three quotes, is no fault.
- whether it holds an indented block: a line that ends with a colon, and under it, further in, a whole statement.
- what it copied: the longest piece that stands in the library too, as it is or without docstrings and comments, any white space
  in either counting as one space. A piece of 30 characters or more is a copy. `def __init__(self`, with which most classes begin,
  is in no piece: a piece ends before it.

A sample is good when its lines are tokens and it holds a block. Copies are counted apart.
"""

import argparse
import ast
import dataclasses
import io
import json
import os
import re
import tempfile
import time
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import panax
from panax.data import Corpus, PythonLibrary, TextData
from panax.run import Experiment
from panax_recipes.moe_dense import moe_dense
from panax_recipes.quickstart import quickstart

PROMPTS = ("def", "class")
"""Without a space: the tokenizer keeps a space with the word that follows it."""

SAMPLES = 40
TEMPERATURE = 0.9
"""As the recipe's own samples."""

CHARACTERS = 200
COPIED_CHARACTERS = 30
PASSED_OVER = "def __init__(self"
GOOD_SAMPLES = 28
"""Of 40: with 20, whether a model with four good ones in five passes is chance."""

RECIPES = {"quickstart": quickstart, "moe_dense": moe_dense}

_NOWHERE = "\1"
"""What stands in no text."""

_CLOSES = {")": "(", "]": "[", "}": "{"}
_OPEN_AT_THE_CUT = ("EOF in multi-line", "unterminated triple-quoted")
"""What `tokenize` says of a bracket or a string of three quotes that is open at the end, before Python 3.12 and since."""


class Judged(NamedTuple):
    """What there is to say of a sample.

    Attributes:
        fault: Why its whole lines are not tokens; empty where they are.
        block: Whether it holds an indented block.
        copied: The longest piece that the corpus has too, white space as one space.
    """

    text: str
    fault: str
    block: bool
    copied: str

    @property
    def good(self) -> bool:
        return not self.fault and self.block

    @property
    def copy(self) -> bool:
        return len(self.copied) >= COPIED_CHARACTERS


def one_space(text: str) -> str:
    """The text with each run of white space as one space."""
    return re.sub(r"\s+", " ", text)


def spaced(corpus: Corpus) -> str:
    """All documents of a corpus, white space as one space, and what no text holds between them."""
    return "\0".join(one_space(document.text) for document in corpus.documents())


def judge(text: str, corpus: str) -> Judged:
    """Say of a sample what there is to say.

    Args:
        corpus: As `spaced` gives it.
    """
    fault, block = read_lines(text[: text.rfind("\n") + 1])
    return Judged(text, fault, block, longest_copy(one_space(text).replace(PASSED_OVER, _NOWHERE), corpus))


def read_lines(text: str) -> tuple[str, bool]:
    """(why these whole lines are not tokens, or nothing; whether they hold an indented block)."""
    opened: list[str] = []
    under_colon: list[bool] = []
    block, colon, last = False, False, ""
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            kind, word = token.type, token.string
            if kind == tokenize.ERRORTOKEN and not word.isspace():
                return f"line {token.start[0]}: {word!r} is not a token", block
            if kind == tokenize.OP and word in "([{":
                opened.append(word)
            elif kind == tokenize.OP and word in _CLOSES and (not opened or opened.pop() != _CLOSES[word]):
                return f"line {token.start[0]}: {word!r} closes what was not opened", block
            elif kind == tokenize.INDENT:
                under_colon.append(colon)
            elif kind == tokenize.DEDENT:
                under_colon.pop()
            elif kind == tokenize.NEWLINE:
                block = block or any(under_colon)
                colon = last == ":"
            if kind not in (tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT):
                last = word
    except tokenize.TokenError as error:
        if not any(words in str(error) for words in _OPEN_AT_THE_CUT):
            return str(error.args[0]), block
    except IndentationError as error:
        return f"line {error.lineno}: {error.msg}", block
    return "", block


def longest_copy(text: str, corpus: str) -> str:
    """The longest piece of a text that stands in the corpus too."""
    best, start = "", 0
    while start + len(best) < len(text):
        piece = text[start : start + len(best) + 1]
        if piece in corpus:
            best = piece
        else:
            start += 1
    return best


def samples_of(generate: Callable[..., str], number: int = SAMPLES) -> tuple[list[str], list[str]]:
    """(samples, documents that ended before they were as long).

    Args:
        generate: That of a `panax.run.Result`, or of what `panax.load` gives.
    """
    whole: list[str] = []
    ended: list[str] = []
    for seed in range(10 * number):
        if len(whole) == number:
            break
        prompt = PROMPTS[len(whole) % len(PROMPTS)]
        text = prompt + generate(prompt, tokens=CHARACTERS, seed=seed, temperature=TEMPERATURE)
        (whole if len(text) >= CHARACTERS else ended).append(text[:CHARACTERS])
    return whole, ended


def parses(text: str) -> bool:
    """Whether Python's parser takes the text as it is."""
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def known_text() -> str:
    """What a copy may be of: the library's files, and the code alone that the recipe learns from."""
    return spaced(PythonLibrary()) + "\0" + spaced(PythonLibrary(definitions=True))


def held_out_figures(folder: Path) -> dict[str, float]:
    """The last held-out figures that a run logged."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    *_, last = (line for line in lines if "evaluation/loss" in line)
    return {name.removeprefix("evaluation/"): value for name, value in last.items() if name.startswith("evaluation/")}


def report(judged: list[Judged], shown: int) -> Iterator[str]:
    """The lines that say how samples were judged, then the samples themselves."""
    for number, one in enumerate(judged):
        verdict = "good" if one.good else one.fault or "no block"
        yield f"{number:>2}  {verdict:40} longest piece of the library {len(one.copied):>2}: {one.copied!r}"
    yield f"{sum(one.good for one in judged)} of {len(judged)} samples are good"
    copies = sum(one.copy for one in judged)
    longest = max((len(one.copied) for one in judged), default=0)
    yield f"{copies} hold a copy of {COPIED_CHARACTERS} characters or more; the longest piece has {longest}"
    for one in judged[:shown]:
        yield f"{'-' * 80}\n{one.text}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", nargs="?", help="a finished run's folder; without it, the recipe is trained")
    parser.add_argument("--recipe", choices=sorted(RECIPES), help="what to train (default: quickstart)")
    parser.add_argument("--text", choices=("files", "definitions"), help="on whole files, or on functions and classes")
    parser.add_argument("--num-steps", type=int, help="train so many steps")
    parser.add_argument("--seed", type=int, default=0, help="of the training (default: 0)")
    parser.add_argument("--shown", type=int, default=4, help="how many samples to print (default: 4)")
    options = parser.parse_args()
    if options.run and (options.recipe or options.text or options.num_steps or options.seed):
        parser.error("a finished run is not trained: leave --recipe, --text, --num-steps and --seed out")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.run or temporary)
        if not options.run:
            train(RECIPES[options.recipe or "quickstart"](), folder, options.text, options.num_steps, options.seed)
        figures = held_out_figures(folder)
        print(f"held-out {figures['bits_per_byte']:.3f} bits per byte, loss {figures['loss']:.4f} a token")
        whole, ended = samples_of(panax.load(folder).generate)
    corpus = known_text()
    print(*report([judge(text, corpus) for text in whole], options.shown), sep="\n")
    print(f"{len(ended)} more documents ended before; {sum(map(parses, ended))} of these parse whole")


def train(recipe: Experiment, folder: Path, text: str | None, num_steps: int | None, seed: int) -> None:
    """Train a recipe, and say how long it took from the import of jax on."""
    assert isinstance(recipe.data, TextData)
    if text is not None:
        corpus = PythonLibrary(definitions=text == "definitions")
        recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, corpus=corpus))
    recipe = dataclasses.replace(recipe, directory=str(folder), num_steps=num_steps or recipe.num_steps, seed=seed)
    wall, before = time.perf_counter(), os.times()
    panax.fit(recipe, say=print)
    wall, after = time.perf_counter() - wall, os.times()
    cpu = after.user + after.system - before.user - before.system
    print(f"{recipe.name}: {recipe.num_steps} steps, all in all {wall:.0f} s, {cpu:.0f} s of processors")


if __name__ == "__main__":
    main()
