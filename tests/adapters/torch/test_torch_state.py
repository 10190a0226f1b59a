"""Python values that a forward changes or draws are refused with their place; the user's module is afterwards as it was."""

import functools
import gc
import itertools
import random
import sys
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch_parity import assert_trains_as_pytorch

from panax.adapters.torch import task
from panax.core.errors import RecipeError

WIDTH = 8
BATCH = {"x": torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)}
COUNTED = {"n": 0}


def mean(module, batch):
    return module(batch["x"]).square().mean()


class Part(nn.Module):
    """A linear layer with an output that goes through a function, with what that function needs."""

    def __init__(self, function, **attributes):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.function(self, self.linear(x))


def snapshot(module):
    """All that a user can see of a module, and the state of all generators."""
    parts = {
        path: (part.training, {k: v for k, v in vars(part).items() if k[0] != "_"})
        for path, part in module.named_modules()
    }
    tensors = [
        (id(t), type(t), t.requires_grad, t.grad, t.detach().clone()) for t in [*module.parameters(), *module.buffers()]
    ]
    hooks = [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules()]
    return repr(parts), tensors, hooks, random.getstate(), np.random.get_state(), torch.get_rng_state()


def assert_untouched(module, before):
    after = snapshot(module)
    assert after[0] == before[0] and after[2] == before[2]
    for now, was in zip(after[1], before[1], strict=True):
        assert now[:4] == was[:4] and torch.equal(now[4], was[4])
    assert after[3] == before[3] and torch.equal(after[5], before[5])
    np.testing.assert_equal(after[4], before[4])


def refused(module, loss=mean):
    before = snapshot(module)
    with pytest.raises(RecipeError) as caught:
        task(module, loss, BATCH)
    assert_untouched(module, before)
    return str(caught.value)


class Schedule:
    def __init__(self):
        self.steps, self.inner = 0, types.SimpleNamespace(temperature=np.float32(1.0))


def counts_in(kind):
    def dictionary(part, h):
        part.kept["n"] += 1
        return h * min(1.0, part.kept["n"] / 1e9)

    def an_object(part, h):
        part.kept.steps += 1
        return h

    def a_numpy_scalar(part, h):
        part.kept = part.kept + 1
        return h

    def inside_an_object(part, h):
        part.kept.inner.temperature *= np.float32(0.99)
        return h * float(part.kept.inner.temperature)

    def an_array(part, h):
        part.kept += 1
        return h

    def a_list(part, h):
        part.kept.append(1)
        return h

    def a_generator(part, h):
        return h if part.kept.random() < 1e-9 else h * 2

    def an_iterator(part, h):
        return h * (1 + 1e-9 * next(part.kept))

    made = {
        dictionary: {"n": 0}, an_object: Schedule(), a_numpy_scalar: np.int64(0), inside_an_object: Schedule(),
        an_array: np.zeros(2), a_list: [], a_generator: np.random.default_rng(0), an_iterator: itertools.count(),
    }  # fmt: skip
    function = next(f for f in made if f.__name__ == kind)
    return Part(function, kept=made[function])


@pytest.mark.parametrize(
    "kind",
    [
        "dictionary",
        "an_object",
        "a_numpy_scalar",
        "inside_an_object",
        "an_array",
        "a_list",
        "a_generator",
        "an_iterator",
    ],
)
def test_a_count_is_found_wherever_a_module_keeps_it(kind):
    message = refused(nn.Sequential(counts_in(kind)))
    assert (
        message.startswith("module 0 changes 'kept") and "in each forward" in message and "register_buffer" in message
    )


