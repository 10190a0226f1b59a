"""muP: changes of a wider decoder to a narrower one's settings, and that its outputs then move as much."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from panax.core import RecipeError, named_leaves
from panax.layers import Context
from panax.mesh import MeshShape, Placement
from panax.models import BaseWidth, DecoderConfig, DecoderTask, HybridConfig, compute_logits
from panax.optim import AdamW, Muon, Schedule, ShardedOptimizer
from panax.train import CompiledStep, Program, StepConfig

ADAMW = AdamW(schedule=Schedule(peak=0.01, decay="constant"), weight_decay=0.1)
BASE = BaseWidth(embed=32, heads=2, ffn=64)


def task(width=1, base=None, **model):
    sizes = {"embed": 32 * width, "heads": 2 * width, "ffn": 64 * width, "tied": False} | model
    config = DecoderConfig(vocab_size=96, max_length=32, num_layers=2, **sizes)
    return DecoderTask(model=config, base=base)


def made(task, optimizer: ShardedOptimizer = ADAMW, **options):
    return Program.create(task, optimizer, num_steps=10, config=StepConfig(clip_norm=None), **options)


def test_rates_fall_with_what_goes_in_and_the_head_begins_smaller():
    program = made(task(4, BASE))
    assert program.widths is not None
    block = "stacks.0.blocks.0"
    hidden = [f"{block}.attention.w_{x}" for x in "qkvo"] + [
        f"{block}.feed_forward.w_{x}" for x in ("gate", "up", "down")
    ]
    assert program.widths.rates == dict.fromkeys([*hidden, "head.table"], 0.25)
    assert program.widths.scales == {"head.table": 0.5}
    assert program.optimizer.lr_multipliers == program.widths.rates
    assert program.optimizer.decay_multipliers == dict.fromkeys(program.widths.rates, 4.0)
    assert [line.partition(":")[0] for line in program.widths.describe()] == [
        "muP  rate x 0.25", "muP  rate x 0.25, begun x 0.5",
    ]  # fmt: skip
    plain = made(task(4))
    first, usual = (named_leaves(each.initial_state(jax.random.key(0)).params) for each in (program, plain))
    for name, leaf in usual.items():
        np.testing.assert_array_equal(first[name], leaf * (0.5 if name == "head.table" else 1.0), err_msg=name)
    frozen = made(task(4, BASE), frozen=("head",))
    assert "head.table" not in frozen.optimizer.lr_multipliers


def learnt(task):
    """(how much logits change in four small steps on one batch, in the mean; the loss before the last)"""
    program = made(task, AdamW(schedule=Schedule(peak=5e-4, decay="constant")))
    step = CompiledStep(program, Placement.create(MeshShape(), devices=jax.devices()[:1]), tiny.AXES)
    batch = {name: jnp.asarray(leaf) for name, leaf in tiny.batch(0).items()}

    @jax.jit
    def logits(state):
        context = Context(position=batch["position"], segment=batch["segment"])
        hidden, _ = state.params(batch["tokens"], context, dtype="float32")
        return compute_logits(state.params, hidden)

    state = step.init(0)
    before = logits(state)
    for _ in range(4):
        state, scalars = step(state, step.put(tiny.batch(0)))
    return float(abs(logits(state) - before).mean()), float(scalars["loss"])


@pytest.mark.slow
def test_outputs_of_a_wide_model_move_no_more_than_the_narrow_one_s_and_it_learns_as_fast():
    (narrow, loss), (wide, wide_loss), (plain, _) = learnt(task(1)), learnt(task(8, BASE)), learnt(task(8))
    assert wide < 1.1 * narrow < 2 * narrow < plain
    assert wide_loss < loss


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: task(1, BASE), r"task.base has the model's widths, so it changes nothing"),
        (lambda: task(2, BaseWidth(embed=-1)), r"task.base.embed=-1; expected a width"),
        (lambda: task(2, BASE, tied=True), r"embedding and head has two rules; set task.model.tied to False"),
        (lambda: task(2, BASE, embed_scale=True), r"task.model.embed_scale grows embeddings"),
        (lambda: task(2, BaseWidth(embed=32, ffn=64)), r"heads grow from 8 to 16, .* set task.model.query_scale to 32"),
        (lambda: made(task(2, BASE, kv_heads=1)), r"attention.w_k the input grows by 2 and the output"),
        (lambda: made(task(2, BASE), Muon()), r"none for Muon; use AdamW"),
        (
            lambda: made(task(2, BASE), dataclasses.replace(ADAMW, lr_multipliers={"head": 2.0})),
            r"optimizer.lr_multipliers and task.base both",
        ),
        (lambda: task(2, BaseWidth(heads=3)), r"not divisible by heads=3"),
    ],
)  # fmt: skip
def test_what_mup_has_no_rule_for_is_refused(make, message):
    with pytest.raises(RecipeError, match=message):
        make()


def test_a_narrow_head_dim_asks_for_another_scale_of_scores():
    wide = task(2, BaseWidth(embed=32, heads=4, ffn=64), query_scale=256 / 8)
    assert wide.mup_base_task is not None and wide.mup_base_task.model.head_size == 8
    assert made(wide).widths is not None
    with pytest.raises(RecipeError, match=r"muP has no rule for"):
        DecoderTask(model=HybridConfig(tied=False), base=BaseWidth(embed=32))
