"""Programs are as recorded, and their hash changes with the operations of a program and nothing else."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import canonical
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import traced_programs as programs
from jax import lax
from jax.sharding import PartitionSpec as P

X, Y = np.arange(6.0, dtype=np.float32).reshape(2, 3), np.ones((2, 3), np.float32)


def hashed(function, *arguments):
    return canonical.hash_program(jax.make_jaxpr(function)(*(arguments or (X, Y))))


@pytest.mark.parametrize("name", programs.names())
def test_this_change_alters_no_program(name):
    version, recorded = programs.read_recorded()
    if version != jax.__version__:
        pytest.skip(f"recorded with jax {version}; another one writes other programs")
    expected = {key: value for key, value in recorded.items() if key.startswith(f"{name} ")}
    assert programs.hashes_of(name) == expected, (
        "a program changed; if it was meant to, record it: python tests/programs --renew"
    )


def test_every_program_is_recorded_and_no_other():
    _, recorded = programs.read_recorded()
    assert {key.partition(" ")[0] for key in recorded} == set(programs.names())


def test_another_process_finds_the_same_hashes():
    chosen = ["optimizers/soap", "sums/int8", "agents/dqn"]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    command = [sys.executable, str(Path(__file__).parent), "--only", *chosen]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    version, _ = programs.read_recorded()
    if version != jax.__version__:
        assert answer.returncode == 2 and f"recorded with jax {version}" in answer.stderr
    else:
        assert answer.returncode == 0, answer.stdout + answer.stderr
        assert "10 of 10 programs are as recorded" in answer.stdout


def plain(x, y):
    a = jnp.sin(x)
    b = jnp.cos(y)
    return a @ b.T, (a - b) * 2


def reordered(first, second):
    other = jax.jit(jnp.cos)(second)
    sine = jnp.sin(first)
    difference = (sine - other) * 2
    return sine @ other.T, difference


def test_names_and_order_alter_nothing():
    assert hashed(plain) == hashed(reordered)


def test_what_no_result_needs_alters_nothing():
    def with_dead_code(x, y):
        jnp.exp(x)
        return plain(x, y)

    traced = [jax.jit(function).trace(X, Y) for function in (plain, with_dead_code)]
    one, other = (canonical.hash_traced(each, state_argument=None) for each in traced)
    assert one == other


@pytest.mark.parametrize(
    "changed",
    [
        lambda x, y: (jnp.sin(x) @ jnp.cos(y).T, (jnp.sin(x) - jnp.cos(y)) * 2),  # computed twice
        lambda x, y: ((a := jnp.sin(x)) @ (b := jnp.cos(y)).T, (a - b) * 3),
        lambda x, y: ((a := jnp.sin(x)) @ (b := jnp.cos(y)).T, (b - a) * 2),
        lambda x, y: ((a := jnp.sin(x)).T @ (b := jnp.cos(y)), (a - b) * 2),
        lambda x, y: ((a := jnp.sin(x)) @ (b := jnp.cos(y)).T, (a - b).astype(jnp.bfloat16) * 2),
        lambda x, y: ((a := jnp.sin(x)) @ (b := jnp.cos(y)).T, (a - b).astype(jnp.bfloat16).astype(jnp.float32) * 2),
        lambda x, y: ((a := jnp.sin(x)) @ (b := jnp.cos(y)).T, jax.checkpoint(lambda c: c * 2)(a - b)),
        lambda x, y: (((a := jnp.sin(x)) - (b := jnp.cos(y))) * 2, a @ b.T),  # results exchanged
        lambda x, y: ((a := jnp.sin(y)) @ (b := jnp.cos(x)).T, (a - b) * 2),  # arguments exchanged
    ],
    ids=["twice", "constant", "operands", "axis", "dtype", "cast", "remat", "results", "arguments"],
)
def test_another_program_has_another_hash(changed):
    assert hashed(changed) != hashed(plain)


def test_constants_count_by_value():
    def with_constant(values):
        return hashed(lambda x, y: x + jnp.asarray(values)[None])

    values = np.arange(3, dtype=np.float32)
    assert with_constant(values) == with_constant(values.copy())
    assert len({with_constant(v) for v in (values, values + 1, values[::-1].copy(), values[:1])}) == 4


def test_reductions_count_by_axis():
    assert len({hashed(lambda x, y, axis=axis: (x * y).sum(axis)) for axis in (0, 1, None)}) == 3


def looped(x, y, order=(0, 1), length=3, swapped=False, other=jnp.sin):
    """A loop that carries two arrays which begin alike, in either order."""

    def turn(carry, row):
        a, b = (carry[i] for i in order)
        a, b = (b + row, other(b)) if swapped else (a + b * row, other(b) - row)
        return tuple((a, b)[i] for i in order), a.sum()

    zeros = jnp.zeros(2)
    last, rows = lax.scan(turn, (zeros, zeros), jnp.ones((length, 2)) * x[0, 0])
    a, b = (last[i] for i in order)
    return a - b, rows


def test_the_order_of_what_a_loop_carries_alters_nothing_and_its_body_does():
    assert hashed(looped) == hashed(lambda x, y: looped(x, y, order=(1, 0)))
    changes = ({"length": 4}, {"swapped": True}, {"other": jnp.cos})
    found = [hashed(lambda x, y, change=change: looped(x, y, **change)) for change in changes]
    assert len({hashed(looped), *found}) == 4


def test_conditions_and_branches_count():
    def chosen(x, y, low=1.0, first=jnp.sin):
        return lax.while_loop(lambda z: z[0, 0] < low, lambda z: lax.cond(z[0, 0] > 0, first, jnp.cos, z) + y, x)

    changes = ({"low": 2.0}, {"first": jnp.tanh})
    found = [hashed(lambda x, y, change=change: chosen(x, y, **change)) for change in changes]
    assert len({hashed(chosen), *found}) == 3


def test_programs_of_devices_count_by_what_they_hold_and_send_and_not_by_order():
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def mapped(over="a", spec=("a", None), exchanged=False):
        spec = P(*spec)

        def inner(x, y):
            return lax.psum(x, over), y

        def call(x, y):
            if exchanged:

                def backwards(y, x):
                    return inner(x, y)[::-1]

                return jax.shard_map(
                    backwards, mesh=mesh, in_specs=(P(), spec), out_specs=(P(), spec), check_vma=False
                )(y, x)[::-1]
            return jax.shard_map(inner, mesh=mesh, in_specs=(spec, P()), out_specs=(spec, P()), check_vma=False)(x, y)

        return hashed(call)

    assert mapped() == mapped(exchanged=True)
    assert len({mapped(), mapped(over="b"), mapped(spec=(None, None))}) == 3


def test_effects_keep_their_order():
    def shown(x, y, order=(0, 1)):
        for i in order:
            jax.debug.callback(lambda value: None, (x, y)[i], ordered=True)
        return x

    assert hashed(shown) != hashed(lambda x, y: shown(x, y, (1, 0)))


def test_leaves_of_a_state_may_move_and_parameters_may_not():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Before:
        params: dict
        average: dict
        velocity: dict

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class After:
        parts: dict
        params: dict

    def update(params, average, velocity, batch, names=("w", "v")):
        w, v = (params[name] for name in names)
        gradient = {names[0]: (batch["x"] @ v).T, names[1]: (w @ batch["x"]).T}
        velocity = {name: 0.9 * velocity[name] + gradient[name] for name in params}
        params = {name: params[name] - 0.1 * velocity[name] for name in params}
        return params, {name: 0.5 * (average[name] + params[name]) for name in params}, velocity

    def before(state, batch):
        return Before(*update(state.params, state.average, state.velocity, batch)), {"loss": batch["x"].sum()}

    def after(state, batch, names=("w", "v")):
        found = update(state.params, state.parts["b"], state.parts["a"], batch, names)
        return After({"a": found[2], "b": found[1]}, found[0]), {"loss": batch["x"].sum()}

    def exchanged(state, batch):
        return after(state, batch, ("v", "w"))

    def crossed(state, batch):
        new, metrics = after(state, batch)
        return After({"a": new.parts["b"], "b": new.parts["a"]}, new.params), metrics

    weights = {"w": np.ones((2, 2), np.float32), "v": np.ones((2, 2), np.float32)}
    batch = {"x": np.ones((2, 2), np.float32)}
    old, new = Before(weights, weights, weights), After({"a": weights, "b": weights}, weights)

    def found(function, state, donated=(0,)):
        return canonical.hash_traced(jax.jit(function, donate_argnums=donated).trace(state, batch))

    assert found(before, old) == found(after, new)
    others = [found(exchanged, new), found(crossed, new), found(after, new, donated=())]
    assert len({found(after, new), *others}) == 4
