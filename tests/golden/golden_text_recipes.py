"""Golden runs of the recipes of decoders and of vision, made small through their fields."""

import dataclasses
from pathlib import Path

import tiny_recipe
from rows import Row, rows_of_fit

from panax.run import EvaluateConfig
from panax_recipes.moe_dense import moe_dense
from panax_recipes.moe_quickstart import moe_quickstart
from panax_recipes.quickstart import quickstart
from panax_recipes.vit_digits import vit_digits

RECIPES = {"quickstart": quickstart, "moe_dense": moe_dense, "moe_quickstart": moe_quickstart, "vit_digits": vit_digits}
STEPS = 4


def small(name: str, folder: Path):
    recipe = RECIPES[name]()
    model = dataclasses.replace(recipe.task.model, embed=32, ffn=64, num_layers=2, heads=2)
    if getattr(model, "feed_forward", None) is not None:
        model = dataclasses.replace(model, feed_forward=dataclasses.replace(model.feed_forward, ffn=16, shared=32))
    data = dataclasses.replace(recipe.data, batch_size=32)
    if name != "vit_digits":
        # Two megabytes of text are tokenized in a second, the standard library in minutes.
        data = dataclasses.replace(tiny_recipe.tiny().data, cache_dir=str(folder / "cache"))
    # What "auto" stands for depends on the machine.
    dtype = "bfloat16" if recipe.task.compute_dtype == "auto" else recipe.task.compute_dtype
    schedule = dataclasses.replace(recipe.optimizer.schedule, warmup_steps=1)
    return dataclasses.replace(
        recipe,
        task=dataclasses.replace(recipe.task, model=model, compute_dtype=dtype),
        data=data,
        optimizer=dataclasses.replace(recipe.optimizer, schedule=schedule),
        num_steps=STEPS,
        hooks=(),
        evaluate=EvaluateConfig(every=0, batches=2),
        log_every=1,
        directory=str(folder / "run"),
    )


def run(name: str, folder: Path) -> list[Row]:
    return rows_of_fit(small(name, folder))
