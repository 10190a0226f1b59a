"""`install.py`: one sentence if it can't continue, nothing twice, and an old Python that can still read it."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tokenize
import zipfile
from pathlib import Path

import pytest
from pages import ROOT


@pytest.fixture(scope="module")
def install():
    spec = importlib.util.spec_from_file_location("panax_install", ROOT / "install.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (((3, 9), "Linux", "x86_64", ["venv"]), "needs Python 3.11 or newer, and this is 3.9"),
        (((3, 12), "Windows", "AMD64", ["venv"]), "on Windows, install WSL"),
        (((3, 12), "Darwin", "x86_64", []), "Intel processor; use one with Apple silicon"),
        (((3, 12), "Linux", "x86_64", ["ensurepip"]), "lacks ensurepip, .*run `sudo apt install python3.12-venv`"),
        (((3, 11), "Linux", "aarch64", []), "^$"),
        (((3, 14), "Darwin", "arm64", []), "^$"),
    ],
)
def test_what_is_missing_is_one_sentence(install, given, expected):
    said = install.refusal(*given)
    assert re.search(expected, said) and "\n" not in said


def test_an_old_python_can_read_it():
    """No annotation, f-string, keyword-only argument or name of a new Python's: from 2.7 on it reports the error."""
    tree = ast.parse((ROOT / "install.py").read_text(encoding="utf-8"), feature_version=(3, 7))
    with open(ROOT / "install.py", "rb") as file:
        assert all(token.string.isascii() for token in tokenize.tokenize(file.readline))
    for node in ast.walk(tree):
        assert not isinstance(node, ast.JoinedStr | ast.AnnAssign | ast.NamedExpr | ast.Nonlocal | ast.AsyncFunctionDef)
        if isinstance(node, ast.FunctionDef):
            arguments = node.args
            assert node.returns is None and not arguments.kwonlyargs and not arguments.posonlyargs
            assert all(each.annotation is None for each in arguments.args)
        if isinstance(node, ast.Call):
            # `print(a, file=b)` is a statement with a mistake to Python 2.
            assert not (isinstance(node.func, ast.Name) and node.func.id == "print" and node.keywords)
        if isinstance(node, ast.Raise):
            assert node.cause is None


def run(arguments: list[str], folder: Path, code: int = 0, **changes: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env={**os.environ, **changes}, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


BACKEND = """
import os, zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    name = "panax_jax-0-py3-none-any.whl"
    files = {
        "panax.pth": os.getcwd(),
        "panax_jax-0.dist-info/METADATA": "Metadata-Version: 2.1\\nName: panax-jax\\nVersion: 0\\nProvides-Extra: test\\n",
        "panax_jax-0.dist-info/WHEEL": "Wheel-Version: 1.0\\nGenerator: here\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
        "panax_jax-0.dist-info/entry_points.txt": "[console_scripts]\\npanax = panax:main\\n",
    }
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
        wheel.writestr("panax_jax-0.dist-info/RECORD", "".join("%s,,\\n" % path for path in files))
    return name
"""


@pytest.fixture
def clone(tmp_path) -> Path:
    """A project as small as can be, which takes nothing from an index."""
    folder = tmp_path / "clone"
    (folder / "requirements").mkdir(parents=True)
    (folder / "install.py").write_text((ROOT / "install.py").read_text(encoding="utf-8"))
    (folder / "backend.py").write_text(BACKEND)
    (folder / "panax.py").write_text("def main():\n    print('it trains')\n")
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "panax-jax"\nversion = "0"\n'
    )
    for kind in ("run", "test", "newest", "recommenders", "published"):
        (folder / f"requirements/{kind}.txt").write_text("# nothing\n")
    return folder


