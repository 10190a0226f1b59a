"""The recipe of the digits: that it runs, and (slowly) that it reaches its stated quality."""

import dataclasses
import json
from pathlib import Path

import pytest

import panax
from panax.optim import Schedule
from panax.run import EvaluateConfig
from panax.run.folder.description import deserialize_task, serialize_config
from panax_recipes.vit_digits import vit_digits


def shortened(tmp_path, **changes) -> panax.Experiment:
    recipe = vit_digits()
    data = dataclasses.replace(recipe.data, cache_dir=str(tmp_path / "cache"))
    return dataclasses.replace(recipe, data=data, directory=str(tmp_path / "run"), **changes)


def test_a_few_steps_are_reported_in_images(tmp_path):
    recipe = shortened(tmp_path, num_steps=4, log_every=2, evaluate=EvaluateConfig(every=0, batches=1))
    flat = dataclasses.replace(recipe.optimizer, schedule=Schedule(decay="constant", warmup_steps=0))
    model = dataclasses.replace(recipe.task.model, embed=16, num_layers=1, heads=2, ffn=32)
    result = panax.fit(
        dataclasses.replace(recipe, optimizer=flat, task=dataclasses.replace(recipe.task, model=model)), say=print
    )
    assert result.prepared.task.model.num_classes == 10
    assert result.evaluation["images"] == 128 and result.evaluation["ema_decay"] == recipe.step.ema_decay
    records = [json.loads(line) for line in Path(tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    last = next(record for record in reversed(records) if "speed/images_per_second" in record)
    flops = result.prepared.task.flops_per_example()
    assert last["speed/images_per_second"] > 0 and last["speed/mfu"] > 0 and flops > 0
    assert not any("tokens" in name for record in records for name in record)


def test_a_run_folder_gives_its_task_back():
    task = vit_digits().task
    assert deserialize_task(json.dumps(serialize_config(task)), "here") == task


@pytest.mark.slow
def test_it_is_as_good_as_stated(tmp_path):
    result = panax.fit(shortened(tmp_path), say=print)
    assert result.evaluation["accuracy"] >= 0.98
