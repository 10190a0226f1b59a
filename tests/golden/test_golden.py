"""Golden runs: equal commits compare equal, a planted change is found, and nothing is left behind."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import comparison
import pytest
from comparison import compare, first_difference, ulps_text
from runs import GROUPS, names
from taking import UnknownRunError, choose

COMMAND = Path(__file__).parent
ROOT = COMMAND.parents[1]

LOSS = """
import json, sys, time
NAMES = ["sums/plus", "sums/minus", "other/one"]
if "--list" in sys.argv:
    print("\\n".join(NAMES))
    sys.exit()
group, out = sys.argv[1], sys.argv[sys.argv.index("--out") + 1]
members = sys.argv[sys.argv.index("--only") + 1 : sys.argv.index("--out")]
for member in members:
    if member == "minus" and "CRASH":
        sys.exit("it crashed")
    time.sleep(0)
    rows = [[1, "loss", (1.5).hex()], [2, "loss", (1.0 + 2.0).hex()]]
    open(out, "a").write(json.dumps({"name": f"{group}/{member}", "rows": rows, "seconds": 0.0}) + "\\n")
"""


@pytest.fixture
def repository(tmp_path):
    """A repository with a commit of three pretended runs, of which none fails."""
    root = tmp_path / "repository"
    (root / "tests/golden").mkdir(parents=True)
    write(root, LOSS.replace("CRASH", ""))
    git(root, "init", "-q", "-b", "main")
    commit(root)
    return root


def write(root, text):
    (root / "tests/golden/runs.py").write_text(text)


def git(root, *arguments):
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.com")
    subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True)


def commit(root):
    git(root, "add", "-A")
    git(root, "commit", "-q", "--no-gpg-sign", "-m", "a commit")


def command(root, *options):
    return [sys.executable, str(COMMAND), *options, "--root", str(root)]


def run(root, *options):
    environment = dict(os.environ, TMPDIR=str(root.parent))
    return subprocess.run(command(root, *options), capture_output=True, text=True, timeout=120, env=environment)


def left_behind(root):
    listed = subprocess.run(["git", "worktree", "list"], cwd=root, capture_output=True, text=True)
    return [path.name for path in root.parent.glob("panax-*")] + listed.stdout.splitlines()[1:]


def test_identical_commits_are_equal(repository):
    answer = run(repository, "HEAD", "HEAD")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "3 of 3 runs are equal bit by bit" in answer.stdout and not left_behind(repository)


def test_a_planted_sign_in_the_working_tree_is_found(repository):
    write(repository, LOSS.replace("CRASH", "").replace("1.0 + 2.0", "1.0 - 2.0"))
    answer = run(repository, "--only", "sums", "--jobs", "2")
    assert answer.returncode == 1, answer.stdout + answer.stderr
    assert "differs      sums/plus: step 2, loss: 3.0 before, -1.0 after" in answer.stdout
    assert "1 of 2 values differ" in answer.stdout and "other/one" not in answer.stdout
    assert not left_behind(repository)


def test_a_run_of_one_commit_alone_and_one_that_crashes_are_reported(repository):
    write(repository, LOSS.replace('"other/one"', '"other/two"'))
    answer = run(repository)
    assert answer.returncode == 1
    assert "only before  other/one" in answer.stdout and "only after   other/two" in answer.stdout
    assert "failed       sums/minus: after:\n    it crashed" in answer.stdout
    assert "equal        sums/plus" in answer.stdout


def test_an_unknown_name_or_commit_is_refused(repository):
    answer = run(repository, "--only", "sums/plos")
    assert answer.returncode == 2 and "'sums/plos' is not a golden run; did you mean 'sums/plus'?" in answer.stderr
    answer = run(repository, "no-such-commit")
    assert answer.returncode == 2 and "no-such-commit" in answer.stderr
    git(repository, "rm", "-q", "-f", "tests/golden/runs.py")
    (repository / "a").write_text("")
    commit(repository)
    answer = run(repository, "HEAD", "HEAD~1")
    assert answer.returncode == 2 and "HEAD has no tests/golden/runs.py" in answer.stderr
    assert not left_behind(repository)


def test_interrupting_leaves_nothing_behind(repository):
    write(repository, LOSS.replace("CRASH", "").replace("time.sleep(0)", "time.sleep(60)"))
    commit(repository)
    environment = dict(os.environ, TMPDIR=str(repository.parent))
    process = subprocess.Popen(command(repository), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not list(repository.parent.glob("panax-golden-*/before/*.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130 and not left_behind(repository)


def test_the_first_difference_is_the_earliest_step():
    one = 1.0
    next_float32 = 1.0 + 2.0**-23
    before = [(1, "loss", one.hex()), (2, "a", one.hex()), (2, "loss", one.hex())]
    after = [(1, "loss", one.hex()), (2, "loss", next_float32.hex()), (2, "b", one.hex())]
    assert first_difference(before, before) == ""
    assert first_difference(before, after) == (
        "step 2, loss: 1.0 before, 1.0000001192092896 after, 1 ulps of float32; 3 of 4 values differ"
    )
    assert first_difference(before[:1], before) == "step 2, a: only after; 2 of 3 values differ"
    assert first_difference([(1, "a", "nan")], [(1, "a", "nan")]) == ""
    assert ulps_text(float("nan"), 1.0) == "not both finite"
    assert ulps_text(-0.1, 0.1) == f"{2 * 0x3FB999999999999A:,} ulps of float64"
    assert compare({"x": {"error": "a\nb"}}, {}, ["x"])[0].outcome == comparison.FAILED


def test_names_are_chosen_by_group_or_run():
    assert choose(names(), ["layouts/fsdp", "agents"]) == ["layouts/fsdp", "agents/ppo", "agents/dqn", "agents/sac"]
    with pytest.raises(UnknownRunError, match="did you mean 'layouts/hsdp'"):
        choose(names(), ["layouts/hsdq"])


def test_every_group_has_a_module():
    for group in GROUPS:
        assert (COMMAND / f"golden_{group}.py").exists(), group


@pytest.mark.slow
def test_every_recipe_has_a_golden_run():
    members = {name for group in GROUPS if group.endswith("_recipes") for name in GROUPS[group]}
    recipes = {
        name
        for path in (ROOT / "recipes/panax_recipes").glob("[a-z]*.py")
        for module in [importlib.import_module(f"panax_recipes.{path.stem}")]
        for name, value in vars(module).items()
        if callable(value)
        and getattr(value, "__module__", "") == module.__name__
        and "Command:" in (value.__doc__ or "")
    }
    assert recipes and recipes <= members


@pytest.mark.slow
def test_a_run_gives_the_same_bits_twice(tmp_path):
    answers = []
    for number in (1, 2):
        out = tmp_path / f"{number}.jsonl"
        environment = dict(os.environ, PANAX_CPU_KERNELS="xla", PANAX_CACHE=str(tmp_path / f"cache{number}"))
        environment["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT / "src", ROOT / "recipes", COMMAND)))
        command = [sys.executable, str(COMMAND / "runs.py"), "recovery", "--only", "rollback", "resume_after_kill"]
        command += ["--out", str(out), "--folder", str(tmp_path / str(number))]
        subprocess.run(command, env=environment, check=True, timeout=280)
        answers.append({row["name"]: row for row in map(json.loads, out.read_text().splitlines())})
    verdicts = compare(*answers, ["recovery/rollback", "recovery/resume_after_kill"])
    assert [verdict.outcome for verdict in verdicts] == [comparison.EQUAL] * 2, verdicts
