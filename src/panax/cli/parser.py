"""Parser of a command's own flags: an error is one sentence, like every other error."""

import argparse
from typing import NoReturn

from ..core.errors import RecipeError


class Parser(argparse.ArgumentParser):
    """An argument parser that raises its errors.

    Raises:
        RecipeError: From `parse_args`: a flag is unknown, lacks its value, or has an invalid one.
    """

    def error(self, message: str) -> NoReturn:
        raise RecipeError(f"{message}; `{self.prog} --help` lists its flags")
