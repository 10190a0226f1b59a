"""The self-check at adaptation: loss and gradients of the example batch, by PyTorch itself and by the JAX program."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import psutil
import torch
from torch import nn

from ...core import Faults
from ...core.errors import RecipeError
from .drawing import SameDraws
from .graph import Program, as_function
from .hooks import after_accumulation
from .objective import Objective
from .refusing import locating
from .regions import marked_regions
from .rounding import graph_in_torch
from .tracing import mode_of
from .untouched import generators_kept, surely, untouched
from .values import as_numpy

TOLERANCE = {None: 1e-3, torch.bfloat16: 6e-2, torch.float16: 1e-2}
"""How far the two may be apart, relative to the norm of each gradient. A hundred times what sums in another order make
(measured: 1e-6 to 1e-5 over the models of docs/adapters.md; more where rounding decides which of two elements a pool takes),
and far below what a wrong derivative makes."""

LOSS_TOLERANCE = TOLERANCE
"""Of a loss, relative to itself."""

FLOOR = 1e-2
"""A gradient is compared at no less than this share of the largest one's norm: true zeros (of a key's bias, of a bias before
BatchNorm) are rounding noise in both, of about 1e-6 of the largest."""

MARGIN = 30
"""Where a model amplifies rounding, it is compared with itself: how many times as far the two may be apart as PyTorch's gradient
moves when every weight is moved by its last bit. Rounding happens in each of many operations, the nudge once."""

COPIES = 8
"""Copies of the parameters that a check takes at most: gradients on both sides, and what is between."""


def too_large(module: nn.Module) -> str | None:
    """Why a module is not checked; None if it can be."""
    if any(p.is_meta for p in module.parameters()):
        return "its parameters are on the meta device"
    needed = COPIES * sum(p.numel() * p.element_size() for p in module.parameters())
    available = psutil.virtual_memory().available
    if needed > available:
        return f"a check takes about {needed / 2**30:.0f} GiB, and {available / 2**30:.0f} are free"
    return None


def check(
    module: nn.Module,
    objective: Objective,
    leaves: Mapping[str, torch.Tensor],
    program: Program,
    *,
    autocast: torch.dtype | None,
) -> None:
    """Compare loss, gradients and buffers on the example batch, with the same random bits.

    Raises:
        RecipeError: They disagree: the worst gradient is named, with both values.
    """
    with jax.default_device(jax.devices("cpu")[0]), jax.default_matmul_precision("highest"):
        key = jax.random.key(0)
        theirs, their_gradients, their_buffers = _in_torch(module, objective, leaves, program, key, autocast)
        ours, our_gradients, our_buffers = _in_jax(module, leaves, program, key)
    tolerance = TOLERANCE[autocast]
    for name, a, b in zip(program.traced.losses, theirs, ours):
        if not abs(a - b) <= LOSS_TOLERANCE[autocast] * max(abs(a), abs(b), 1e-6) and not (np.isnan(a) and np.isnan(b)):
            raise RecipeError(_disagree(f"loss {name!r}", a, b))
    apart = _apart(our_gradients, their_gradients)
    if max(apart.values(), default=0.0) > tolerance:
        if autocast is None and _agree_on_one_side(
            module, leaves, program, key, our_gradients, their_gradients, tolerance
        ):
            apart = {}
        with _nudged(module), jax.default_device(jax.devices("cpu")[0]):
            _, nudged, _ = _in_torch(module, objective, leaves, program, key, autocast)
        own = _apart(nudged, their_gradients)
        for name, distance in apart.items():
            if distance > max(tolerance, MARGIN * own[name]):
                a, b = (float(np.linalg.norm(g[name])) for g in (their_gradients, our_gradients))
                raise RecipeError(_disagree(f"the norm of the gradient of {name}", a, b, distance))
    for name, buffer in their_buffers.items():
        found = our_buffers[name]
        scale = max(float(np.abs(buffer).max(initial=0)), 1e-3)
        if not np.abs(buffer.astype(np.float64) - found).max(initial=0) <= tolerance * scale:
            raise RecipeError(_disagree(f"buffer {name} after the step", np.abs(buffer).max(), np.abs(found).max()))


def _agree_on_one_side(
    module: nn.Module,
    leaves: Mapping[str, torch.Tensor],
    program: Program,
    key: jax.Array,
    ours: Mapping[str, np.ndarray],
    theirs: Mapping[str, np.ndarray],
    tolerance: float,
) -> bool:
    """Whether gradients differ only since rounding took another side of a kink, such as a ReLU's; see `rounding.py`."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers()), **leaves}
    with jax.default_device(jax.devices("cpu")[0]), jax.default_matmul_precision("highest"), generators_kept():
        plain, decided = (graph_in_torch(program, tensors, key, decided_by_jax=each) for each in (False, True))
    return all(
        distance <= tolerance for pair in ((plain, theirs), (ours, decided)) for distance in _apart(*pair).values()
    )


