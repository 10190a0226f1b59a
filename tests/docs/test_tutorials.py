"""Tutorials: a page and its notebook agree, and the whole of each is executed (slow); the tool that writes them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from pages import ROOT

sys.path.insert(0, str(ROOT))

from tools.tutorials.execution import execute
from tools.tutorials.notebooks import build_notebook, code_cells, render_page
from tools.tutorials.outputs import clean_outputs, clean_text, find_difference, shorten_text
from tools.tutorials.source import TutorialError, cut, find_pages, shortening, unused_substitutions
from tools.tutorials.tutorial import find_changes, outdated, read_notebook, renew

TUTORIALS = find_pages(ROOT)

PAGE = """# A page

<!-- shortened: steps = 300 -> steps = 6 -->
<!-- files: chat.jsonl -->

Text.

```python
# named.py
steps = 300
```

```console
$ echo one && \\
    echo two
$ export A_B=c
```

```bash
sbatch never
```

<!-- varies -->
```python
steps = 300
print(steps)
```

End.
"""


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "docs/tutorials/page.md"
    path.parent.mkdir(parents=True)
    (tmp_path / "docs/images").mkdir()
    path.write_text(PAGE, "utf-8")
    return path


def cut_page(text: str):
    return cut(text, Path("page.md"))


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_page_and_notebook_agree(path):
    assert outdated(path, ROOT) == [], f"run `python -m tools.tutorials {path.stem}`"


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_every_substitution_is_of_the_page(path):
    text = path.read_text("utf-8")
    assert unused_substitutions(cut(text, path), text) == []


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_notebooks_hold_nothing_of_one_machine(path):
    notebook = read_notebook(path)
    assert notebook is not None
    nbformat.validate(notebook)
    text = nbformat.writes(notebook)
    for word in (str(ROOT), "/home/", "/root/", "/tmp/", "site-packages", "Warning:", "http://"):
        assert word not in text.replace("http://www.w3.org", ""), word
    assert all(cell.execution_count for cell in code_cells(notebook))


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_the_whole_of_it_gives_what_it_shows(path):
    """Slow: executes the notebook, with its checks of quality."""
    assert find_changes(path) == []


def test_a_page_is_cut_into_blocks_and_put_together_again():
    page = cut_page(PAGE)
    assert [(block.kind, block.line, block.varies) for block in page.blocks] == [
        ("files", 4, False), ("file", 9, False), ("console", 14, False), ("python", 25, True)
    ]  # fmt: skip
    assert page.with_outputs([""] * 4) == PAGE
    with_outputs = page.with_outputs(
        ["", "", "\n<!-- output -->\n```text\none\n```\n", "\n<!-- output -->\n![a](b.svg)\n"]
    )
    again = cut_page(with_outputs)
    assert again.with_outputs([""] * 4) == PAGE
    assert again.blocks[-1].line == 30, "lines are those of the page with its outputs"


def test_a_page_becomes_a_notebook():
    notebook = build_notebook(cut_page(PAGE))
    nbformat.validate(notebook)
    files, named, console, last = (cell.source for cell in code_cells(notebook))
    assert files.endswith("write_chat()") and "import json" in files
    assert named == "%%writefile named.py\n# named.py\nsteps = 300"
    assert console == "!echo one && echo two\n%env A_B=c"
    assert last == "steps = 300\nprint(steps)"
    prose = "".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert "sbatch never" in prose and "<!--" not in prose
    assert nbformat.writes(notebook) == nbformat.writes(build_notebook(cut_page(PAGE)))


def test_the_shortened_form_is_declared_by_the_page():
    shorten = shortening(PAGE)
    assert shorten("steps = 300\nmore_steps = 300\n") == "steps = 6\nmore_steps = 300\n"
    assert shortening("no declaration")("steps = 300") == "steps = 300"
    assert unused_substitutions(cut_page(PAGE.replace("steps = 300\n", "")), PAGE) == ["steps = 300"]


def test_what_is_wrong_with_a_page_is_reported_with_its_line():
    with pytest.raises(TutorialError, match=r"page\.md:3: 'output' is not a command"):
        cut_page("```console\n$ ls\noutput\n```\n")
    with pytest.raises(TutorialError, match=r"page\.md:1: 'none\.txt' is not prepared; expected one of texts"):
        build_notebook(cut_page("<!-- files: none.txt -->\n"))


def test_outputs_are_cleaned_shortened_and_compared(tmp_path):
    def stream(text: str, name: str = "stdout"):
        return nbformat.v4.new_output("stream", name=name, text=text)

    text = (
        f"{tmp_path}/runs/a\rb\n\x1b[1m   4/8\x1b[0m  loss 1.5  9 tok/s  0.4 GiB\ngoodput 9 % of 4 s: a 1 s,\n  b 2 s\n"
    )
    assert clean_text(text, tmp_path) == "b\n   4/8  loss 1.5\n"
    assert clean_text(f"in {tmp_path}", tmp_path) == "in ."
    joined = clean_outputs([stream("a"), stream("a warning", "stderr"), stream("b\n")], tmp_path)
    assert [output.text for output in joined] == ["ab\n"]
    assert shorten_text("\n".join("abcdefg"), 5) == "a\nb\n...\nf\ng"
    assert find_difference([stream("loss 1.50 of a")], [stream("loss 1.51  of a\n")]) == ""
    assert "came 'loss 1.9'" in find_difference([stream("loss 1.5")], [stream("loss 1.9")])
    assert "came 'y 1'" in find_difference([stream("x 1")], [stream("y 1")])
    assert find_difference([stream("x")], []) == "1 outputs were recorded, and 0 of other kinds came"
    assert find_difference([stream("x\ny")], [stream("x")]) == "2 lines were recorded, 1 came"


def test_outputs_come_back_to_the_page():
    page = cut_page(PAGE)
    notebook = build_notebook(page)
    cells = code_cells(notebook)
    cells[2].outputs = [nbformat.v4.new_output("stream", name="stdout", text="one two\n")]
    cells[3].outputs = [nbformat.v4.new_output("display_data", data={"image/svg+xml": "<svg/>", "text/plain": "Chart"})]
    text, pictures = render_page(page, notebook)
    assert "```\n\n<!-- output -->\n```text\none two\n```\n\n```bash\n" in text
    assert "\n<!-- output -->\n![Chart drawn by the block above](../images/tutorial-page-1.svg)\n\nEnd.\n" in text
    assert pictures == {"tutorial-page-1.svg": "<svg/>"}


def test_a_page_is_executed_once_and_only_if_its_code_changed(page, tmp_path, monkeypatch):
    assert outdated(page, tmp_path) == [page.with_suffix(".ipynb")]
    executed = []

    def run(page, notebook):
        executed.append(page.path.stem)
        cells = code_cells(notebook)
        for number, cell in enumerate(cells, start=1):
            cell.execution_count = number
        cells[-1].outputs = [nbformat.v4.new_output("stream", name="stdout", text="300\n")]

    monkeypatch.setattr("tools.tutorials.tutorial.execute", run)
    assert renew(page, tmp_path) == [page, page.with_suffix(".ipynb")] and executed == ["page"]
    assert "```text\n300\n```\n\nEnd." in page.read_text("utf-8")
    assert renew(page, tmp_path) == [] == outdated(page, tmp_path) and executed == ["page"]
    page.write_text(page.read_text("utf-8").replace("End.", "The end."), "utf-8")
    assert outdated(page, tmp_path) == [page.with_suffix(".ipynb")]
    assert renew(page, tmp_path) == [page.with_suffix(".ipynb")] and executed == ["page"]
    page.write_text(page.read_text("utf-8").replace("print(steps)", "print(steps + 1)"), "utf-8")
    assert outdated(page, tmp_path) == [page.with_suffix(".ipynb")]
    assert renew(page, tmp_path) == [page.with_suffix(".ipynb")] and executed == ["page", "page"]
    page.write_text(page.read_text("utf-8").replace("\n300\n", "\n301\n"), "utf-8")
    assert outdated(page, tmp_path) == [page], "an output was changed by hand"


def test_a_failing_cell_is_one_error_with_the_page_and_the_line(page):
    def run(text: str) -> str:
        page = cut_page(text)
        with pytest.raises(TutorialError) as error:
            execute(page, build_notebook(page))
        return str(error.value)

    assert run("Text.\n\n```python\nx = 1\nx / 0\n```\n") == "page.md:5: ZeroDivisionError: division by zero"
    message = run("```console\n$ echo before && exit 3\n```\n")
    assert message.startswith("page.md:2: RuntimeError: exit code 3 of: echo before") and message.endswith("before")


PRINTING = """```console
$ echo $PWD && ls
```

