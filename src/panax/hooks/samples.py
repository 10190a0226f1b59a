"""Hooks that log samples of generated text, and histograms of weights and gradients."""

import dataclasses

from ..core.errors import RecipeError
from ..core.validation import Validated
from .hook import Hook, RunView


def _check_every(hook: Hook, every: int) -> None:
    if every < 1:
        raise RecipeError(f"{type(hook).__name__}(every={every}); expected 1 or more steps")


@dataclasses.dataclass
class Samples(Hook, Validated):
    """Hook that logs the model's continuations of some prompts, as text, every `every` steps and at the end.

    Attributes:
        every: Steps between two samples.
        prompts: Prompts to continue.
        tokens: Maximum number of new tokens.
        temperature: Sampling temperature; 0 is greedy decoding.
        top_k: Sample from the k most likely tokens; 0 samples from all.
        seed: Seed of the sampling.
        show: Also print each sample in the terminal.
    """

    every: int = 100
    prompts: tuple[str, ...] = ("The ",)
    tokens: int = 64
    temperature: float = 0.8
    top_k: int = 50
    seed: int = 0
    show: bool = False

    def __post_init__(self) -> None:
        _check_every(self, self.every)
        if not self.prompts:
            raise RecipeError("Samples has no prompts; pass at least one")
        if self.tokens < 1 or self.temperature < 0 or self.top_k < 0:
            raise RecipeError(
                f"Samples(tokens={self.tokens}, temperature={self.temperature}, top_k={self.top_k}); expected at least one "
                f"token, and 0 or more of the others"
            )

    def after_step(self, run: RunView) -> None:
        if run.step % self.every == 0 or run.step == run.experiment.num_steps:
            for number, prompt in enumerate(self.prompts):
                if run.stopping:
                    run.say(
                        f"samples of step {run.step}: {number} of {len(self.prompts)} were drawn when the run was ended"
                    )
                    return
                written = prompt + run.generate(
                    prompt, tokens=self.tokens, temperature=self.temperature, top_k=self.top_k, seed=self.seed + number
                )
                run.text(f"samples/{number} {prompt.strip()[:20]}", written)
                if self.show:
                    run.say(f"sample of step {run.step}:\n{written}")


@dataclasses.dataclass
class Histograms(Hook, Validated):
    """Hook that logs histograms of each parameter and its gradient every `every` steps.

    Each set costs one more forward and backward pass, and the first compiles an additional program.

    Attributes:
        every: Steps between two sets of histograms.
    """

    every: int = 100

    def __post_init__(self) -> None:
        _check_every(self, self.every)

    def after_step(self, run: RunView) -> None:
        if run.step % self.every == 0:
            for name, found in run.histograms().items():
                run.histogram(name, found)
                if found.not_finite:
                    run.say(f"warning: step {run.step}: {found.not_finite} values of {name} are not finite")
