"""Recipes by name: Python functions that return an `Experiment`. A recipe is code: using one runs it."""

import importlib
import importlib.util
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from ..core.errors import RecipeError, suggest_name
from ..presets.experiments import PARAMETERS, preset
from ..presets.released_model import adapted_model, released_model
from ..run import Experiment
from ..run.folder.addresses import ADAPTER_PREFIX, RELEASED_PREFIX

Recipe = Callable[[], Experiment]

BUILT_IN = "panax_recipes"

PRESET = "preset:"
"""Prefix of the names of published models."""


def built_in_recipes() -> dict[str, Recipe]:
    """Return every recipe that is part of Panax, by name."""
    package = importlib.import_module(BUILT_IN)
    found: dict[str, Recipe] = {}
    for module in pkgutil.iter_modules(package.__path__):
        found |= _recipes_in(importlib.import_module(f"{BUILT_IN}.{module.name}"))
    return found


def _recipes_in(module: ModuleType) -> dict[str, Recipe]:
    return {
        name: function
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and function.__module__ == module.__name__
        and not name.startswith("_")
        and function.__annotations__.get("return") in (Experiment, "Experiment", "panax.Experiment")
    }


def find_recipe(name: str) -> Recipe:
    """Find a recipe by name, `preset:NAME`, `hf:DIR`, `hf:ORG/NAME[@REVISION]`, `peft:DIR`, `file.py`,
    `file.py:function`, or `package.module:function`.

    Raises:
        RecipeError: The recipe does not exist; the message names the nearest one.
    """
    if name.startswith(PRESET):
        return _preset(name.removeprefix(PRESET))
    if name.startswith(RELEASED_PREFIX):
        return _released_model(name.removeprefix(RELEASED_PREFIX))
    if name.startswith(ADAPTER_PREFIX):
        return _adapted_model(name.removeprefix(ADAPTER_PREFIX))
    source, _, function = name.partition(":")
    if source.endswith(".py"):
        path = Path(source)
        if not path.is_file():
            raise RecipeError(
                f"no recipe file {source} in {Path.cwd()}; `panax recipes` lists those that come with Panax"
            )
        return _choose(_load(path), function, source)
    if function:
        try:
            module = importlib.import_module(source)
        except ImportError as error:
            raise RecipeError(f"the recipe's module {source} can't be imported: {error}") from error
        return _choose(module, function, source)
    recipes = built_in_recipes()
    if name not in recipes:
        raise RecipeError(
            f"unknown recipe {name!r}; {suggest_name(name, recipes)} (a custom recipe is a file: my_recipe.py or "
            f"my_recipe.py:function; a published model is preset:NAME, released weights hf:DIR "
            f"or hf:ORG/NAME, an adapter peft:DIR)"
        )
    return recipes[name]


def _preset(name: str) -> Recipe:
    if name not in PARAMETERS:
        raise RecipeError(f"unknown preset {name!r}; {suggest_name(name, PARAMETERS)}")

    def recipe() -> Experiment:
        return preset(name)

    recipe.__doc__ = f"{name}, of {PARAMETERS[name]:,} parameters, on the data that `--data` names."
    return recipe


def _released_model(where: str) -> Recipe:
    def recipe() -> Experiment:
        return released_model(where)

    recipe.__doc__ = f"The released model {where}, fine-tuned on the data that `--data` names."
    return recipe


def _adapted_model(directory: str) -> Recipe:
    def recipe() -> Experiment:
        return adapted_model(directory)

    recipe.__doc__ = f"The adapter in {directory}, trained further on the data that `--data` names."
    return recipe


def _load(path: Path) -> ModuleType:
    # Under a unique module name: a file json.py must not replace Python's own module.
    name = f"panax_recipe_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # A recipe may import modules of its folder, unless an installed module has the same name.
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        advice = f"; install it for {sys.executable}" if isinstance(error, ModuleNotFoundError) else ""
        raise RecipeError(
            f"the recipe file {path} can't be imported: {format_recipe_error(error, str(path))}{advice}"
        ) from error
    return module


def format_recipe_error(error: BaseException, file: str) -> str:
    """Describe an error in a recipe, and its location: the recipe's own line rather than one that it
    called."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    where = next((frame for frame in reversed(frames) if Path(frame.filename) == Path(file)), frames[-1])
    return f"{type(error).__name__}: {error} ({where.filename}, line {where.lineno})"


def _choose(module: ModuleType, function: str, source: str) -> Recipe:
    recipes = _recipes_in(module)
    if not recipes:
        raise RecipeError(f"{source} defines no recipe: a function with the annotation `-> Experiment`")
    if function:
        if function not in recipes:
            raise RecipeError(f"{source} has no recipe {function!r}; {suggest_name(function, recipes)}")
        return recipes[function]
    if len(recipes) > 1:
        raise RecipeError(f"{source} defines {', '.join(sorted(recipes))}; choose one as {source}:{sorted(recipes)[0]}")
    return next(iter(recipes.values()))
