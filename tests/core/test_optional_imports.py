"""A run imports no package that only an extra installs."""

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]

IMPORTS = """
import json, sys
import panax, panax.run, panax.run.parts.run_parts, panax.generate, panax.rollouts.collector, panax.models, panax.cli.recipes
panax.Experiment, panax.rollouts.RolloutData
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def names(requirements):
    """Return the packages that requirements name, in lower case with hyphens."""
    found = (re.match(r"[A-Za-z0-9._-]+", each) for each in requirements)
    return {re.sub(r"[._]+", "-", match[0].lower()) for match in found if match}


def installed_with(packages):
    """Return packages with all that they require."""
    known = set()
    while missing := packages - known:
        known |= missing
        for package in missing:
            try:
                required = importlib.metadata.requires(package) or []
            except importlib.metadata.PackageNotFoundError:
                continue
            packages = packages | names(each for each in required if "extra ==" not in each)
    return known


def test_a_run_imports_no_package_of_an_extra():
    optional = names(each for extra in PROJECT["optional-dependencies"].values() for each in extra)
    optional -= installed_with(names(PROJECT["dependencies"])) | {"panax"}
    assert {"starlette", "torch", "llguidance"} <= optional
    output = subprocess.run([sys.executable, "-c", IMPORTS], check=True, capture_output=True, text=True).stdout
    # JAX looks into the folder of NVIDIA's libraries, which belongs to no package.
    modules = set(json.loads(output.splitlines()[-1])) - {"nvidia"}
    providers = importlib.metadata.packages_distributions()
    imported = {re.sub(r"[._]+", "-", each.lower()) for module in modules for each in providers.get(module, ())}
    assert len(imported) > 5 and imported & optional == set()
