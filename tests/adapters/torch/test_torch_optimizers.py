"""PyTorch's optimizers and schedulers take the same steps here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from panax.adapters.torch.optimizers import from_torch
from panax.core import named_leaves
from panax.core.errors import RecipeError
from panax.optim import Schedule, optimizer_state_axes

STEPS = 50
AXES = {"a.weight": (None, None), "a.bias": (None,), "b.weight": (None, None), "b.bias": (None,)}


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)


def grouped(module: torch.nn.Module) -> list[dict]:
    return [
        {"params": [module.a.weight, module.b.weight], "weight_decay": 0.2, "lr": 3e-2},
        {"params": [module.a.bias]},
    ]


OPTIMIZERS = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), 0.05),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), 0.05, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "nesterov": lambda m: torch.optim.SGD(m.parameters(), 0.05, momentum=0.8, nesterov=True, foreach=True),
    "ascent": lambda m: torch.optim.SGD(m.parameters(), 1e-3, momentum=0.5, maximize=True, weight_decay=0.1),
    "adam": lambda m: torch.optim.Adam(m.parameters(), 0.01),
    "adam with decay": lambda m: torch.optim.Adam(m.parameters(), 0.01, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1),
    "amsgrad": lambda m: torch.optim.Adam(m.parameters(), 0.01, amsgrad=True, maximize=True),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), torch.tensor(0.01), weight_decay=0.3),
    "adamw amsgrad": lambda m: torch.optim.AdamW(m.parameters(), 0.01, amsgrad=True, betas=(0.9, 0.9)),
    "groups": lambda m: torch.optim.AdamW(grouped(m), 1e-2),
    "groups of sgd": lambda m: torch.optim.SGD(grouped(m), 1e-2, momentum=0.9),
}

lr = torch.optim.lr_scheduler
SCHEDULERS = {
    "cosine": lambda o: lr.CosineAnnealingLR(o, 30),
    "lambda": lambda o: lr.LambdaLR(o, [lambda step: 1 / (1 + step), lambda step: 0.9**step]),
    "warm-up": lambda o: lr.SequentialLR(o, [lr.LinearLR(o, 0.1, total_iters=5), lr.StepLR(o, 7)], [5]),
    "one cycle": lambda o: lr.OneCycleLR(o, 0.05, total_steps=STEPS + 1),
    "chained": lambda o: lr.ChainedScheduler([lr.ConstantLR(o, 0.5, 9), lr.ExponentialLR(o, 0.95)]),
}


def together(make_optimizer, make_scheduler=None, every: int = 1) -> None:
    """PyTorch and the translation on the same gradients: those of a bowl that both walk down."""
    module = Two()
    optimizer = make_optimizer(module)
    scheduler = make_scheduler(optimizer) if make_scheduler else None
    ours = from_torch(optimizer, module, scheduler=scheduler, num_steps=STEPS, steps_per_update=every)
    params = {name: jnp.asarray(leaf.detach().numpy().copy()) for name, leaf in module.named_parameters()}
    transformation = ours.build(AXES, STEPS)
    state = transformation.init(params)
    rng = np.random.default_rng(0)
    targets = {name: rng.normal(size=leaf.shape).astype(np.float32) for name, leaf in params.items()}

    @jax.jit
    def step(params, state, noise):
        gradients = jax.tree.map(lambda p, target, n: p - target + n, params, targets, noise)
        updates, state = transformation.update(gradients, state, params)
        return jax.tree.map(jnp.add, params, updates), state

    rate = jax.jit(ours.learning_rate(STEPS))
    for i in range(STEPS):
        assert float(rate(i)) == pytest.approx(float(optimizer.param_groups[0]["lr"]), rel=1e-6)
        noise = {name: rng.normal(size=leaf.shape).astype(np.float32) for name, leaf in params.items()}
        params, state = step(params, state, noise)
        for name, leaf in module.named_parameters():
            leaf.grad = leaf.detach() - torch.as_tensor(targets[name]) + torch.as_tensor(noise[name])
        optimizer.step()
        if scheduler and (i + 1) % every == 0:
            scheduler.step()
    for name, leaf in module.named_parameters():
        np.testing.assert_allclose(params[name], leaf.detach(), rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fifty_steps_stay_together(name):
    together(OPTIMIZERS[name])


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_are_followed(name):
    make = OPTIMIZERS["groups" if name in ("lambda", "one cycle") else "momentum"]
    together(make, SCHEDULERS[name], every=7 if name == "cosine" else 1)


def test_a_parameter_in_no_group_stays_and_has_no_moments():
    module = Two()
    ours = from_torch(torch.optim.AdamW(grouped(module)), module)
    params = {name: jnp.asarray(leaf.detach().numpy()) for name, leaf in module.named_parameters()}
    transformation = ours.build(AXES, 1)
    state = transformation.init(params)
    updates, _ = transformation.update(jax.tree.map(jnp.ones_like, params), state, params)
    assert not updates["b.bias"].any() and updates["a.bias"].any()
    assert not any(name.endswith("b.bias") for name in named_leaves(state))


def test_moments_lie_as_their_parameters_do():
    module = Two()
    ours = from_torch(torch.optim.AdamW(module.parameters()), module)
    params = {name: jnp.asarray(leaf.detach().numpy()) for name, leaf in module.named_parameters()}
    state = ours.build(AXES, 1).init(params)
    axes = {name: (leaf.shape, ("width", "features")[: leaf.ndim]) for name, leaf in params.items()}
    moments = optimizer_state_axes(state, axes).moments
    assert moments["mean"]["a.weight"] == ("width", "features") and moments["square"]["b.bias"] == ("width",)


def test_the_scheduler_and_the_optimizer_given_are_left_as_they_are():
    module = Two()
    optimizer = OPTIMIZERS["momentum"](module)
    scheduler = SCHEDULERS["cosine"](optimizer)
    weight = module.a.weight.detach().clone()
    before = optimizer.param_groups[0]["lr"], scheduler.last_epoch
    from_torch(optimizer, module, scheduler=scheduler, num_steps=40)
    assert (optimizer.param_groups[0]["lr"], scheduler.last_epoch) == before
    assert torch.equal(module.a.weight, weight) and scheduler.optimizer is optimizer


class Annealed(lr.LRScheduler):
    """Of the learning rate and of the decay, as self-supervised training has it."""

    def get_lr(self):
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.1 * (self.last_epoch + 1)
        return [rate * 0.95**self.last_epoch for rate in self.base_lrs]


@pytest.mark.parametrize("name", ["adam", "adamw", "momentum", "groups"])
def test_a_schedule_of_the_decay_is_followed(name):
    together(OPTIMIZERS[name], Annealed)


class Sharpening(lr.LRScheduler):
    def get_lr(self):
        for group in self.optimizer.param_groups:
            group["eps"] = 1e-8 * (self.last_epoch + 1)
        return [group["lr"] for group in self.optimizer.param_groups]


class Thawing(lr.LRScheduler):
    def get_lr(self):
        if self.last_epoch == 3:
            self.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))], "lr": 0.1})
        return [group["lr"] for group in self.optimizer.param_groups]


class Own(torch.optim.AdamW):
    pass


def clipping(module):
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    usual = optimizer.step

    @functools.wraps(usual)
    def step(*args):
        usual(*args)
        module.a.weight.data.clamp_(-1, 1)

    optimizer.step = step
    return optimizer


def clipping_after(module):
    """Replaced after a scheduler has wrapped it."""
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    lr.StepLR(optimizer, 1)
    usual = optimizer.step

    @functools.wraps(usual)
    def step(*args):
        usual(*args)

    optimizer.step = step
    return optimizer


def replaced(optimizer):
    scheduler = lr.StepLR(optimizer, 1)
    scheduler.step = lambda: None
    return scheduler


def used(module):
    optimizer = torch.optim.Adam(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


REFUSED = {
    "RMSprop": (lambda m: torch.optim.RMSprop(m.parameters()), None, "RMSprop is not translated.*optax.rmsprop"),
    "LBFGS": (lambda m: torch.optim.LBFGS(m.parameters()), None, "LBFGS is not translated.*several times"),
    "own": (lambda m: Own(m.parameters()), None, "Own is a custom AdamW"),
    "used": (used, None, "Adam has taken steps already"),
    "strange": (lambda m: torch.optim.SGD(Two().parameters()), None, r"shape \[4, 3\] that is not the module's"),
    "plateau": (OPTIMIZERS["sgd"], lr.ReduceLROnPlateau, "ReduceLROnPlateau depends on values measured"),
    "eps": (lambda m: torch.optim.Adam(m.parameters()), Sharpening, "Sharpening changes 'eps' of group 0 at step 1"),
    "new group": (OPTIMIZERS["sgd"], Thawing, "Thawing makes 2 groups of parameters of 1 at step 3"),
    "step": (clipping, None, "step of this SGD is replaced by"),
    "step after a scheduler": (clipping_after, None, "step of this SGD is replaced"),
    "scheduler's step": (OPTIMIZERS["sgd"], replaced, "step of this StepLR is replaced by .*<lambda>"),
    "differentiable": (lambda m: torch.optim.SGD(m.parameters(), differentiable=True), None, "differentiable"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    make, make_scheduler, message = REFUSED[name]
    module = Two()
    optimizer = make(module)
    scheduler = make_scheduler(optimizer) if make_scheduler else None
    with pytest.raises(RecipeError, match=message):
        from_torch(optimizer, module, scheduler=scheduler, num_steps=10)


def test_hooks_of_all_optimizers_are_refused():
    module = Two()
    handle = register_optimizer_step_post_hook(lambda *args: None)
    try:
        with pytest.raises(RecipeError, match=r"torch.optim.optimizer.register_optimizer_step_post_hook has set"):
            from_torch(OPTIMIZERS["sgd"](module), module)
    finally:
        handle.remove()


def test_other_misuse():
    module = Two()
    optimizer = OPTIMIZERS["sgd"](module)
    with pytest.raises(RecipeError, match="needs the number of steps"):
        from_torch(optimizer, module, scheduler=SCHEDULERS["cosine"](optimizer))
    with pytest.raises(RecipeError, match="belongs to another optimizer"):
        from_torch(optimizer, module, scheduler=SCHEDULERS["cosine"](OPTIMIZERS["sgd"](module)), num_steps=9)
    ours = from_torch(optimizer, module)
    with pytest.raises(RecipeError, match=r"trains c\.weight, which is not a parameter"):
        ours.build({"c.weight": (None,)}, 1).init({"c": {"weight": jnp.zeros(2)}})
    with pytest.raises(RecipeError, match="no effect"):
        type(ours)(groups=ours.groups, known=ours.known, name="SGD", schedule=Schedule(peak=1.0))
