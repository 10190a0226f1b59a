"""The site's search, by the rules of Sphinx's searchtools.js and of docs/static/scorer.js, on the index that the build wrote."""

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import snowballstemmer

TITLE, PARTIAL_TITLE, TERM, PARTIAL_TERM = 15, 7, 5, 2
OBJECT_NAME, OBJECT_PARTIAL = 11, 6
OBJECT_PRIORITY = {0: 15, 1: 5, 2: -5}
HEADING, PAGE_TITLE, GENERATED = 3, 4, -8
GENERATED_PAGES = re.compile(r"^(reference|messages|decisions)/")


class Hit(NamedTuple):
    """A result.

    Attributes:
        page: The page's name, as `launch/slurm`.
        anchor: Of a heading or an object, with its `#`; empty for the page.
    """

    page: str
    title: str
    anchor: str
    description: str
    score: int


class SiteSearch:
    """The search of a built site."""

    def __init__(self, site: Path):
        text = (site / "searchindex.js").read_text("utf-8")
        self.index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
        words = re.search(
            r"stopwords = new Set\((\[.*?\])\)", (site / "_static/language_data.js").read_text("utf-8"), re.S
        )
        assert words is not None, "language_data.js has no stop words"
        self.stopwords = set(json.loads(words[1]))
        self._stem = snowballstemmer.stemmer("english").stemWord

    def __call__(self, query: str) -> list[Hit]:
        """Return the results, best first."""
        lower = query.lower().strip()
        kept = [word for word in _split(lower) if word not in self.stopwords and not word.isdigit()]
        terms = list(dict.fromkeys(self._stem(word) for word in kept))
        hits = [*self._titles(lower), *self._objects(list(dict.fromkeys(_split(lower)))), *self._terms(terms)]
        scored = [hit._replace(score=self._rescore(hit, terms)) for hit in hits]
        ordered = sorted(scored, key=lambda hit: (-hit.score, hit.title.lower()))
        return list({hit[:4]: hit for hit in reversed(ordered)}.values())[::-1]

    def pages(self, query: str) -> list[str]:
        """Return the pages of the results, each once, best first."""
        return list(dict.fromkeys(hit.page for hit in self(query)))

    def _titles(self, lower: str):
        for title, places in self.index["alltitles"].items():
            if lower not in title.lower().strip() or len(lower) < len(title) / 2:
                continue
            for file, anchor in places:
                own = self.index["titles"][file]
                score = int(TITLE * len(lower) / len(title) + 0.5) + (own == title)
                shown = title if own == title else f"{own} > {title}"
                yield Hit(self.index["docnames"][file], shown, f"#{anchor}" if anchor else "", "", score)

    def _objects(self, words: list[str]):
        for word in words:
            for prefix, objects in self.index["objects"].items():
                for file, kind, priority, anchor, name in objects:
                    full = f"{prefix}.{name}" if prefix else name
                    last = full.lower().split(".")[-1]
                    if word not in full.lower():
                        continue
                    kind_name = self.index["objnames"][str(kind)][2]
                    title = self.index["titles"][file]
                    text = f"{prefix} {name} {kind_name} {title}".lower()
                    if any(other not in text for other in words if other != word):
                        continue
                    exact = word in (full.lower(), last)
                    score = OBJECT_NAME if exact else OBJECT_PARTIAL if word in last else 0
                    score += OBJECT_PRIORITY.get(priority, 0)
                    description = f"{kind_name}, in {title}"
                    yield Hit(self.index["docnames"][file], full, f"#{anchor or full}", description, score)

    def _terms(self, terms: list[str]):
        """Pages that have every term, in their text or headings; a page's score is that of its best term."""
        scores: dict[int, dict[str, int]] = defaultdict(dict)
        for term in terms:
            for files, score in self._files(term):
                for file in files:
                    scores[file][term] = score
        long = sum(len(term) > 2 for term in terms)
        for file, found in scores.items():
            if len(found) in (len(terms), long):
                page, title = self.index["docnames"][file], self.index["titles"][file]
                yield Hit(page, title, "", "", max(found.values()))

    def _files(self, term: str):
        text, headings = self.index["terms"], self.index["titleterms"]
        yield _listed(text.get(term)), TERM
        yield _listed(headings.get(term)), TITLE
        if len(term) > 2:
            for words, score in ((text, PARTIAL_TERM), (headings, PARTIAL_TITLE)):
                if term not in words:
                    for word, files in words.items():
                        if term in word:
                            yield _listed(files), score

    def _rescore(self, hit: Hit, terms: list[str]) -> int:
        """Add what docs/static/scorer.js adds."""
        file = self.index["docnames"].index(hit.page)
        title = {self._stem(word) for word in _split(self.index["titles"][file].lower())}
        headings = self.index["titleterms"]
        score = hit.score + (GENERATED if GENERATED_PAGES.match(hit.page) else 0)
        for term in terms:
            score += HEADING * (file in _listed(headings.get(term))) + PAGE_TITLE * (term in title)
        return score


def _split(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _listed(files: int | list[int] | None) -> list[int]:
    return [] if files is None else [files] if isinstance(files, int) else files
