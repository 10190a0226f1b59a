"""A release's checks, on repositories that are made for it; the distributions themselves in the slow tier."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from checkouts import checkout
from tools.release import checks
from tools.release.distributions import build, content_problems, try_wheel

import panax

ROOT = Path(__file__).resolve().parents[2]

CHANGES = (
    "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2026-11-28\n\n### Added\n\n- A thing.\n\n## [0.1.0]\n\n- Old.\n"
)


@pytest.fixture
def repository(tmp_path) -> Path:
    """A repository that is ready for a release of 0.2.0."""
    (tmp_path / "src/panax").mkdir(parents=True)
    (tmp_path / "src/panax/__init__.py").write_text('__version__ = "0.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGES)
    (tmp_path / "CITATION.cff").write_text("title: x\nversion: 0.2.0\n")
    for arguments in (
        ("init", "-q", "-b", "main"),
        ("config", "user.name", "t"),
        ("config", "user.email", "t@localhost"),
        ("add", "."),
        ("commit", "-q", "-m", "x"),
    ):
        checks.git(tmp_path, *arguments)
    return tmp_path


def test_a_repository_that_is_ready(repository):
    assert list(checks.problems(repository)) == []
    assert checks.changelog_section(repository, "0.2.0") == ("2026-11-28", "### Added\n\n- A thing.")
    assert checks.changelog_section(repository, "0.1.0") == (None, "- Old.")
    assert checks.changelog_section(repository, "0.3.0") == (None, "")


@pytest.mark.parametrize(
    ("file", "old", "new", "expected"),
    [
        ("CHANGELOG.md", "[0.2.0]", "[0.2.1]", "no section [0.2.0]"),
        ("CHANGELOG.md", "2026-11-28", "unreleased", "has the date 'unreleased'"),
        ("CITATION.cff", "0.2.0", "0.1.0", "write `version: 0.2.0`"),
        ("src/panax/__init__.py", "0.2.0", "0.2.dev", "expected three numbers"),
    ],
)
def test_each_thing_in_the_way_is_named(repository, file, old, new, expected):
    path = repository / file
    path.write_text(path.read_text().replace(old, new))
    checks.git(repository, "commit", "-q", "-a", "-m", "y")
    assert any(expected in problem for problem in checks.problems(repository))


def test_a_changed_tree_a_branch_and_a_tag_are_in_the_way(repository):
    (repository / "new").touch()
    checks.git(repository, "checkout", "-q", "-b", "other")
    checks.git(repository, "tag", "v0.2.0")
    found = "\n".join(checks.problems(repository))
    assert "1 changes" in found and "the branch is other" in found and "a tag v0.2.0 already" in found


def test_a_wheel_without_its_files_or_with_others_is_refused(tmp_path):
    wheel = tmp_path / "panax_jax-0.2.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("panax/__init__.py", "")
        archive.writestr("panax/__pycache__/x.pyc", "")
    problems = "\n".join(content_problems(wheel))
    assert (
        "lacks panax/kernels/cpu/csrc/gemm.c" in problems
        and "lacks the license" in problems
        and "has panax/__pycache__/x.pyc" in problems
    )


def test_the_version_has_one_place():
    assert checks.read_version(ROOT) == panax.__version__
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text("utf-8")
    done = subprocess.run([sys.executable, "-m", "panax", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"panax {panax.__version__}\n"


@pytest.mark.slow
def test_the_distributions_work_in_a_fresh_environment(tmp_path):
    with checkout(ROOT, "HEAD") as clone:
        made = build(clone, tmp_path / "dist")
    assert [each.suffix for each in made] == [".whl", ".gz"]
    assert [problem for each in made for problem in content_problems(each)] == []
    try_wheel(made[0], panax.__version__)
