"""Hooks that a user has set on parameters: functions of their gradients, traced with them.

A parameter's hooks are attached to the parameter itself, which another tensor replaces in a trace; so they
are also set on that tensor. `register_hook` runs in each backward pass, so for each micro-batch;
`register_post_accumulate_grad_hook` reads and writes `.grad`, which in a PyTorch loop holds the sum so far,
so it is supported only if a batch is one backward pass.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ....core.errors import RecipeError


def follow_hooks(module: nn.Module, stand_ins: Mapping[str, torch.Tensor]) -> None:
    """Set the gradient hooks of parameters on their stand-ins, too."""
    for name, parameter in module.named_parameters():
        for hook in (parameter._backward_hooks or {}).values():
            if stand_ins[name].requires_grad:
                stand_ins[name].register_hook(hook)


def find_hooked_parameters(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters that have hooks on their accumulated gradients."""
    return tuple(name for name, p in module.named_parameters() if _accumulated(p) and p.requires_grad)


def apply_accumulation_hooks(
    module: nn.Module, stand_ins: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Compute the gradients after the hooks that `register_post_accumulate_grad_hook` has set.

    Args:
        stand_ins: Arguments for the hooks, by parameter name: the parameters, or their stand-ins in a trace.

    Raises:
        RecipeError: A hook does more than change the gradient.
    """
    hooks = {name: _accumulated(p) for name, p in module.named_parameters()}
    after = []
    for name, gradient in gradients.items():
        for hook in hooks[name]:
            if gradient is not None:
                gradient = _called(name, hook, stand_ins[name], gradient)
        after.append(gradient)
    return after


def _called(name: str, hook: Any, tensor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    gradient_before, version = tensor.grad, tensor._version
    try:
        with torch.no_grad():
            # The hook may write to it, and the backward pass may have returned one tensor for two parameters.
            tensor.grad = gradient.detach().clone()
            hook(tensor)
            hooked_gradient = tensor.grad
    finally:
        tensor.grad = gradient_before
    if tensor._version != version:
        raise RecipeError(
            f"{_named(name, hook)} changes the parameter itself, which is left to the optimizer here; remove the hook, and let "
            f"the run's optimizer take the step"
        )
    if hooked_gradient is None or hooked_gradient.shape != gradient.shape:
        raise RecipeError(
            f"{_named(name, hook)} removes the gradient "
            f"({'None' if hooked_gradient is None else list(hooked_gradient.shape)} afterwards), as one "
            f"that takes the optimizer's step in the backward pass does; remove the hook, and let the run's optimizer step"
        )
    return hooked_gradient


def _accumulated(parameter: torch.Tensor) -> Sequence[Any]:
    return tuple((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values())


def _named(name: str, hook: Any) -> str:
    return f"the hook {getattr(hook, '__qualname__', hook)!r} that register_post_accumulate_grad_hook has set on {name}"
