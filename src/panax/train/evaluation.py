"""An evaluation of many batches: their losses and metrics merged as sums, and divided once."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax

from ..core import Faults, TrainState, merge_measures
from ..core.errors import TrainingError
from ..core.measures import Ranked, Sample, total_loss
from .compiled import Step


def evaluate_all(step: Step, state: TrainState, batches: Any) -> dict[str, float]:
    """Losses and metrics over all `batches`, merged as sums and divided once."""
    return evaluate_sent(step, state, map(step.put, batches))


def evaluate_sent(step: Step, state: TrainState, batches: Iterable[Mapping[str, jax.Array]]) -> dict[str, float]:
    """As `evaluate_all`, of batches that are on the devices already."""
    merged = None
    for batch in batches:
        measures = step.evaluate(state, batch)
        merged = measures if merged is None else merge_measures(merged, measures)
    if merged is None:
        raise TrainingError("the held-out source yielded no batch; give it more data, or set evaluate.every to 0")
    for metric in merged["metrics"].values():
        if isinstance(metric, Faults):
            metric.refuse("the held-out data")
    decay = step.program.config.ema_decay
    return {
        **{name: float(value) for name, value in _divided(merged).items()},
        **{
            f"{name}{figure}": value
            for name, metric in merged["metrics"].items()
            if isinstance(metric, Ranked | Sample)
            for figure, value in metric.figures().items()
        },
        # Says which parameters these figures are of.
        **({} if decay is None else {"ema_decay": decay}),
        **({"averaged": 1.0} if step.program.averages and decay is None else {}),
    }


@jax.jit
def _divided(merged: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Sums and weights as what is reported, in one program where each operation would be one."""
    # Arrays, as those of routers, say nothing of how good a model is.
    metrics = {name: metric.value for name, metric in merged["metrics"].items() if metric.value.ndim == 0}
    losses = {f"loss/{name}": term.mean for name, term in merged["losses"].items()}
    return {"loss": total_loss(merged["losses"]), **losses, **metrics}