def _apart(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The distance of each gradient, relative to its norm or to the floor."""
    norms = {name: float(np.linalg.norm(g.astype(np.float64))) for name, g in theirs.items()}
    floor = FLOOR * max(norms.values(), default=0.0)
    return {
        name: float(np.linalg.norm(g.astype(np.float64) - ours[name])) / max(norms[name], floor, 1e-30)
        for name, g in theirs.items()
    }


@contextlib.contextmanager
def _nudged(module: nn.Module) -> Iterator[None]:
    """The module with every weight moved by its last bit, up or down."""
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    generator = torch.Generator().manual_seed(0)

    def put_back() -> None:
        with torch.no_grad():
            for name, p in module.named_parameters():
                p.copy_(before[name])

    try:
        with torch.no_grad():
            for p in module.parameters():
                up = torch.randint(0, 2, p.shape, generator=generator) * 2 - 1
                p.mul_(1 + up * torch.finfo(p.dtype).eps)
        yield
    finally:
        surely(put_back)


def _disagree(what: str, theirs: Any, ours: Any, apart: float | None = None) -> str:
    by = "" if apart is None else f" (apart by {apart:.1e} of it)"
    return (
        f"{what} is {float(theirs):.6g} in PyTorch and {float(ours):.6g} as traced{by}; the module does something that a "
        "trace does not "
        f"see (state outside of buffers, its own random numbers, Python code that depends on values): this model is refused. "
        f"check=False trains it nevertheless"
    )


def _in_torch(
    module: nn.Module,
    objective: Objective,
    leaves: Mapping[str, torch.Tensor],
    program: Program,
    key: jax.Array,
    autocast: Any,
) -> tuple[list[float], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """By PyTorch; the module's buffers, gradients and modes are afterwards as before."""
    casting = contextlib.nullcontext() if autocast is None else torch.autocast("cpu", dtype=autocast)
    named = {name: p for name, p in module.named_parameters() if name in program.traced.trained}
    with (
        untouched(module, objective.loss),
        locating(module, "can't be run on the example"),
        mode_of(module, True),
        marked_regions(),
        torch.enable_grad(),
        SameDraws(key),
    ):
        with casting:
            terms = objective(module, objective.batch_of(leaves))
        total = sum(total for total, _ in terms.losses.values() if total.requires_grad)
        assert isinstance(total, torch.Tensor)
        gradients = torch.autograd.grad(total, list(named.values()))
        found = after_accumulation(module, named, dict(zip(named, gradients)))
        buffers = {name: as_numpy(buffer) for name, buffer in module.named_buffers()}
    return (
        [float(total.detach()) for total, _ in terms.losses.values()],
        {name: as_numpy(gradient) for name, gradient in zip(named, found) if gradient is not None},
        buffers,
    )


def _in_jax(
    module: nn.Module, leaves: Mapping[str, torch.Tensor], program: Program, key: jax.Array
) -> tuple[list[float], dict[str, np.ndarray], dict[str, np.ndarray]]:
    traced = program.traced
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    trained = tuple(as_numpy(tensors[name]) for name in traced.trained)
    held = [as_numpy(tensors[name]) for name in traced.parameters if name not in traced.trained]
    others = tuple(
        held + [as_numpy(tensors[name]) for name in traced.buffers] + [as_numpy(leaves[n]) for n in traced.leaves]
    )
    function = as_function(program)
    count = len(traced.losses)

    def total(trained: Any, others: Any) -> Any:
        outputs = function(trained, others, jax.random.key_data(key))
        return sum(outputs[: 2 * count : 2]), outputs

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        # Not worth optimising: it runs once.
        run = jax.jit(
            jax.grad(total, has_aux=True),
            compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True},
        )
        gradients, outputs = jax.device_get(run(trained, others))
    if program.guards:
        Faults(jax.numpy.asarray(outputs[-1]), tuple(guard.text for guard in program.guards)).refuse("the example")
    buffers = outputs[2 * (count + len(traced.metrics)) :]
    return (
        [float(value) for value in outputs[: 2 * count : 2]],
        {name: np.asarray(gradient, np.float32) for name, gradient in zip(traced.trained, gradients)},
        dict(zip(traced.buffers, map(np.asarray, buffers))),
    )