def test_a_count_is_found_in_closures_globals_and_classes():
    steps = 0

    def closes_over(part, h):
        nonlocal steps
        steps += 1
        return h

    def of_the_file(part, h):
        COUNTED["n"] += 1
        return h

    def of_the_class(part, h):
        Annealed.total += 1
        return h

    assert "closes_over changes 'steps'" in refused(Part(closes_over))
    assert "the file of test_torch_state changes 'COUNTED['n']'" in refused(Part(of_the_file))
    assert "class Annealed changes 'total'" in refused(Annealed(of_the_class))
    assert steps == 0 and COUNTED == {"n": 0} and Annealed.total == 0

    def counting(module, batch):
        nonlocal steps
        steps += 1
        return mean(module, batch)

    assert "counting changes 'steps'" in refused(nn.Linear(WIDTH, WIDTH), counting)


class Annealed(Part):
    total = 0


@pytest.mark.parametrize("draw", ["random", "np", "uniform", "choice", "permutation", "imported"])
def test_random_numbers_of_pythons_own_are_refused(draw):
    """With a probability so small that no comparison of values would notice."""
    uniform = random.random
    draws = {
        "random": lambda: random.random() < 1e-6,
        "np": lambda: np.random.rand() < 1e-6,
        "uniform": lambda: np.random.uniform(0, 1) <= 1e-6,
        "choice": lambda: random.randint(0, 10**6) == 0,
        "permutation": lambda: np.random.permutation(10)[0] > 10,
        "imported": lambda: uniform() < 1e-6,
    }
    drawn = draws[draw]
    message = refused(nn.Sequential(Part(lambda part, h: h if drawn() else h * 2)))
    assert "module 0 (Part)" in message and "torch.rand" in message
    assert draw == "permutation" or "test_torch_state.py" in message


def test_a_draw_that_decides_nothing_is_let_through():
    """LayerDrop that is switched off still draws; a forward that seeds its generator draws the same each time."""

    def switched_off(part, h):
        if random.random() < 0.0 or not np.random.uniform(0, 1) >= 0.0:
            return h
        np.random.seed(7)
        return h * float(np.random.normal())

    module = Part(switched_off)
    before = snapshot(module)
    adapted = task(module, mean, BATCH)
    assert_untouched(module, before)
    assert_trains_as_pytorch(adapted, module, mean, BATCH)


@pytest.fixture(autouse=True)
def empty_cache():
    """Nothing of `positions` is known before a test: what it holds after a trace was made by that trace."""
    positions.cache_clear()


@functools.lru_cache
def positions(width):
    return (torch.arange(width).float(), {"twice": 2 * torch.arange(width)})


def under_two_names():
    module = Part(lambda part, h: part.second(part.first(h)))
    module.first = nn.Linear(WIDTH, WIDTH)
    module.second = module.first
    return module


def in_a_list_twice():
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.1))
    return Part(lambda part, h: part.blocks[1](part.blocks[0](h)), blocks=nn.ModuleList([block, block]))


def cached():
    def scaled(part, h):
        first, more = positions(WIDTH)
        return h * first + more["twice"]

    return Part(scaled)


@pytest.mark.parametrize("make", [under_two_names, in_a_list_twice, cached])
def test_what_broke_the_module_works(make):
    module = make()
    before = snapshot(module)
    adapted = task(module, mean, BATCH)
    assert_untouched(module, before)
    assert type(positions(WIDTH)[0]) is torch.Tensor
    assert_trains_as_pytorch(adapted, module, mean, BATCH)


def test_a_cache_that_the_collector_does_not_list_is_emptied_too():
    module = cached()
    gc.freeze()
    task(module, mean, BATCH)
    assert type(positions(WIDTH)[0]) is torch.Tensor


def test_tensors_in_lists_and_dictionaries_are_refused():
    def keeps(part, h):
        part.kept.append({"h": h})
        return h

    def sets(part, h):
        return h * part.kept.setdefault("scale", torch.ones(WIDTH))

    assert "module (root) keeps a tensor in 'kept[0]['h']'" in refused(Part(keeps, kept=[]))
    assert "module (root) keeps a tensor in 'kept['scale']'" in refused(Part(sets, kept={}))


