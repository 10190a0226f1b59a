"""The site's search: the scripts and the index that search.html loads, in its order, run in V8."""

import json
import re
from pathlib import Path
from typing import NamedTuple

from py_mini_racer import MiniRacer

NOT_SEARCH = ("documentation_options", "doctools", "sphinx_highlight", "furo")
"""Scripts of search.html that draw the page, and search nothing."""

BROWSER = """
var window = globalThis;
var location = {search: ""};
var document = {getElementById: () => null};
var URLSearchParams = class { get() { return window.location.search; } };
var SPHINX_HIGHLIGHT_ENABLED = false;
var _ = (text) => text;
var _ready = () => {};
"""
"""What these scripts ask a browser for."""

ASK = """
var ask = (query) => {
  window.location.search = query;
  return JSON.stringify(Search._performSearch(...Search._parseQuery(query)).reverse());
};
"""
"""The results of a query, best first: the page takes them from the end."""


class Hit(NamedTuple):
    """A result.

    Attributes:
        page: The page's name, as `launch/slurm`.
        anchor: Of a heading or an object, with its `#`; empty for the page.
    """

    page: str
    title: str
    anchor: str
    description: str | None
    score: int


class SiteSearch:
    """The search of a built site."""

    def __init__(self, site: Path):
        self._context = MiniRacer()
        self._context.eval(BROWSER)
        scripts = re.findall(r'<script src="([^"?]+)', (site / "search.html").read_text("utf-8"))
        for script in scripts:
            if Path(script).stem not in NOT_SEARCH:
                self._context.eval((site / script).read_text("utf-8"))
        self._context.eval(ASK)

    def __call__(self, query: str) -> list[Hit]:
        """Return the results, best first."""
        return [Hit(*result[:5]) for result in json.loads(str(self._context.call("ask", query)))]

    def pages(self, query: str) -> list[str]:
        """Return the pages of the results, each once, best first."""
        return list(dict.fromkeys(hit.page for hit in self(query)))
