"""The site that `python -m tools.site` builds: no warning, no dead link, every page reachable, and a search that answers."""

import importlib.util
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from pages import ROOT
from site_search import SiteSearch
from tools.site.__main__ import main
from tools.site.links import landing_page, rewrite_links
from tools.site.navigation import read_navigation, toctrees

QUESTIONS = {
    "how to run on 2 machines": "launch/index",
    "fine-tune a Llama": "training/fine-tuning",
    "bring a Lightning module": "models/lightning",
    "out of memory": "training/precision",
    "add a block": "extending/custom-block",
    "install CUDA": "start/install",
    "resume after a crash": "runs/resuming",
    "why is the loss NaN": "troubleshooting",
    "the run is slow": "troubleshooting",
    "gradient accumulation": "training/precision",
    "launch on Slurm": "launch/slurm",
    "Kubernetes": "launch/kubernetes",
    "weight decay": "training/optimizers",
    "find the batch size": "training/tuning",
    "early stopping": "runs/hooks",
    "Weights & Biases": "runs/hooks",
    "mixture of experts": "models/moe",
    "load Hugging Face weights": "models/huggingface",
    "export a model": "models/huggingface",
    "save checkpoints to S3": "runs/checkpoints",
    "tensor parallelism": "parallelism/index",
    "how do I generate text": "models/index",
    "train on a CPU": "training/cpu",
    "custom training loop": "training/training-loops",
    "read Parquet files": "data/data-sources",
    "write a Triton kernel": "extending/custom-kernel",
    "sweep over hyperparameters": "training/tuning",
    "profile a step": "runs/logs",
    "which JAX version": "start/jax-versions",
    "compare with PyTorch": "start/compare",
}
"""Queries that a user may type, and the page that answers each."""


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """The site, built as `.ci/run` builds it; a warning is an error. `.ci/run` names the one that it has built."""
    if built := os.environ.get("PANAX_BUILT_SITE"):
        return Path(built)
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "tools.site", str(out)], cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


class Page(HTMLParser):
    """The links and the ids of a page of HTML."""

    def __init__(self, path: Path):
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if identifier := given.get("id"):
            self.ids.add(identifier)
        for name in ("href", "src"):
            if link := given.get(name):
                self.links.append(link)


def test_every_page_is_in_the_navigation():
    docs = ROOT / "docs"
    pages = {path.relative_to(docs).with_suffix("").as_posix() for path in docs.rglob("*.md")}
    shown = list(read_navigation(docs).pages())
    assert sorted(shown) == sorted(pages), "link the page in docs/index.md"


def test_no_link_and_no_anchor_is_dead(site):
    pages = {path: Page(path) for path in site.rglob("*.html")}
    assert len(pages) > 100
    dead = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or link.startswith("//"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists() or (parts.fragment and unquote(parts.fragment) not in pages[target].ids | {"top"}):
                dead.append(f"{path.relative_to(site)}: {link}")
    assert dead == []


def test_nothing_is_loaded_from_elsewhere(site):
    """Pages work without a network."""
    text = (site / "index.html").read_text("utf-8") + (site / "training/index.html").read_text("utf-8")
    assert not [line for line in text.splitlines() if "<script" in line and 'src="http' in line]
    assert not [line for line in text.splitlines() if 'rel="stylesheet"' in line and 'href="http' in line]


@pytest.fixture(scope="session")
def search(site) -> SiteSearch:
    return SiteSearch(site)


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_search_finds_the_page(search, question):
    assert QUESTIONS[question] in search.pages(question)[:3], search(question)[:6]


def test_a_question_without_an_answer_finds_nothing(search):
    assert search.pages("croissant recipes with butter") == []
    # A name of the library has its entry in the reference.
    assert any(page.startswith("reference/") for page in search.pages("ScheduleFreeAdamW"))


def test_links_out_of_docs_lead_to_the_repository_or_show_the_path():
    page = ROOT / "docs/papers.md"
    text = "[a test](../tests/docs/pages.py), [folder](../tests/), [data](data.md#x), `[code](../README.md)`, [top](../README.md)"

    def rewritten(repository: str) -> str:
        return rewrite_links(text, page, page, ROOT, repository)

    plain = rewritten("")
    assert "a test (`tests/docs/pages.py`), folder (`tests`), [data](data.md#x)" in plain
    assert plain.endswith("`[code](../README.md)`, [top](index.md)")
    addressed = rewritten("https://example.org/panax/")
    assert "[a test](https://example.org/panax/blob/main/tests/docs/pages.py)" in addressed
    assert "[folder](https://example.org/panax/tree/main/tests)" in addressed
    readme = rewrite_links("![a\nb](docs/images/x.svg) [y](docs/launch/ray.md)", ROOT / "README.md", page, ROOT, "")
    assert readme == "![a\nb](images/x.svg) [y](launch/ray.md)"


def test_navigation_follows_the_lists_and_the_folders(tmp_path):
    for name in ("a", "b", "c", "d", "launch", "launch/x", "more/index", "more/y", "more/z", "tours/one", "tours/two"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.md").write_text(f"# {name}\n")
    (tmp_path / "more/index.md").write_text("# More\n\n- [z](z.md)\n")
    (tmp_path / "index.md").write_text(
        "# All\n\n## One\n\n- [a](a.md), and\n  [b](b.md)\n  - [c](c.md#part): text\n- [go](launch.md)\n\n"
        "## Two\n\n- [more](more/index.md)\n- [a tour](tours/one.md)\n- [web](https://example.org)\n- [b](b.md)\n- [a](a.md)\n"
    )
    navigation = read_navigation(tmp_path)
    assert navigation.sections == {"One": ["a", "launch"], "Two": ["more/index", "tours/one", "b", "tours/two"]}
    assert navigation.children == {"a": ["c"], "launch": ["launch/x"], "more/index": ["more/z", "more/y"]}
    assert "d" not in list(navigation.pages())
    assert ":caption: One\n\n/a\n/launch\n" in toctrees("index", navigation)
    assert (
        toctrees("a", navigation).endswith("```{toctree}\n:hidden:\n:titlesonly:\n\n/c\n```\n")
        and toctrees("b", navigation) == ""
    )


def test_the_landing_page_is_readme_and_the_index():
    assert landing_page("# P\n\nWhat.\n\n## Two\n\nx\n", "# Documentation\n\nAll.\n") == "# P\n\nWhat.\n\nAll.\n"


def test_what_prevents_a_build_is_one_sentence(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").touch()
    assert main([str(tmp_path / "file")]) == 2 and "is not a folder" in capsys.readouterr().err
    assert main([str(ROOT / "docs")]) == 2 and "contains the pages themselves" in capsys.readouterr().err
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "furo" else find_spec(name))
    assert main([str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == "tools.site: furo not installed; run `python3 install.py --extra docs`\n"
    assert not (tmp_path / "out").exists()


def test_ctrl_c_is_one_line(tmp_path):
    """Sphinx reports an interrupt as an error of its own; the command ends with a sentence."""
    code = (
        "import runpy, sys\nfrom sphinx.application import Sphinx\n"
        "def interrupted(*arguments, **options): raise KeyboardInterrupt\n"
        "Sphinx.build = interrupted\nsys.argv = ['tools.site', sys.argv[1]]\n"
        "runpy.run_module('tools.site', run_name='__main__', alter_sys=True)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "out")], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 1 and run.stderr == "tools.site: stopped; run the same command again\n"
