"""What people type first: other libraries' names of flags, `--version`, `python -m panax`, a name and the tab key."""

import dataclasses
import os
import subprocess
import sys

import pytest

import panax
from panax.cli import plugins
from panax.cli.flag_aliases import ADVICE, FLAG_ALIASES, check_names
from panax.cli.main import main
from panax.cli.recipes import find_recipe
from panax.cli.settings import _sentence
from panax.core import RecipeError


def test_each_usual_name_leads_to_a_flag_that_there_is(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", "quickstart", "--help"])
    assert ended.value.code == 0
    words = set(capsys.readouterr().out.split())
    for name, here in FLAG_ALIASES.items():
        assert here.split()[0] in words, name
        assert name not in words, f"{name} is a flag"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--lr", "3e-4"], "unknown flag --lr; use --optimizer.schedule.peak"),
        (["--seed", "1", "--tp=2"], "unknown flag --tp; use --mesh.tensor"),
        (["--gradient_accumulation_steps", "4"], "--gradient-accumulation-steps; use --step.micro-batches"),
        (["--epochs", "3"], "a run is measured in steps: --num-steps"),
        (["--bf16"], "use --task.compute-dtype bfloat16"),
        (["--optimizer.lr", "1e-3"], "unknown setting --optimizer.lr; use --optimizer.schedule.peak"),
        (["--mesh.tp=2"], "unknown setting --mesh.tp; use --mesh.tensor"),
        (["--step.accumulate", "2"], "use --step.micro-batches"),
        (["--model.num_layers", "2"], "use --task.model.num-layers"),
        (["--optimizer.epochs", "3"], "a run is measured in steps"),
        (["--model.remat", "full"], "use --task.remat"),
        (["--optimizer.warmup-steps", "3"], "use --optimizer.schedule.warmup-steps"),
        (["--optimizer.peak", "3"], "did you mean --optimizer.schedule.peak?"),
        (["--step.zzzzz", "3"], "unknown setting --step.zzzzz; known: --step.check-sums, --step.clip"),
        (["--zzzzz", "3"], "unknown setting --zzzzz; no setting has a name like it"),
        (["3"], "'3' belongs to no flag"),
        (
            ["--num-steps", "abc"],
            "Error parsing --num-steps: invalid literal for int() with base 10: 'abc'; `panax train",
        ),
        (["--num-steps"], "Missing value for argument '--num-steps'"),
        (["--task.remat", "some"], "Expected one of ('none', 'products', 'full'); `panax train quickstart --help`"),
    ],
)
def test_another_librarys_name_is_answered_with_the_one_here(flags, expected, capsys):
    assert main(["train", "quickstart", *flags]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["generate"], "the following arguments are required: checkpoint; `panax generate --help`"),
        (["generate", "a", "--prompt", "b", "--tokens", "c"], "argument --tokens: invalid int value: 'c'"),
        (["checkpoint", "show"], "invalid choice: 'show' (choose from 'ls', 'verify'"),
        (["checkpoint", "ls"], "required: where; `panax checkpoint ls --help`"),
        (["simulate", "--devices", "3", "--foo"], "--foo; `panax simulate --help`"),
        (["compare", "vit", "--foo"], "--foo; `panax compare --help`"),
        (["recipes", "--foo"], "--foo; `panax recipes --help`"),
    ],
)
def test_a_mistake_in_a_commands_own_flags_is_one_sentence(command, expected, capsys):
    assert main(command) == 2
    said = capsys.readouterr().err
    assert said.startswith("panax: error: ") and expected in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "box",
    [
        "╭─ Value error ─╮\n│ Error of --a: │\n│ no number.    │\n│ ───────────── │\n│ Argument help │\n╰───╯\n",
        " Value error  \n ------------ \n  Error of --a:  \n  no number.  \n  -----------  \n  Argument helptext\n",
    ],
)
def test_a_box_in_any_letters_is_one_sentence(box):
    assert _sentence(box) == "Error of --a: no number"


def test_values_and_own_flags_are_left_alone():
    check_names(["--num-steps", "10", "--name", "lr", "--data.batch-size", "4"])
    assert not FLAG_ALIASES.keys() & ADVICE.keys()
    with pytest.raises(RecipeError, match="the same command again resumes"):
        check_names(["--resume"])


@pytest.mark.parametrize("command", [("-m", "panax", "--version"), ("-m", "panax.cli.main", "-V")])
def test_it_states_its_version_at_once(command):
    code = "import sys; assert not {'jax', 'numpy'} & set(sys.modules)"
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True)
    assert done.stdout == f"panax {panax.__version__}\n" and not done.stderr
    subprocess.run([sys.executable, "-c", f"import panax.cli.main; {code}"], check=True)


