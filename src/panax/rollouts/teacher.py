"""`Teacher`: a model that judges each action of the model that learns (on-policy distillation)."""

import dataclasses
import math

import numpy as np
from jaxtyping import Float

from ..core.errors import RecipeError
from ..core.validation import Validated


@dataclasses.dataclass(frozen=True, kw_only=True)
class Teacher(Validated):
    """A model of the same tokens, of any size, that rates each action of an answer.

    An action's advantage is `weight` times its log-probability by the teacher minus that by the model that drew it, in
    nats, both at the temperature of the draws: on average minus the divergence KL(model, teacher) of the position. It is
    added to the advantages from rewards, if there are any. An action answers for its own position alone, as with a
    discount of 0.

    With `top_k` the teacher's most likely tokens of each position are in the batch in place of advantages, and the task's
    objective is `panax.models.Distill`: the divergence of the distributions at the positions of the model's own draws, without
    the noise of the one token that was drawn. Rewards are then only reported.

    Source: the reverse divergence on the model's own draws, MiniLLM (arXiv:2306.08543); its distributions, GKD
    (arXiv:2306.13649), with all data drawn by the model.

    Attributes:
        model: A run's folder (its best checkpoint), a checkpoint's folder or address, `checkpoint:` with one of these,
            `hf:DIR`, `hf:ORG/NAME[@REVISION]` or `peft:DIR`. Its tokenizer must be `data.tokenizer`.
        weight: Factor of the difference.
        top_k: Number of the teacher's most likely tokens for `Distill`, at most the vocabulary; 0 for advantages.

    >>> Teacher(model="runs/large").weight
    1.0
    """

    model: str
    weight: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if not self.model:
            raise RecipeError("Teacher.model is empty; expected a run's folder, a checkpoint, or hf:DIR")
        if not 0.0 < self.weight < math.inf:
            raise RecipeError(f"Teacher.weight={self.weight:g}: expected a positive number")
        if self.top_k < 0:
            raise RecipeError(f"Teacher.top_k={self.top_k}: expected a number of tokens, or 0 for advantages")
        if self.top_k and self.weight != 1.0:
            raise RecipeError(
                f"Teacher.weight={self.weight:g} is of advantages, and has no effect with top_k; remove it"
            )


def compare_with_teacher(
    student: Float[np.ndarray, "rows length"],
    teacher: Float[np.ndarray, "rows length"],
    mask: Float[np.ndarray, "rows length"],
) -> tuple[Float[np.ndarray, "rows length"], float]:
    """Return the teacher's log-probability minus the student's for each action, 0 elsewhere; and the mean of its negative,
    an estimate of the divergence KL(student, teacher) of an action in nats (0 without actions).

    Args:
        mask: Other than 0 for actions.

    >>> rated, divergence = compare_with_teacher(np.array([[-1.0, -2.0]]), np.array([[-3.0, -1.0]]), np.array([[1.0, 0.0]]))
    >>> rated.tolist(), divergence
    ([[-2.0, 0.0]], 2.0)
    """
    counted = mask != 0
    rated = np.where(counted, teacher.astype(np.float64) - student, 0.0)
    return rated, -float(rated[counted].mean()) if counted.any() else 0.0
