"""Sphinx's settings for the site. `python -m tools.site` builds it; the pages stay plain Markdown."""

import os
import re
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.search.en import SearchEnglish
from sphinx.transforms import SphinxTransform
from tools.site.links import landing_page, rewrite_links
from tools.site.navigation import INDEX, read_navigation, toctrees

import panax

ROOT = Path(__file__).resolve().parents[1]

project = "Panax"
copyright = "the authors of Panax, Apache License 2.0"
release = version = panax.__version__
extensions = ["myst_parser"]
exclude_patterns = ["**/causes.toml"]
highlight_language = "none"
myst_heading_anchors = 4

html_theme = "furo"
html_title = f"Panax {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_search_scorer = str(ROOT / "docs/static/scorer.js")
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}

_NAVIGATION = read_navigation(ROOT / "docs")
_ANCHOR = re.compile(r'^<a id="([^"]+)">(</a>)?$')


class Search(SearchEnglish):
    """English without the words that make a question of a few terms."""

    # fmt: off
    stopwords = SearchEnglish.stopwords | {
        "am", "an", "any", "can", "could", "did", "do", "does", "from", "get", "had", "has", "have", "how", "i",
        "instead", "me", "my", "need", "one", "should", "so", "what", "when", "where", "which", "who", "why", "would",
        "you", "your", "want", "use", "using",
    }
    # fmt: on


class Anchors(SphinxTransform):
    """Make targets of `<a id="..."></a>`, so that links to them are checked as those to headings are."""

    default_priority = 300

    def apply(self, **kwargs: object) -> None:
        found = False
        for raw in list(self.document.findall(nodes.raw)):
            text = raw.astext().strip()
            if match := _ANCHOR.match(text):
                found = not match[2]
                if match[1] in self.document.ids:  # A message that several functions give.
                    raw.parent.remove(raw)
                    continue
                target = nodes.target("", "", ids=[match[1]], names=[match[1]])
                self.document.note_explicit_target(target)
                raw.replace_self(target)
            elif found and text == "</a>":
                raw.parent.remove(raw)
                found = False


def _read(app: Sphinx, name: str, source: list[str]) -> None:
    """Prepare the text of a page: links for the site, and the pages below it."""
    page = Path(app.env.doc2path(name))
    text = rewrite_links(source[0], page, page, ROOT, app.config.repository_url)
    if name == INDEX:
        readme = ROOT / "README.md"
        app.env.note_dependency(str(readme))
        head = rewrite_links(readme.read_text("utf-8"), readme, page, ROOT, app.config.repository_url)
        text = landing_page(head, text)
    app.env.note_dependency(str(ROOT / "docs" / f"{INDEX}.md"))
    source[0] = text + toctrees(name, _NAVIGATION)


def _add_anchors(app: Sphinx, env: BuildEnvironment) -> None:
    """Let links from other pages find the targets of `Anchors`, as they find headings."""
    for name in env.found_docs:
        slugs = env.metadata[name].setdefault("myst_slugs", {})
        for target in env.get_doctree(name).findall(nodes.target):
            for anchor in target.get("ids", ()):
                slugs.setdefault(anchor, (0, anchor, anchor))


def setup(app: Sphinx) -> None:
    app.add_config_value("repository_url", os.environ.get("PANAX_REPOSITORY_URL", ""), "env", str)
    app.add_search_language(Search)
    app.add_transform(Anchors)
    app.connect("source-read", _read)
    app.connect("env-updated", _add_anchors)