```python
import warnings
warnings.warn("noise")
from pathlib import Path
print(Path.cwd())
1 + 1
```
"""


def test_what_cells_print_and_return_is_kept():
    page = cut_page(PRINTING)
    notebook = build_notebook(page)
    execute(page, notebook)
    first, second = code_cells(notebook)
    assert [output.text for output in first.outputs] == [".\n"]
    assert [output.get("text") or output.data["text/plain"] for output in second.outputs] == [".\n", "2"]
    assert (first.execution_count, second.execution_count) == (1, 2)


INTERRUPTED = """
import signal
import sys
from pathlib import Path
# A shell that has started the tests in the background has SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, sys.argv[1])
from tools.tutorials.execution import execute
from tools.tutorials.notebooks import build_notebook
from tools.tutorials.source import cut
page = cut("```console\\n$ echo begun > {begun}; sleep 4321 & sleep 4321\\n```\\n", Path("page.md"))
execute(page, build_notebook(page))
"""


def test_ctrl_c_leaves_no_process_running(tmp_path):
    begun = tmp_path / "begun"
    script = INTERRUPTED.replace("{begun}", str(begun))
    run = subprocess.Popen([sys.executable, "-c", script, str(ROOT)], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not begun.exists() and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert begun.exists()
    started = psutil.Process(run.pid).children(recursive=True)
    assert len(started) >= 3
    os.kill(run.pid, signal.SIGINT)
    try:
        _, errors = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode != 0 and "KeyboardInterrupt" in errors
    gone, alive = psutil.wait_procs(started, timeout=10)
    assert alive == [] and len(gone) == len(started)
