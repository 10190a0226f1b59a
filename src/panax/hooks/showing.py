"""Hooks that show how a run does: samples of what the model writes, how weights and gradients are spread."""

import dataclasses

from ..core.errors import RecipeError
from ..core.validated import Validated
from .hook import Hook, RunView


def _check_every(hook: Hook, every: int) -> None:
    if every < 1:
        raise RecipeError(f"{type(hook).__name__}(every={every}); expected 1 or more steps")


@dataclasses.dataclass
class Samples(Hook, Validated):
    """Log what the model writes after some prompts, as text, every so many steps and at the end.

    Attributes:
        every: Steps between two samples.
        prompts: What the model continues.
        tokens: How many tokens it adds at most.
        temperature: 0 takes the likeliest token.
        top_k: Draw among the likeliest so many; 0 among all.
        seed: Of the draws.
        show: Whether each sample is shown in the terminal too.
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
            raise RecipeError("Samples has no prompts; give at least one")
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
    """Log histograms of each parameter and its gradient every so many steps.

    Each costs one more forward and backward pass, and another program to compile.

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
