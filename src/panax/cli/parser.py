"""A command's own flags: an error in them is one sentence, as every other error."""

import argparse
from typing import NoReturn

from ..core.errors import RecipeError


class Parser(argparse.ArgumentParser):
    """A parser of flags that raises what can't be read.

    Raises:
        RecipeError: From `parse_args`: a flag is unknown, lacks its value, or has one that is no such thing.
    """

    def error(self, message: str) -> NoReturn:
        raise RecipeError(f"{message}; `{self.prog} --help` lists what it takes")
