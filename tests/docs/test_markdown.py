"""All code on the pages is run: Python blocks, the flags of commands, links, tables that repeat what code says."""

import dataclasses
import json
import re
import shlex
import signal
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from pages import PAGES, ROOT, anchors, fences, name_of, prose, relative_links, table_rows
from tools.tutorials.files import write_files
from tools.tutorials.source import shortening

import panax.cli.commands.check
import panax.cli.commands.checkpoint
import panax.cli.commands.data
import panax.cli.commands.evaluate
import panax.cli.commands.export
import panax.cli.commands.find
import panax.cli.commands.generate
import panax.cli.commands.jobs
import panax.cli.commands.launch
import panax.cli.commands.merge
import panax.cli.commands.report
import panax.cli.commands.simulate
import panax.core.errors
import panax_compare.command
from panax.checkpoint import CheckpointConfig, MemoryConfig
from panax.cli.commands.inspect import split_flags, split_lock_flags
from panax.cli.commands.islands import island_flags
from panax.cli.commands.train import NON_SETTING_FLAGS
from panax.cli.main import COMMANDS, main
from panax.cli.overrides import experiment_from
from panax.cli.recipes import built_in_recipes, find_recipe
from panax.kernels import registry
from panax.mesh import MESH_AXES
from panax.models import PRESETS, PUBLISHED_PARAMETERS, DecoderConfig
from panax.parallel.schedules import schedule_table
from panax.run import EvaluateConfig, Experiment
from panax.run.recovery.interrupt import HANDLED_SIGNALS
from panax.train import StepConfig
from panax_compare.command import read_settings as comparison_settings

# README is run whole: test_readme.py.
GENERATED = ("reference", "messages", "families")
"""Folders of docs/ that tools write."""

WITHOUT_CODE = [ROOT, *(ROOT / "docs" / name for name in (*GENERATED, "decisions"))]
WITH_CODE = [page for page in PAGES if page.parent not in WITHOUT_CODE and fences(page)]
TRAINING, MODELS, PARALLELISM, CHECKPOINTS, COMMAND_PAGE, LOGS = (
    ROOT / f"docs/{name}.md"
    for name in (
        "training/index",
        "models/index",
        "parallelism/index",
        "runs/checkpoints",
        "start/commands",
        "runs/logs",
    )
)
SHARED = {"chat.py": TRAINING, "traffic.py": ROOT / "docs/parallelism/communication.md"}
"""Files that several pages import, and the page that shows each."""

LINES = 300
"""The most that a page written by hand may have."""


