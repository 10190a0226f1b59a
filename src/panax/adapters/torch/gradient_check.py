"""Self-check at adaptation: loss and gradients of the example batch, by PyTorch and by the JAX program."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import torch
from torch import nn

from ...core import DataChecks
from ...core.errors import RecipeError
from ...system.host_memory import free_bytes
from .objective import Objective
from .rejection import locate_errors
from .state.module_snapshot import preserve_generators, restore_after, retry_interrupted
from .state.random_ops import ReplayDrawsMode
from .tracing.aten_trace import set_mode
from .tracing.eagerly import disable_compile
from .tracing.graph import TracedProgram, to_jax_function
from .tracing.hooks import apply_accumulation_hooks
from .tracing.regions import mark_checkpoint_regions
from .tracing.rounding_check import run_graph_in_torch
from .tracing.values import as_numpy

TOLERANCE = {None: 1e-3, torch.bfloat16: 6e-2, torch.float16: 1e-2}
"""Tolerance of gradients, relative to the norm of each, by the dtype of autocast. It is a hundred times the
error of sums in another order (measured: 1e-6 to 1e-5 over the models of docs/models/adapters.md; more if rounding
decides which of two elements a pool takes), and far below that of a wrong derivative."""

LOSS_TOLERANCE = TOLERANCE
"""Tolerance of a loss, relative to itself."""

MIN_GRADIENT_SHARE = 1e-2
"""Smallest norm that a gradient is compared against, as a share of the largest one's: true zeros (of a key's
bias, of a bias before BatchNorm) are rounding noise in both, of about 1e-6 of the largest."""

ROUNDING_MARGIN = 30
"""Tolerance for a model that amplifies rounding, as a multiple of the change of PyTorch's own gradient when
every weight is moved by its last bit. Rounding happens in each of many operations, the nudge once."""

MAX_COPIES = 8
"""Maximum number of copies of the parameters during a check: gradients on both sides, and intermediates."""


def explain_too_large(module: nn.Module) -> str | None:
    """Return the reason why a module is not checked; None if it can be."""
    if any(p.is_meta for p in module.parameters()):
        return "its parameters are on the meta device"
    needed = MAX_COPIES * sum(p.numel() * p.element_size() for p in module.parameters())
    available = free_bytes()
    if needed > available:
        return f"a check takes about {needed / 2**30:.0f} GiB, and {available / 2**30:.0f} are free"
    return None


def check_gradients(
    module: nn.Module,
    objective: Objective,
    leaves: Mapping[str, torch.Tensor],
    program: TracedProgram,
    *,
    autocast: torch.dtype | None,
) -> None:
    """Compare loss, gradients and buffers on the example batch, with the same random bits.

    Raises:
        RecipeError: The two disagree; the message names the worst gradient, with both values.
    """
    with jax.default_device(jax.devices("cpu")[0]), jax.default_matmul_precision("highest"):
        key = jax.random.key(0)
        theirs, their_gradients, their_buffers = _compute_in_torch(module, objective, leaves, program, key, autocast)
        ours, our_gradients, our_buffers = _in_jax(module, leaves, program, key)
    hint = _hint(program)
    tolerance = TOLERANCE[autocast]
    for name, a, b in zip(program.traced.losses, theirs, ours):
        same = a == b or (np.isnan(a) and np.isnan(b))
        if not same and not abs(a - b) <= LOSS_TOLERANCE[autocast] * max(abs(a), abs(b), 1e-6):
            raise RecipeError(_disagree(f"loss {name!r}", a, b, hint=hint))
    for name in their_gradients.keys() - our_gradients.keys():
        raise RecipeError(
            f"the loss depends on {name} in PyTorch and not as traced: something that was computed from it before, or a "
            "value that "
            f"code of a library holds; compute it in the forward. check=False leaves {name} as it is"
        )
    for name, gradient in their_gradients.items():
        # In float16 some overflow, and such steps are skipped: both must agree on the positions.
        if autocast is not torch.float16 or (np.isfinite(gradient) != np.isfinite(our_gradients[name])).any():
            _refuse_not_finite(name, gradient, our_gradients[name])
    distances = _distances(our_gradients, their_gradients)
    if any(not distance <= tolerance for distance in distances.values()):
        if autocast is None and _agree_on_one_side(
            module, leaves, program, key, our_gradients, their_gradients, tolerance
        ):
            distances = {}
        with jax.default_device(jax.devices("cpu")[0]):
            # A difference from itself means state: no rounding explains that.
            _, again, _ = _compute_in_torch(module, objective, leaves, program, key, autocast)
            with _perturb_weights(module):
                _, nudged, _ = _compute_in_torch(module, objective, leaves, program, key, autocast)
        repeated_distances, nudged_distances = _distances(again, their_gradients), _distances(nudged, their_gradients)
        for name, distance in distances.items():
            stateful = not repeated_distances[name] <= tolerance / ROUNDING_MARGIN
            if not distance <= (tolerance if stateful else max(tolerance, ROUNDING_MARGIN * nudged_distances[name])):
                a, b = (float(np.linalg.norm(g[name])) for g in (their_gradients, our_gradients))
                raise RecipeError(_disagree(f"the norm of the gradient of {name}", a, b, distance, hint))
    for name, buffer in their_buffers.items():
        our_buffer = our_buffers[name]
        scale = max(float(np.abs(_finite(buffer)).max(initial=0)), 1e-3)
        difference = _difference(buffer, our_buffer)
        if not np.abs(difference).max(initial=0) <= tolerance * scale:
            a, b = (np.abs(values).max(initial=0) for values in (buffer, our_buffer))
            raise RecipeError(_disagree(f"buffer {name} after the step", a, b, hint=hint))


def _difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Compute `a - b`, with 0 if both are the same infinity or both NaN."""
    wide = np.complex128 if np.iscomplexobj(a) or np.iscomplexobj(b) else np.float64
    a, b = a.astype(wide), b.astype(wide)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        return np.where(same, 0.0, a - b)


