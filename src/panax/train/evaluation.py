"""Evaluation over many batches: losses and metrics merged as sums, and divided once."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..core import DataChecks, TrainState, merge_measures
from ..core.errors import TrainingError
from ..core.measures import Mean, MeanWithInterval, RocHistogram, total_loss
from .compilation.step_protocol import StepProtocol


def evaluate_all(step: StepProtocol, state: TrainState, batches: Any) -> dict[str, float]:
    """Compute losses and metrics over all `batches`, merged as sums and divided once."""
    return evaluate_sent(step, state, map(step.put, batches))


def evaluate_sent(
    step: StepProtocol, state: TrainState, batches: Iterable[Mapping[str, jax.Array]]
) -> dict[str, float]:
    """Evaluate batches that are already on the devices, as `evaluate_all` does; the result is empty if
    nothing in them counts."""
    merged = None
    for batch in batches:
        measures = step.evaluate(state, batch)
        merged = measures if merged is None else merge_measures(merged, measures)
    if merged is None:
        raise TrainingError("the held-out source yielded no batch; provide more data, or set evaluate.every to 0")
    for metric in merged["metrics"].values():
        if isinstance(metric, DataChecks):
            metric.raise_if_failed("the held-out data")
    decay = step.program.config.ema_decay
    divided, weights, coefficients = jax.device_get(_divided(merged))
    # Drop values with zero weight: a loss would be 0.0, the best possible value.
    empty = {name for name, weight in weights.items() if weight == 0}
    sampled = any(
        isinstance(metric, MeanWithInterval) and name not in empty for name, metric in merged["metrics"].items()
    )
    largest = max(coefficients.values(), default=0.0)
    if coefficients and not sampled and empty >= {name for name, each in coefficients.items() if each == largest}:
        # Auxiliary losses, such as routers', do not measure the model's quality.
        return {}
    return {
        **{name: float(value) for name, value in divided.items() if name not in empty},
        **{
            f"{name}{figure}": value
            for name, metric in merged["metrics"].items()
            if isinstance(metric, RocHistogram | MeanWithInterval) and name not in empty
            for figure, value in metric.statistics().items()
        },
        # Record which parameters were evaluated.
        **({} if decay is None else {"ema_decay": decay}),
        **({"averaged": 1.0} if step.program.has_average and decay is None else {}),
    }


@jax.jit
def _divided(merged: Mapping[str, Any]) -> tuple[dict[str, jax.Array], dict[str, jax.Array], dict[str, jax.Array]]:
    """Compute, in one program, the reported values, the weights over which they are taken, and the losses'
    coefficients."""
    # Array metrics, such as routers', do not measure the model's quality.
    metrics = {name: metric.value for name, metric in merged["metrics"].items() if metric.value.ndim == 0}
    terms = {f"loss/{name}": term for name, term in merged["losses"].items()}
    losses = {name: term.mean for name, term in terms.items()}
    weights = {name: term.weight for name, term in terms.items()}
    for name, metric in merged["metrics"].items():
        if metric.value.ndim == 0 and isinstance(metric, Mean | MeanWithInterval):
            weights[name] = metric.weight if isinstance(metric, Mean) else metric.count
    coefficients = {name: jnp.asarray(term.coefficient, jnp.float32) for name, term in terms.items()}
    return {"loss": total_loss(merged["losses"]), **losses, **metrics}, weights, coefficients