@pytest.fixture
def here(tmp_path, monkeypatch) -> Iterator[Path]:
    """A folder with the files that pages speak of: `texts/`, `chat.jsonl`, `clicks.csv`, and those that several pages import."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PANAX_CACHE", str(tmp_path / "cache"))
    # What a page registers is gone after it.
    monkeypatch.setattr(registry, "_kernels", {work: list(kernels) for work, kernels in registry._kernels.items()})
    write_files()
    for name, page in SHARED.items():
        Path(name).write_text(next(b.text for b in fences(page) if b.text.startswith(f"# {name}\n")), encoding="utf-8")
    yield tmp_path
    registry._chosen.cache_clear()
    for recipe in tmp_path.glob("*.py"):
        sys.modules.pop(recipe.stem, None)


class Parsed(BaseException):
    """Raised in place of reading a checkpoint: the flags before it were understood."""


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_code_runs_and_commands_parse(page, here, monkeypatch):
    def stop(where: str, say=None, newest=False, mesh=None, base=None):
        raise Parsed

    commands = panax.cli.commands
    for command in (commands.generate, commands.export, commands.merge, commands.evaluate):
        monkeypatch.setattr(command, "load_model", stop)
    namespace: dict = {"__name__": page.stem}
    # A tutorial's numbers are cut: `pytest -m slow` executes it whole.
    shorten = shortening(page.read_text(encoding="utf-8"))
    for block in fences(page):
        block = block._replace(text=shorten(block.text))
        if block.language == "python":
            # A block that begins with a file's name is that file.
            if named := re.match(r"# (\w+\.py)\n", block.text):
                Path(named.group(1)).write_text(block.text, encoding="utf-8")
            # Blank lines before it, so that a traceback has the page's own line numbers.
            exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), namespace)
        elif block.language in ("bash", "console"):
            for arguments in commands_in(block.text, prompt=block.language == "console"):
                check_command(arguments, f"{name_of(page)}: panax {shlex.join(arguments)}")


def commands_in(text: str, *, prompt: bool) -> list[list[str]]:
    """The arguments of each `panax` command in a block; in a console block only lines after a `$` are typed."""
    lines = text.replace("\\\n", " ").splitlines()
    typed = [line.removeprefix("$ ") for line in lines if not prompt or line.startswith("$ ")]
    commands = []
    for part in (part for line in typed for part in line.split("&&")):
        words = shlex.split(part, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            del words[0]
        if words and words[0] == "panax":
            # What a shell does with the output is not the command's.
            commands.append(words[1 : words.index(">") if ">" in words else None])
    return commands


def check_command(arguments: list[str], where: str) -> None:
    """Fail unless the command, its recipe and its flags exist. Nothing is trained."""
    command, *rest = arguments
    assert command in COMMANDS, where
    try:
        if command in ("train", "inspect"):
            if "--help" in rest:
                find_recipe(rest[0])
            elif command == "inspect":
                experiment_from(split_flags(split_lock_flags(rest)[0])[0], command)
            else:
                experiment_from([flag for flag in rest if flag not in NON_SETTING_FLAGS], command)
        elif command == "data":
            options, flags = panax.cli.commands.data.parser().parse_known_args(rest)
            experiment_from([options.recipe, *flags], "data show")
        elif command == "find":
            options, flags = panax.cli.commands.find.parser().parse_known_args(rest)
            experiment_from([options.recipe, *flags], "train")
        elif command == "launch":
            launch_words, flags = panax.cli.commands.launch.split_flags(rest[1:])
            panax.cli.commands.launch.read_resources(launch_words)
            if launch_words.islands:
                flags = island_flags(flags, Path("run"), launch_words.islands, launch_words.island or 0)
            experiment_from([rest[0], *(flag for flag in flags if flag not in NON_SETTING_FLAGS)], "train")
        elif command == "check":
            flags = panax.cli.commands.check.split_flags(rest)[1]
            experiment_from(flags, "check") if flags else None
        elif command in ("status", "logs", "stop"):
            panax.cli.commands.jobs.parser_of(command).parse_args(rest)
        elif command == "report":
            panax.cli.commands.report.parser().parse_args(rest)
        elif command == "simulate":
            panax.cli.commands.simulate.parser().parse_args(rest)
        elif command == "checkpoint":
            panax.cli.commands.checkpoint.parser().parse_args(rest)
        elif command == "compare":
            options = panax_compare.command.parser().parse_args(rest)
            if options.until_loss is None:
                comparison_settings(options)
        elif command in ("generate", "export", "merge", "evaluate"):
            with pytest.raises(Parsed):
                main(arguments)
    except SystemExit as error:
        pytest.fail(f"{where}: {error}")


def test_a_wrong_flag_or_command_is_found(here):
    with pytest.raises(panax.core.errors.RecipeError, match="embde"):
        check_command(["train", "quickstart", "--task.model.embde", "8"], "")
    with pytest.raises(pytest.fail.Exception):
        check_command(["generate", "runs/x", "--prompt", "a", "--token", "many"], "")
    with pytest.raises(AssertionError):
        check_command(["trian", "quickstart"], "")
    assert commands_in("$ A_B=c panax train x > z\nout\n$ cd y && panax recipes\n", prompt=True) == [
        ["train", "x"],
        ["recipes"],
    ]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_resolve(page):
    for link in relative_links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name_of(page)} links to {link}"
        assert not anchor or anchor in anchors(target), f"{name_of(page)} links to {link}; it has {anchors(target)}"


def test_readme_has_the_two_commands():
    blocks = [block.text.strip() for block in fences(ROOT / "README.md") if block.language == "bash"]
    assert blocks == [
        "python3 install.py && .venv/bin/panax train quickstart",
        "python3 install.py test && .venv/bin/pytest",
    ]
    # What a change must pass installs by the same commands, into an environment of its own.
    steps = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert "python3 install.py test --venv .ci/venv\n" in steps and "$(python3 install.py --venv .ci/venv)" in steps


def test_every_paper_in_the_sources_is_in_the_index_of_papers():
    number = re.compile(r"arXiv:\d{4}\.\d{4,5}")
    cited = {found for path in (ROOT / "src").rglob("*.py") for found in number.findall(path.read_text("utf-8"))}
    listed = number.findall((ROOT / "docs/papers.md").read_text("utf-8"))
    assert sorted(listed) == sorted(cited)


def test_the_citation_names_this_version():
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text("utf-8"), re.M)
    assert cited and cited[1] == panax.__version__


def test_readme_is_one_screen_and_some():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 150


def test_no_page_is_long():
    folders = [ROOT / "docs" / name for name in GENERATED]
    written = [page for page in PAGES if page.is_relative_to(ROOT / "docs") and page.parent not in folders]
    lengths = {name_of(page): len(page.read_text("utf-8").splitlines()) for page in written}
    assert {name: length for name, length in lengths.items() if length > LINES} == {}, "cut it by subject"


def test_every_decision_has_one_line_below_one_room():
    index = (ROOT / "docs/decisions/index.md").read_text("utf-8")
    listed = re.findall(r"^- \[\d{4}\]\((\d{4}-.+\.md)\): ", index, re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in (ROOT / "docs/decisions").glob("[0-9]*.md"))
    rooms = {path.parent.name for path in (ROOT / "src/panax").glob("*/__init__.py")}
    assert set(re.findall(r"^## `(\w+)`$", index, re.MULTILINE)) <= rooms


def test_every_extra_is_on_the_page_on_installing():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    listed = [
        name
        for cells in table_rows(ROOT / "docs/start/install.md", "extras")
        for name in re.findall(r"`(\w+)`", cells[0])
    ]
    assert set(project["optional-dependencies"]) - {"test", "newest"} <= set(listed)


def test_every_page_is_in_the_index():
    index = (ROOT / "docs/index.md").read_text("utf-8")
    folders = [ROOT / "docs" / name for name in (*GENERATED, "decisions", "launch")]
    pages = [
        page.relative_to(ROOT / "docs").as_posix()
        for page in (ROOT / "docs").rglob("*.md")
        if page.parent not in folders or page.name == "index.md"
    ]
    assert [name for name in pages if f"]({name}" not in index] == ["index.md"]


def test_no_folder_has_more_than_twenty_pages():
    counts = {folder.name: len(list(folder.glob("*.md"))) for folder in (ROOT / "docs").iterdir() if folder.is_dir()}
    del counts["decisions"]  # Dated records.
    assert {name: count for name, count in counts.items() if count > 20 and name not in GENERATED} == {}


def test_the_page_of_commands_lists_every_command():
    listed = [cells[0].strip("`").split()[1] for cells in table_rows(COMMAND_PAGE, "command")]
    assert sorted(listed) == sorted(COMMANDS)


def test_exit_codes_are_those_of_the_errors():
    listed = {int(code) for cells in table_rows(COMMAND_PAGE, "code") for code in cells[0].split(", ")}
    errors = [error for error in vars(panax.core.errors).values() if hasattr(error, "exit_code")]
    assert listed - {0} == {error.exit_code for error in errors} | {
        128 + number for number in (*HANDLED_SIGNALS, signal.SIGTERM)
    }


def test_every_setting_of_a_run_is_described():
    text = TRAINING.read_text(encoding="utf-8")
    listed = [name for cells in table_rows(TRAINING, "field") for name in re.findall(r"`([a-z_]+)`", cells[0])]
    assert sorted(listed) == sorted(field.name for field in dataclasses.fields(Experiment))
    for cls in (StepConfig, EvaluateConfig):
        for field in dataclasses.fields(cls):
            assert f"`{field.name}`" in text, (cls.__name__, field.name)


def test_every_setting_of_checkpoints_is_described():
    described = [
        name.replace("-", "_")
        for cells in table_rows(CHECKPOINTS, "`--checkpoint.`")
        for name in re.findall(r"`([a-z_.-]+)`", cells[0])
    ]
    fields = {field.name for field in dataclasses.fields(CheckpointConfig)}
    assert {name.split(".")[0] for name in described} == fields
    text = CHECKPOINTS.read_text(encoding="utf-8")
    assert all(f"memory.{field.name}" in text for field in dataclasses.fields(MemoryConfig))


def test_every_setting_of_a_decoder_is_described():
    listed = [name for cells in table_rows(MODELS, "fields") for name in re.findall(r"`([a-z_]+)`", cells[0])]
    assert sorted(listed) == sorted(field.name for field in dataclasses.fields(DecoderConfig))


def test_schedules_are_those_that_run():
    assert schedule_table(stages=4, micro_batches=16, chunks=2) in PARALLELISM.read_text(encoding="utf-8")


def test_every_mesh_axis_is_described_and_every_line_of_flags_is_understood(here):
    assert sorted(cells[0].strip("`") for cells in table_rows(PARALLELISM, "axis")) == sorted(MESH_AXES)
    for cells in table_rows(PARALLELISM, "flags"):
        check_command(["train", "quickstart", *shlex.split(cells[0].strip("`"))], cells[0])


def test_presets_are_those_of_the_table():
    table = {cells[0].strip("`"): int(cells[1].replace(",", "")) for cells in table_rows(MODELS, "preset")}
    assert table == PUBLISHED_PARAMETERS
    assert table.keys() == PRESETS.keys()


def test_the_log_has_the_fields_of_the_table(here):
    """A short run logs what docs/runs/logs.md lists, but for what has no part in it."""
    namespace: dict = {"__name__": "chat"}
    exec(next(block.text for block in fences(TRAINING) if "def chat()" in block.text), namespace)
    experiment = dataclasses.replace(
        namespace["chat"](),
        num_steps=6,
        log_every=2,
        checkpoint=CheckpointConfig(every=3),
        evaluate=EvaluateConfig(every=4),
    )
    panax.fit(experiment, say=lambda line: None, devices=jax.devices()[:1])
    with open("runs/chat/metrics.jsonl", encoding="utf-8") as file:
        logged = {name for line in file for name in json.loads(line)} - {"step", "at"}
    listed = {cells[0].strip("`") for cells in table_rows(LOGS, "field")}
    rare = {"rollback/count", "rollback/batches_left_out", "verify/seconds", "seconds/probe", "seconds/hooks"}
    kinds = {f"goodput/{cells[0].replace(' ', '_')}_seconds" for cells in table_rows(LOGS, "kind")}
    assert len(kinds) > 5 and rare < listed and not rare & logged
    assert logged == (listed - rare) | kinds | {"goodput/fraction"}


def test_pages_speak_of_the_project_alone():
    """No machine's paths, no registry's host."""
    for page in PAGES:
        for word in ("/home/", "/root/", "index-url"):
            assert word not in prose(page).lower(), f"{name_of(page)} has {word!r}"


def test_built_in_recipes_exist():
    assert "quickstart" in built_in_recipes()