def _wide(values: Any) -> np.ndarray:
    """Convert to float64, or to complex128."""
    values = np.asarray(values)
    return values.astype(np.complex128 if np.iscomplexobj(values) else np.float64)


def _finite(values: np.ndarray) -> np.ndarray:
    return values[np.isfinite(values)]


def _refuse_not_finite(name: str, theirs: np.ndarray, ours: np.ndarray) -> None:
    """Raise if a gradient is NaN or infinite: PyTorch's weights would become NaN, while Panax skips such a
    step."""
    a, b = (int((~np.isfinite(gradient)).sum()) for gradient in (theirs, ours))
    if a or b:
        subject = "PyTorch's own gradient" if a else "the gradient as traced"
        raise RecipeError(
            f"{subject} of {name} is NaN or infinite on the example, in {a} places in PyTorch and in {b} as traced: "
            f"look for a root or a logarithm of 0, or 0 times infinity, behind a torch.where or a mask, or give "
            f"another example. check=False trains it nevertheless, and skips such steps"
        )


def _hint(program: TracedProgram) -> str:
    """Return a possible reason for a disagreement other than state."""
    choosing = {getattr(node.target, "overloadpacket", None) for node in program.forward}
    if torch.ops.aten.topk in choosing or torch.ops.aten.kthvalue in choosing:
        return (
            "; or it uses torch.topk on equal values, of which PyTorch chooses others than jax.lax.top_k: break ties, by "
            "torch.sort(stable=True) for one"
        )
    return ""


def _agree_on_one_side(
    module: nn.Module,
    leaves: Mapping[str, torch.Tensor],
    program: TracedProgram,
    key: jax.Array,
    ours: Mapping[str, np.ndarray],
    theirs: Mapping[str, np.ndarray],
    tolerance: float,
) -> bool:
    """Return True if gradients differ only because rounding selected another side of a kink, such as a ReLU's;
    see `rounding_check.py`."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers()), **leaves}
    with jax.default_device(jax.devices("cpu")[0]), jax.default_matmul_precision("highest"), preserve_generators():
        plain, decided = (run_graph_in_torch(program, tensors, key, decided_by_jax=each) for each in (False, True))
    return all(
        distance <= tolerance for pair in ((plain, theirs), (ours, decided)) for distance in _distances(*pair).values()
    )


def _distances(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Compute the distance of each gradient, relative to its norm or to the floor."""
    norms = {name: float(np.linalg.norm(_wide(_finite(g)))) for name, g in theirs.items()}
    floor = MIN_GRADIENT_SHARE * max(norms.values(), default=0.0)
    return {
        name: float(np.linalg.norm(_difference(g, ours[name]))) / max(norms[name], floor, 1e-30)
        for name, g in theirs.items()
    }