def test_it_ends_with_a_sentence_and_makes_nothing(clone):
    without = "import runpy, sys; sys.modules['ensurepip'] = None; runpy.run_path('install.py', run_name='__main__')"
    said = run(["-c", without], clone, 1)
    assert said.startswith("install.py: this Python lacks ensurepip") and said.count("\n") == 1
    assert run(["install.py", "everything"], clone, 1).startswith("usage: ")
    older = "import runpy, sys; sys.version_info = (3, 11, 7); runpy.run_path('install.py', run_name='__main__')"
    said = run(["-c", older, "newest"], clone, 1)
    assert "needs Python 3.12 or newer, and this is 3.11; run `python3.13 install.py newest`" in said
    (clone / ".venv").mkdir()
    (clone / ".venv/mine").touch()
    assert "is not a virtual environment; move it away" in run(["install.py"], clone, 1)
    assert (clone / ".venv/mine").exists()


@pytest.mark.slow
def test_it_makes_an_environment_once_and_mends_it(clone):
    """From no index."""
    plain = {"PYTHONPATH": "", "PIP_NO_INDEX": "1", "PIP_USER": "1"}

    def panax(where: Path) -> str:
        script, environment = where / ".venv/bin/panax", {**os.environ, **plain}
        return subprocess.run([script], env=environment, capture_output=True, text=True, check=True).stdout

    assert "making .venv" in run(["install.py", "test"], clone, **plain) and panax(clone) == "it trains\n"
    for again in (["install.py"], ["install.py", "test"]):
        assert run(again, clone, **plain) == ""
    # Requirements that changed are installed; the environment stays.
    (clone / "requirements/run.txt").write_text("# nothing yet\n")
    (clone / ".venv/kept").touch()
    assert "installing" in run(["install.py"], clone, **plain) and (clone / ".venv/kept").exists()
    # Those of another kind, which this environment does not hold, change nothing.
    (clone / "requirements/newest.txt").write_text("# other versions\n")
    assert run(["install.py"], clone, **plain) == ""
    # What can't be installed is said, and tried again.
    (clone / "requirements/run.txt").write_text("no-such-package-here==1\n")
    assert "pip could not install requirements/run.txt; see above" in run(["install.py"], clone, 1, **plain)
    (clone / "requirements/run.txt").write_text("# nothing\n")
    # A folder that was moved holds scripts of the old place.
    moved = clone.rename(clone.with_name("moved"))
    assert "making .venv again" in run(["install.py"], moved, **plain) and panax(moved) == "it trains\n"


def store_wheel(folder: Path, name: str) -> Path:
    """A package of one empty module, in a folder that pip can look for it in."""
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(f"{name}-1.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        wheel.writestr(f"{name}-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}-1.dist-info/RECORD", "")
    return folder / f"{name}-1-py3-none-any.whl"


def test_a_wheel_of_kernels_that_is_not_there(clone):
    said = run(["install.py", "--kernels", "absent.whl"], clone, 1)
    assert f"{clone / 'absent.whl'} does not exist; build it with `python wheels/build.py dist`" in said
    assert not (clone / ".venv").exists()
    assert run(["install.py", "--kernels"], clone, 1).startswith("usage: ")


@pytest.mark.slow
def test_a_wheel_of_kernels_is_installed_beside_what_is_there(clone):
    plain = {"PYTHONPATH": "", "PIP_NO_INDEX": "1"}
    run(["install.py"], clone, **plain)
    wheel = store_wheel(clone / "dist", "panax_jax_kernels")
    for _ in range(2):
        assert "installing dist/panax_jax_kernels" in run(["install.py", "--kernels", str(wheel)], clone, **plain)
    subprocess.run([clone / ".venv/bin/python", "-c", "import panax, panax_jax_kernels"], check=True, timeout=60)
    wheel.write_bytes(b"")
    assert "must be built for this system and processor" in run(
        ["install.py", "--kernels", str(wheel)], clone, 1, **plain
    )


def test_extras_are_those_of_the_project(clone):
    """An unknown one, and two of which an environment takes one, are a sentence; nothing is made."""
    with open(clone / "pyproject.toml", "a") as file:
        file.write('[project.optional-dependencies]\ncuda12 = []\ncuda13 = []\ntest = []\nray = ["ray"]\n')
    assert "no extra 'cuda'; choose from cuda12, cuda13, ray\n" in run(["install.py", "--extra", "cuda"], clone, 1)
    both = ["install.py", "--extra", "cuda12", "--extra", "cuda13"]
    assert "cuda12 and cuda13 exclude each other, and .venv would have both" in run(both, clone, 1)
    assert run(["install.py", "--extra"], clone, 1).startswith("usage: ")
    assert not (clone / ".venv").exists()