def test_names_are_completed():
    assert {"fit", "Experiment", "compile_step", "adapters"} <= set(dir(panax))
    assert {"Task", "RecipeError"} <= set(dir(panax.core))
    assert not {"TYPE_CHECKING", "lazy_getattr", "register_serializable_module"} & set(dir(panax))
    with pytest.raises(AttributeError, match=r"did you mean 'fit'\?"):
        panax.fitt  # noqa: B018
    code = "import panax; panax.data.TextData; panax.run.EvaluateConfig"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_experiment_shows_what_it_sets():
    shown = repr(dataclasses.replace(find_recipe("quickstart")(), num_steps=7))
    assert shown.startswith("Experiment(task=DecoderTask(model=DecoderConfig(embed=192") and len(shown) < 800
    assert "num_steps=7" in shown and "seed" not in shown


def test_what_plugins_state_of_absent_devices_is_left_out_and_all_else_is_reported():
    code = (
        "import os, sys\n"
        "from panax.cli.plugins import suppress_plugin_warnings\n"
        "with suppress_plugin_warnings():\n"
        "    os.write(2, b'WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\\n')\n"
        "    os.write(2, b'I0000 cudart_stub.cc:31] Could not find cuda drivers on your machine\\n')\n"
        "    os.write(2, b'a true warning\\n')\n"
        "    print('and one of Python', file=sys.stderr)\n"
        "print('after', file=sys.stderr)\n"
        "try:\n"
        "    with suppress_plugin_warnings():\n"
        "        os.write(2, b'said before an error\\n')\n"
        "        raise KeyError('x')\n"
        "except KeyError: pass\n"
        "sys.stderr = None\n"
        "with suppress_plugin_warnings(): pass\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "a true warning\nand one of Python\nafter\nsaid before an error\n"


def test_what_a_library_states_before_it_aborts_is_not_lost():
    code = (
        "import os\n"
        "from panax.cli.plugins import suppress_plugin_warnings\n"
        "with suppress_plugin_warnings(if_failed=IF_FAILED):\n"
        "    os.write(2, b'F0000 driver: GPU 3 has fallen off the bus\\n')\n"
        "    os.abort()\n"
    )
    for if_failed in (True, False):
        command = [sys.executable, "-c", code.replace("IF_FAILED", str(if_failed))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == -6 and done.stderr == "F0000 driver: GPU 3 has fallen off the bus\n"


def test_output_before_a_complete_error_is_left_out():
    code = (
        "import os\n"
        "from panax.cli.plugins import suppress_plugin_warnings\n"
        "for failing in (True, False):\n"
        "    try:\n"
        "        with suppress_plugin_warnings(if_failed=False):\n"
        "            os.write(2, f'failing {failing}\\n'.encode())\n"
        "            if failing: raise KeyError('x')\n"
        "    except KeyError: pass\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "failing False\n"


@pytest.mark.parametrize(
    ("installed", "present", "chosen", "expected"),
    [
        ({"xla_cuda12", "libtpu"}, set(), "", "cpu"),
        ({"xla_cuda12", "libtpu"}, {"xla_cuda"}, "", ""),
        ({"xla_cuda12", "libtpu"}, {"libtpu"}, "", ""),
        # What is known of neither is asked by JAX.
        ({"xla_cuda12", "somechip"}, set(), "", ""),
        (set(), set(), "", ""),
        ({"xla_cuda12"}, set(), "cuda", "cuda"),
    ],
)
def test_plugins_of_devices_that_are_not_there_are_not_started(installed, present, chosen, expected, monkeypatch):
    monkeypatch.setattr(plugins.sys, "platform", "linux")
    monkeypatch.setattr(plugins, "_plugins", lambda: installed)
    monkeypatch.setattr(plugins, "_present", lambda name: name in present)
    monkeypatch.setenv("JAX_PLATFORMS", chosen)
    plugins.skip_absent_plugins()
    assert os.environ["JAX_PLATFORMS"] == expected


def test_a_card_without_a_driver_counts_as_there(monkeypatch, tmp_path):
    (tmp_path / "vendor").write_text("0x10de\n")
    found = {"/sys/bus/pci/devices/*/vendor": [str(tmp_path / "vendor")]}
    monkeypatch.setattr(plugins.glob, "glob", lambda pattern: found.get(pattern, []))
    assert plugins._present("xla_cuda") and not plugins._present("libtpu")
    found["/dev/accel*"] = ["/dev/accel0"]
    assert plugins._present("libtpu")


@pytest.mark.parametrize("platform", ["cuda", "nosuchchip"])
def test_an_absent_device_that_is_asked_for_is_one_line(platform):
    done = subprocess.run(
        [sys.executable, "-m", "panax", "inspect", "quickstart", "--no-compile"],
        capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": platform}, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith(
        f"panax: error: JAX_PLATFORMS={platform} asks for a device that JAX does not find here; unset it"
    )
    assert done.stderr.count("\n") == 1
