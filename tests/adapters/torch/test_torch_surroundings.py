"""Counts in objects of the standard library, iterators, seeds, clocks and entropy inside a forward: refused, with the line."""

import argparse
import array
import collections
import contextvars
import datetime
import decimal
import fractions
import functools
import itertools
import multiprocessing
import queue
import random
import secrets
import sys
import threading
import time
import timeit
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch_parity import assert_trains_as_pytorch

from panax.adapters.torch import task
from panax.core.errors import RecipeError

WIDTH = 4
BATCH = {"x": torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)}
VARIABLE = contextvars.ContextVar("variable", default=1.0)


def mean(module, batch):
    return module(batch["x"]).square().mean()


class Part(nn.Module):
    def __init__(self, forward, kept=None):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.function, self.kept = nn.Linear(WIDTH, WIDTH), forward, kept

    def forward(self, x):
        return self.function(self, self.linear(x))


def refused(forward, kept=None, loss=mean):
    with pytest.raises(RecipeError) as caught:
        task(Part(forward, kept), loss, BATCH)
    return str(caught.value)


def grows(first, more, number=float):
    """A value that each forward replaces by a larger one."""

    def forward(self, h):
        self.kept = more(self.kept)
        return h * (1 + 1e-6 * number(self.kept))

    return forward, first


VALUES = {
    "Decimal": grows(decimal.Decimal(0), lambda v: v + 1),
    "Fraction": grows(fractions.Fraction(0), lambda v: v + 1),
    "range": grows(range(0, 9), lambda v: range(v.start + 1, v.stop + 1), lambda v: v.start),
    "bytearray": grows(bytearray(1), lambda v: bytearray([v[0] + 1]), lambda v: v[0]),
    "set": grows({0}, lambda v: {max(v) + 1}, max),
    "frozenset": grows(frozenset([0]), lambda v: frozenset([max(v) + 1]), max),
    "timedelta": grows(datetime.timedelta(0), lambda v: v + datetime.timedelta(1), lambda v: v.days),
}


@pytest.mark.parametrize("kind", VALUES)
def test_values_of_the_standard_library_are_compared(kind):
    assert "module (root) changes 'kept' in each forward" in refused(*VALUES[kind])


def of_a_namespace(self, h):
    self.kept.beta += 1e-6
    return h * self.kept.beta


def of_a_value(self, h):
    self.kept.value += 1e-6
    return h * self.kept.value


def in_place(self, h):
    self.kept[0] += 1
    return h * (1 + 1e-6 * self.kept[0])


def of_a_queue(self, h):
    value = self.kept.get()
    self.kept.put(value * 0.999)
    return h * value


def of_a_variable(self, h):
    VARIABLE.set(VARIABLE.get() + 1e-6)
    return h * VARIABLE.get()


def of_a_reference(self, h):
    self.kept().steps += 1
    return h * (1 + 1e-6 * self.kept().steps)


class Owner:
    steps = 0


OWNER = Owner()
OWNER.steps = 0


def local():
    held = threading.local()
    held.value = 1.0
    return held


def filled():
    held = queue.Queue()
    held.put(1.0)
    return held