@pytest.mark.slow
def test_an_extra_is_installed_and_kept(clone):
    """From no index: the extra is a package in a folder, which pip must find to continue."""
    plain = {"PYTHONPATH": "", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(clone / "wheels")}
    project, backend = clone / "pyproject.toml", clone / "backend.py"
    project.write_text(project.read_text() + '[project.optional-dependencies]\ncuda12 = ["gpus"]\ncuda13 = []\n')
    more = "test\\nProvides-Extra: cuda12\\nRequires-Dist: gpus; extra == 'cuda12'"
    backend.write_text(backend.read_text().replace("Provides-Extra: test", f"Provides-Extra: {more}"))

    def stored(name: str) -> None:
        store_wheel(clone / "wheels", name)

    def has(name: str) -> bool:
        return (
            subprocess.run([clone / ".venv/bin/python", "-c", f"import {name}"], env=plain, stderr=-3).returncode == 0
        )

    assert "making .venv" in run(["install.py"], clone, **plain)
    # What can't be fetched is asked for again by the next command, with or without the flag.
    said = run(["install.py", "--extra", "cuda12"], clone, 1, **plain)
    assert "installing cuda12; pip chooses" in said and "install requirements/run.txt and .[cuda12]; see above" in said
    stored("gpus")
    assert "installing cuda12" in run(["install.py"], clone, **plain) and has("gpus")
    for again in (["install.py"], ["install.py", "--extra", "cuda12"]):
        assert run(again, clone, **plain) == ""
    assert "cuda12 and cuda13 exclude each other" in run(["install.py", "--extra", "cuda13"], clone, 1, **plain)
    # Where requirements change, the extra comes along; so it does where the environment is made again.
    (clone / "requirements/run.txt").write_text("# nothing yet\n")
    assert "installing cuda12" in run(["install.py"], clone, **plain)
    (clone / ".venv/bin/python").unlink()
    assert "making .venv again" in run(["install.py"], clone, **plain) and has("gpus")


@pytest.mark.parametrize("made_by", ["others", "install.py"])
def test_an_environment_of_others_is_never_removed(install, made_by, tmp_path, monkeypatch):
    """As `uv venv` makes it, without pip; and one that was moved here."""
    ran: list[list[str]] = []
    monkeypatch.setattr(install, "run", lambda command, failed: ran.append(command))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    environment = install.Environment(str(tmp_path / "venv"))
    if made_by == "install.py":
        Path(environment.made).write_text("")
    environment.make()
    removes = made_by == "install.py"
    assert ["--clear" in command for command in ran] == [removes] and ("ensurepip" in ran[0]) != removes
    (tmp_path / "venv").rename(tmp_path / "moved")
    moved = install.Environment(str(tmp_path / "moved"))
    if removes:
        moved.make()
        assert "--clear" in ran[-1]
        return
    with pytest.raises(SystemExit, match="was made elsewhere, and not by this program; move it away"):
        moved.make()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "pyvenv.cfg").write_text("")
    (tmp_path / "broken" / "bin").mkdir()
    (tmp_path / "broken" / "bin" / "activate").write_text(f"VIRTUAL_ENV={tmp_path / 'broken'}")
    with pytest.raises(SystemExit, match="does not start, or is too old; move it away"):
        install.Environment(str(tmp_path / "broken")).make()
    assert len(ran) == 1


def test_a_folder_whose_name_a_shell_would_read_is_no_moved_one(install, tmp_path):
    folder = tmp_path / "it's here"
    (folder / "bin").mkdir(parents=True)
    for quoted in (str(folder), "'" + str(folder).replace("'", "'\"'\"'") + "'"):
        (folder / "bin" / "activate").write_text(f"VIRTUAL_ENV={quoted}\n")
        assert not install.Environment(str(folder)).moved()
    (folder / "bin" / "activate").write_text("VIRTUAL_ENV=/elsewhere\n")
    assert install.Environment(str(folder)).moved()
