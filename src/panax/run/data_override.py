"""An experiment with other texts than its recipe's: the implementation of `--data PATH...`."""

import dataclasses
from pathlib import Path

from ..core.errors import RecipeError
from ..data import BytePairTokenizer, TextData, TokenFile, make_corpus
from ..rollouts import PromptFiles, RolloutData
from .experiment import Experiment


def replace_data(experiment: Experiment, *paths: str | Path) -> Experiment:
    """Replace an experiment's corpus by the texts (or tokens) in these files, folders or globs; see
    `panax.data.make_corpus`. The prompts of rollouts are replaced by those in the files.

    Its other settings stay, except that tokens get no tokenizer that would be trained on a corpus.

    Raises:
        RecipeError: The experiment does not train on text.
        DataError: A path can't be read.
    """
    data = experiment.data
    if isinstance(data, RolloutData):
        prompts = PromptFiles(paths=tuple(map(str, paths)))
        return dataclasses.replace(experiment, data=dataclasses.replace(data, prompts=prompts))
    if not isinstance(data, TextData):
        kind = type(data).__name__
        raise RecipeError(
            f"{experiment.name} trains on {kind}, and --data gives texts; change the fields of its own data (--data.FIELD), or "
            f"choose a recipe for text"
        )
    corpus = make_corpus(*paths)
    trained = isinstance(data.tokenizer, BytePairTokenizer)
    tokenizer = None if trained and isinstance(corpus, TokenFile) else data.tokenizer
    return dataclasses.replace(experiment, data=dataclasses.replace(data, corpus=corpus, tokenizer=tokenizer))