OBJECTS = {
    "namespace": (of_a_namespace, lambda: argparse.Namespace(beta=1.0), lambda kept: kept.beta == 1.0),
    "shared value": (of_a_value, lambda: multiprocessing.Value("d", 1.0), lambda kept: kept.value == 1.0),
    "raw value": (of_a_value, lambda: multiprocessing.Value("d", 1.0, lock=False), lambda kept: kept.value == 1.0),
    "of a thread": (of_a_value, local, lambda kept: kept.value == 1.0),
    "array": (in_place, lambda: array.array("d", [1.0]), lambda kept: kept[0] == 1.0),
    "bytes": (in_place, lambda: bytearray(1), lambda kept: kept[0] == 0),
    "queue": (of_a_queue, filled, lambda kept: list(kept.queue) == [1.0]),
    "context": (of_a_variable, lambda: None, lambda kept: VARIABLE.get() == 1.0),
    "reference": (of_a_reference, lambda: weakref.ref(OWNER), lambda kept: OWNER.steps == 0),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_counts_in_objects_of_the_standard_library(kind):
    """Found, and afterwards as they were."""
    forward, make, is_as_before = OBJECTS[kind]
    kept = make()
    message = refused(forward, kept)
    assert "changes '" in message and "in each forward" in message
    assert is_as_before(kept)


def test_a_hook_on_all_modules_that_counts():
    calls = [0]

    def counting(module, inputs, output):
        calls[0] += 1
        return output * (1 + 1e-6 * calls[0]) if isinstance(module, nn.Linear) else None

    handle = nn.modules.module.register_module_forward_hook(counting)
    try:
        assert "counting changes 'calls[0]' in each forward" in refused(lambda self, h: h)
    finally:
        handle.remove()
    assert calls == [0]


def generator():
    value = 1.0
    while True:
        yield value
        value *= 0.9


@pytest.mark.parametrize(
    "make",
    [generator, lambda: itertools.cycle([1.0, 0.5]), lambda: iter([1.0, 0.5])],
    ids=["generator", "cycle", "list"],
)
def test_an_iterator_is_not_advanced(make):
    for kept, forward in (
        (made := make(), lambda self, h: h * next(self.kept)),
        ({"rate": made}, lambda self, h: h * next(self.kept["rate"])),
    ):
        message = refused(forward, kept)
        assert "takes the next value of a" in message and "test_torch_surroundings.py:" in message
    assert next(made) == 1.0


@pytest.mark.parametrize(
    ("make", "take"),
    [
        (lambda: (itertools.cycle([1.0, 1 + 1e-6]),), lambda kept: next(kept[0])),
        (lambda: (iter([1.0, 1 + 1e-6, 1.0, 1.0]),), lambda kept: next(kept[0])),
        (lambda: functools.partial(next, generator()), lambda kept: kept()),
        (lambda: generator().__next__, lambda kept: kept()),
        (lambda: iter(zip([1.0, 2.0, 3.0], "abc", strict=True)).__next__, lambda kept: kept()[0]),
        (lambda: collections.deque([1.0, 1 + 1e-6, 1.0, 1.0]).popleft, lambda kept: kept()),
    ],
    ids=["cycle", "list", "partial", "method", "zip", "deque"],
)
def test_an_iterator_in_whose_place_nothing_can_be_put_is_compared(make, take):
    assert "module (root) changes 'kept" in refused(lambda self, h: h * take(self.kept), make())


def test_what_a_distribution_computes_once_is_not_kept():
    """`Categorical` makes its logits when they are first read, and keeps them."""
    prior = torch.distributions.Categorical(probs=torch.tensor([0.1, 0.2, 0.3, 0.4]), validate_args=False)
    module = Part(lambda self, h: h * self.kept.logits, prior)
    adapted = task(module, mean, BATCH)
    assert "logits" not in vars(prior)
    assert_trains_as_pytorch(adapted, module, mean, BATCH)


def test_what_has_no_state_may_be_held():
    module = Part(lambda self, h: h, random.SystemRandom())
    module.optimizer = torch.optim.Adam(module.parameters())
    module.scheduler = torch.optim.lr_scheduler.StepLR(module.optimizer, 1)
    held = module.optimizer.param_groups[0]["params"]
    adapted = task(module, mean, BATCH)
    assert all(a is b for a, b in zip(held, module.parameters(), strict=True))
    assert_trains_as_pytorch(adapted, module, mean, BATCH)


def test_an_error_that_the_model_catches_is_raised_nevertheless():
    def catching(self, h):
        try:
            return h * next(self.kept)
        except Exception:
            return h

    assert "takes the next value of a generator" in refused(catching, generator())

    def of_values(self, h):
        try:
            scale = 2.0 if float(h.detach().abs().max()) > 50 else 1.0
        except Exception:
            scale = 1.0
        return h * scale

    message = refused(of_values)
    assert "module (root) (Part) can't be traced: it catches the error" in message and "_local_scalar_dense" in message


SEEDS = {
    "manual_seed": lambda self, h: h * (torch.manual_seed(3), torch.rand(WIDTH))[1],
    "fork_rng": lambda self, h: _forked(h),
    "set_rng_state": lambda self, h: (torch.set_rng_state(self.kept), h * torch.rand(WIDTH))[1],
    "its generator": lambda self, h: (torch.default_generator.manual_seed(3), h * torch.rand(WIDTH))[1],
    "borrowed": lambda self, h: h * (borrowed(3), torch.rand(WIDTH))[1],
}
borrowed = torch.manual_seed


def _forked(h):
    with torch.random.fork_rng():
        return h * torch.rand(WIDTH)


@pytest.mark.parametrize("way", SEEDS)
def test_seeds_of_pytorchs_generator_are_refused(way):
    before = torch.get_rng_state()
    message = refused(SEEDS[way], before)
    assert "the random numbers of a step come from its key" in message and "register_buffer" in message
    assert way == "its generator" or "test_torch_surroundings.py:" in message


def test_a_seed_function_that_another_library_wrapped_later_is_refused_under_any_name(monkeypatch):
    usual = torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda seed: usual(seed))  # as importing torch._dynamo does
    monkeypatch.setattr(sys.modules[__name__], "borrowed", torch.manual_seed)
    assert "test_torch_surroundings.py:" in refused(SEEDS["borrowed"], torch.get_rng_state())


