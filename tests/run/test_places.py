"""A run's files stay in its folder: no name leads out of runs/, no link is written through."""

import dataclasses

import pytest
from tiny_recipe import tiny

from panax.core.errors import CheckpointError, RecipeError
from panax.run.folder.previous_run import RUN_FILES
from panax.run.preparation import PreparedRun
from panax.run.start import reject_symlinks


@pytest.mark.parametrize(
    "name", ["../evil", "a/../../evil", "/etc/evil", "..", ".", "a//b", "a/", "a\0b", "a\nb", "a\\b", " ", "a/ /b"]
)
def test_a_name_that_leaves_the_folder_of_runs_is_refused(name):
    with pytest.raises(RecipeError, match="expected a folder's name"):
        dataclasses.replace(tiny(), name=name)


def test_names_of_folders_in_folders_are_kept():
    assert dataclasses.replace(tiny(), name="first try/lr=1e-3..2").folder == "runs/first try/lr=1e-3..2"


@pytest.mark.parametrize("name", RUN_FILES)
def test_a_runs_own_file_that_is_a_link_is_refused(name, tmp_path):
    (tmp_path / "victim").write_text("theirs")
    (tmp_path / "run").mkdir()
    reject_symlinks(tmp_path / "run")
    (tmp_path / "run" / name).symlink_to(tmp_path / "victim")
    with pytest.raises(CheckpointError, match=f"{name} is a link to .*victim.*remove it"):
        reject_symlinks(tmp_path / "run")


def test_a_runs_folder_stays_where_it_began(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    experiment = dataclasses.replace(tiny(), directory="", name="here")
    prepared = PreparedRun(experiment, None, None, None)  # type: ignore[arg-type]
    monkeypatch.chdir("/")
    assert prepared.folder == str(tmp_path / "runs" / "here")
