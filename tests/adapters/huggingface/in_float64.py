"""The truth that both are compared with: a model of `transformers` in float64, its explicit casts to float32 lifted."""

import copy
from typing import Any

import torch
from huggingface_examples import EAGER
from torch.utils._python_dispatch import TorchDispatchMode

NARROW = (torch.float32, torch.bfloat16, torch.float16)


class InFloat64(TorchDispatchMode):
    """Every operation that names a narrower dtype computes in float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = {key: torch.float64 if value in NARROW else value for key, value in (kwargs or {}).items()}
        return func(*(torch.float64 if is_narrow(arg) else arg for arg in args), **kwargs)


def is_narrow(value: Any) -> bool:
    return isinstance(value, torch.dtype) and value in NARROW


def widened(config: Any, model: Any) -> Any:
    """Return the model of a configuration in float64; its tables of positions are computed in float64 too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with InFloat64():
            wide = type(model)._from_config(copy.deepcopy(config), **EAGER, dtype=torch.float64).eval()
    finally:
        torch.set_default_dtype(before)
    unsaved_buffers = {key for key, _ in model.named_buffers()} - model.state_dict().keys()
    missing, unexpected = wide.load_state_dict(model.state_dict(), strict=False)
    assert not unexpected and not missing
    assert all(value.dtype == torch.float64 for value in wide.parameters())
    tables = dict(wide.named_buffers())
    assert all(tables[key].dtype == torch.float64 for key in unsaved_buffers if tables[key].is_floating_point())
    return wide


def logits_and_gradients(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Return logits, and the model with its gradients."""
    model = copy.deepcopy(model)
    model.zero_grad()
    logits = model(tokens).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    return logits.detach(), model