GENERATORS = {
    "normal_": lambda g: torch.empty(4, WIDTH).normal_(generator=g),
    "bernoulli": lambda g: torch.bernoulli(torch.full((4, WIDTH), 0.5), generator=g),
    "multinomial": lambda g: torch.multinomial(torch.ones(4, WIDTH), WIDTH, generator=g).float(),
    "rand": lambda g: torch.rand(4, WIDTH, generator=g),
    "randperm": lambda g: torch.randperm(WIDTH, generator=g).float(),
    "init": lambda g: nn.init.normal_(torch.empty(4, WIDTH), generator=g),
}


@pytest.mark.parametrize("draw", GENERATORS)
def test_draws_with_a_generator_are_refused(draw):
    message = refused(lambda self, h: h * GENERATORS[draw](torch.Generator().manual_seed(0)))
    assert "draws with generator=" in message and "keep it in a buffer" in message


ENTROPY = {
    "SystemRandom": lambda: random.SystemRandom().random() < 1e-9,
    "secrets": lambda: secrets.randbelow(10**9) == 0,
    "Random": lambda: random.Random().random() < 1e-9,
    "default_rng": lambda: np.random.default_rng().random() < 1e-9,
    "RandomState": lambda: np.random.RandomState().rand() < 1e-9,
    "weibull": lambda: random.weibullvariate(1, 1) < 1e-9,
}


@pytest.mark.parametrize("source", ENTROPY)
def test_draws_that_no_generator_of_the_process_shows(source):
    message = refused(lambda self, h: h * 2 if ENTROPY[source]() else h)
    assert "which a compiled step would hold at one outcome" in message and "test_torch_surroundings.py:" in message


CLOCKS = {
    "time": lambda: time.time() > 1e9,
    "elapsed": lambda: time.monotonic() - START > 1e9,
    "number": lambda: float(time.perf_counter()) > 1e9,
    "datetime": lambda: datetime.datetime.now().year > 3000,
    "timer": lambda: timeit.default_timer() > 1e9,
    "of the system": lambda: time.clock_gettime(time.CLOCK_REALTIME) < 0,
    "localtime": lambda: time.localtime().tm_year > 3000,
}
START = time.monotonic()


@pytest.mark.parametrize("clock", CLOCKS)
def test_clocks_that_decide_are_refused(clock):
    message = refused(lambda self, h: h * 2 if CLOCKS[clock]() else h)
    assert "at the time of its trace" in message and "test_torch_surroundings.py:" in message


def test_what_decides_nothing_or_is_seeded_in_each_forward_is_fine():
    lines = []

    def forward(self, h):
        begun = time.perf_counter()
        scale = random.Random(0).random() + float(np.random.default_rng(0).random())
        lines[:] = [f"{time.perf_counter() - begun:.0f} s since {time.localtime(0).tm_year}"]
        return h * scale

    module = Part(forward)
    assert_trains_as_pytorch(task(module, mean, BATCH), module, mean, BATCH)