def test_parameters_in_lists_dictionaries_and_closures_train():
    module = Part(lambda part, h: h * part.lists[0] + part.named["more"][0] + part.extra)
    module.scale, module.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
    extra = module.extra = nn.Parameter(torch.zeros(WIDTH))
    object.__setattr__(module, "lists", [module.scale])
    object.__setattr__(module, "named", {"more": [module.shift]})
    module.linear.register_forward_hook(lambda part, inputs, output: output * (1 + extra))
    before = snapshot(module)
    adapted = task(module, mean, BATCH)
    assert_untouched(module, before)
    assert module.lists[0] is module.scale and module.named["more"][0] is module.shift and not adapted.frozen_parameters
    assert_trains_as_pytorch(adapted, module, mean, BATCH)


@pytest.mark.parametrize("kind", ["a view", "a result", "a tuple"])
def test_what_was_made_of_a_parameter_is_refused(kind):
    module = Part(lambda part, h: h + part.kept[0].sum())
    module.w = nn.Parameter(torch.ones(4, WIDTH))
    kept = {"a view": module.w.detach()[:2], "a result": module.w * 2, "a tuple": (module.w,)}[kind]
    object.__setattr__(module, "kept", kept)
    assert "module (root) holds a view of a parameter or buffer" in refused(module)


def test_sparse_tensors_are_refused():
    module = Part(lambda part, h: torch.sparse.mm(part.adjacent, h))
    module.register_buffer("adjacent", torch.eye(4).to_sparse())
    with pytest.raises(RecipeError, match=r"adjacent is a sparse tensor .*keep it dense"):
        task(module, mean, BATCH)
    assert module.adjacent.is_sparse and type(mean(module, BATCH)) is torch.Tensor
    assert "_sparse_addmm" in refused(
        Part(lambda part, h: torch.sparse.mm(part.kept, h), kept=torch.eye(4).to_sparse())
    )
    embedding = nn.Embedding(4, 2, sparse=True)
    with pytest.raises(RecipeError, match="sparse=True, and gradients are dense here; build it with sparse=False"):
        task(embedding, lambda m, b: m(b["i"]).sum(), {"i": torch.arange(4)})


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_an_interrupt_leaves_the_module_as_it_was(stop):
    """Raised where the module's own code runs: while it is traced, forward and backward, and while it is checked."""
    calls = 0

    def interrupted(*_):
        nonlocal calls
        calls += 1
        if calls == stop:
            raise KeyboardInterrupt

    module = nn.Sequential(in_a_list_twice(), cached())
    module[1].register_forward_hook(interrupted)
    module[1].linear.weight.register_hook(interrupted)
    module.train(False)
    before = snapshot(module)
    with pytest.raises(KeyboardInterrupt):
        task(module, mean, BATCH, check=stop == 4)
        task(module, mean, BATCH)
    calls = 0
    assert_untouched(module, before)
    assert type(positions(WIDTH)[0]) is torch.Tensor


@pytest.mark.slow
def test_an_interrupt_at_any_point_leaves_the_module_as_it_was():
    """Raised at many calls of Python functions, from the first of an adaptation to the last."""
    module = nn.Sequential(in_a_list_twice(), cached())
    module[0].linear.weight.register_hook(lambda gradient: gradient * 2)
    before = snapshot(module)

    def calls_of_an_adaptation(stop):
        count = 0

        def look(frame, event, argument):
            nonlocal count
            inside = "panax/adapters/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__
            if event == "call" and inside:
                count += 1
                if count == stop:
                    raise KeyboardInterrupt

        sys.setprofile(look)
        try:
            task(module, mean, BATCH)
        finally:
            sys.setprofile(None)
        return count

    total = calls_of_an_adaptation(0)
    for stop in [3, *range(total // 10, total, total // 10)]:
        with pytest.raises(KeyboardInterrupt):
            calls_of_an_adaptation(stop)
        assert_untouched(module, before)
        assert type(positions(WIDTH)[0]) is torch.Tensor
    assert task(module, mean, BATCH).name == "sequential"