@contextlib.contextmanager
def _perturb_weights(module: nn.Module) -> Iterator[None]:
    """Move every weight of the module by its last bit, up or down, inside the context."""
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
        retry_interrupted(put_back)


def _disagree(what: str, theirs: Any, ours: Any, apart: float | None = None, hint: str = "") -> str:
    by = "" if apart is None else f" (apart by {apart:.1e} of it)"
    return (
        f"{what} is {float(theirs):.6g} in PyTorch and {float(ours):.6g} as traced{by}; the module does something that a "
        "trace does not see (state outside of buffers, its own random numbers, Python code that depends on "
        f"values){hint}: this model "
        f"is refused. check=False trains it nevertheless"
    )


def _compute_in_torch(
    module: nn.Module,
    objective: Objective,
    leaves: Mapping[str, torch.Tensor],
    program: TracedProgram,
    key: jax.Array,
    autocast: Any,
) -> tuple[list[float], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Compute losses, gradients and buffers in PyTorch, and restore the module afterwards."""
    casting = contextlib.nullcontext() if autocast is None else torch.autocast("cpu", dtype=autocast)
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    with (
        restore_after(module, objective.loss),
        locate_errors(module, "can't be run on the example"),
        set_mode(module, True),
        mark_checkpoint_regions(),
        disable_compile(),
        torch.enable_grad(),
        ReplayDrawsMode(key),
    ):
        with casting:
            terms = objective(module, objective.batch_of(leaves))
        total = sum(total for total, _ in terms.losses.values() if total.requires_grad)
        assert isinstance(total, torch.Tensor)
        gradients = torch.autograd.grad(total, list(named.values()), allow_unused=True)
        hooked_gradients = apply_accumulation_hooks(module, named, dict(zip(named, gradients)))
        buffers = {name: as_numpy(buffer) for name, buffer in module.named_buffers()}
    return (
        [float(total.detach()) for total, _ in terms.losses.values()],
        {name: as_numpy(gradient) for name, gradient in zip(named, hooked_gradients) if gradient is not None},
        buffers,
    )


def _in_jax(
    module: nn.Module, leaves: Mapping[str, torch.Tensor], program: TracedProgram, key: jax.Array
) -> tuple[list[float], dict[str, np.ndarray], dict[str, np.ndarray]]:
    traced = program.traced
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    trained = tuple(as_numpy(tensors[name]) for name in traced.trained)
    untrained = [as_numpy(tensors[name]) for name in traced.parameters if name not in traced.trained]
    others = tuple(
        untrained + [as_numpy(tensors[name]) for name in traced.buffers] + [as_numpy(leaves[n]) for n in traced.leaves]
    )
    function = to_jax_function(program)
    count = len(traced.losses)

    def total(trained: Any, others: Any) -> Any:
        outputs = function(trained, others, jax.random.key_data(key))
        return sum(outputs[: 2 * count : 2]), outputs

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        # Not worth optimizing: it runs once.
        run = jax.jit(
            jax.grad(total, has_aux=True),
            compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True},
        )
        gradients, outputs = jax.device_get(run(trained, others))
    if program.guards:
        DataChecks(jax.numpy.asarray(outputs[-1]), tuple(guard.text for guard in program.guards)).raise_if_failed(
            "the example"
        )
    buffers = outputs[2 * (count + len(traced.metrics)) :]
    return (
        [float(value) for value in outputs[: 2 * count : 2]],
        {name: _wide(gradient) for name, gradient in zip(traced.trained, gradients)},
        dict(zip(traced.buffers, map(np.asarray, buffers))),
    )
