"""What people type first: other libraries' names of flags, `--version`, `python -m panax`, a name and the tab key."""

import subprocess
import sys

import pytest

import panax
from panax.cli.failing import message
from panax.cli.main import main
from panax.cli.usual_names import ADVICE, USUAL, check_names
from panax.core import RecipeError


def test_each_usual_name_leads_to_a_flag_that_there_is(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", "quickstart", "--help"])
    assert ended.value.code == 0
    words = set(capsys.readouterr().out.split())
    for name, here in USUAL.items():
        assert here.split()[0] in words, name
        assert name not in words, f"{name} is a flag"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--lr", "3e-4"], "there is no flag --lr; here it is --optimizer.schedule.peak"),
        (["--seed", "1", "--tp=2"], "there is no flag --tp; here it is --mesh.tensor"),
        (["--gradient_accumulation_steps", "4"], "--gradient-accumulation-steps; here it is --step.micro-batches"),
        (["--epochs", "3"], "a run is measured in steps: --num-steps"),
        (["--bf16"], "here it is --task.compute-dtype bfloat16"),
    ],
)
def test_another_librarys_name_is_answered_with_the_one_here(flags, expected, capsys):
    assert main(["train", "quickstart", *flags]) == 2
    assert expected in capsys.readouterr().err


def test_values_and_own_flags_are_left_alone():
    check_names(["--num-steps", "10", "--name", "lr", "--data.batch-size", "4"])
    assert not USUAL.keys() & ADVICE.keys()
    with pytest.raises(RecipeError, match="the same command again resumes"):
        check_names(["--resume"])


@pytest.mark.parametrize("command", [("-m", "panax", "--version"), ("-m", "panax.cli.main", "-V")])
def test_it_says_its_version_at_once(command):
    code = "import sys; assert not {'jax', 'numpy'} & set(sys.modules)"
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True)
    assert done.stdout == f"panax {panax.__version__}\n" and not done.stderr
    subprocess.run([sys.executable, "-c", f"import panax.cli.main; {code}"], check=True)


def test_names_are_completed():
    assert {"fit", "Experiment", "compile_step", "adapters"} <= set(dir(panax))
    assert {"Task", "RecipeError"} <= set(dir(panax.core))


def test_a_platform_that_is_asked_for_and_absent_is_one_message(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    said = message(RuntimeError("Unable to initialize backend 'cuda': FAILED_PRECONDITION: No visible GPU devices."))
    assert said.startswith("JAX_PLATFORMS=cuda asks for cuda, and JAX finds no such device here") and "\n" not in said
