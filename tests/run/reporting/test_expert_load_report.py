"""A run of a mixture reports how its experts are loaded: in the log, in TensorBoard, on the console."""

import dataclasses
import io
import json
from pathlib import Path

import numpy as np
import pytest
import tiny_recipe
from rich.console import Console
from tensorboardX.proto import event_pb2

from panax import fit
from panax.core import HeatMap
from panax.layers import MoE
from panax.metrics import ConsoleTracker, heat_map
from panax.metrics.heat_map import encode_png
from panax.models import DecoderTask

pytestmark = pytest.mark.slow
LAYERS, EXPERTS, STEPS = (1, 3), 4, 12
OF_A_LAYER = ("load_min", "load_max", "max_violation", "load_entropy", "entropy", "router_z", "dropped")


class Starving(DecoderTask):
    """In the first mixture, experts 2 and 3 are never chosen."""

    def init(self, key):
        params, state = super().init(key)
        return params, {"router_bias": state["router_bias"].at[0, 2:].set(-1e3)}


def mixture(cache, folder):
    base = tiny_recipe.tiny()
    moe = MoE(experts=EXPERTS, active=2, ffn=32, every=2, capacity=1.0, selection_bias=True, bias_rate=0.0)
    model = dataclasses.replace(base.task.model, num_layers=4, windows=(0,), feed_forward=moe)
    return dataclasses.replace(
        base,
        task=Starving(model=model),
        data=dataclasses.replace(base.data, cache_dir=cache),
        directory=str(folder / "run"),
        num_steps=STEPS,
        log_every=2,
        evaluate=dataclasses.replace(base.evaluate, every=6),
    )


@pytest.fixture(scope="module")
def watched(cache, tmp_path_factory):
    """(experiment, messages, the console's text) of a run in two halves."""
    experiment = mixture(cache, tmp_path_factory.mktemp("mixture"))
    said: list[str] = []
    text = io.StringIO()
    tracker = ConsoleTracker(Console(file=text, width=200))
    first = fit(dataclasses.replace(experiment, num_steps=6), say=said.append, trackers=(tracker,))
    assert first.step == 6 and not any("going on" in line for line in said)
    second = fit(experiment, say=said.append)
    assert second.step == STEPS and any("resuming from step 6" in line for line in said)
    return experiment, said, text.getvalue()


def logged(experiment):
    lines = map(json.loads, (Path(experiment.folder) / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "train/loss" in line]


def events(experiment):
    for path in sorted((Path(experiment.folder) / "tensorboard" / "train").glob("events.*")):
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            event = event_pb2.Event.FromString(data[12 : 12 + length])
            yield from ((event.step, value) for value in event.summary.value)
            data = data[12 + length + 4 :]


def test_every_record_has_every_figure_of_every_mixture(watched):
    records = logged(watched[0])
    assert [record["step"] for record in records] == [2, 4, 6, 8, 10, 12]
    expected = {f"experts/{name}" for name in OF_A_LAYER}
    expected |= {f"experts/layer_{layer}/{name}" for layer in LAYERS for name in OF_A_LAYER}
    for record in records:
        assert {name for name in record if name.startswith("experts/")} == expected
        for layer in LAYERS:
            of = {name: record[f"experts/layer_{layer}/{name}"] for name in OF_A_LAYER}
            assert 0 <= of["load_min"] <= 1 <= of["load_max"] <= EXPERTS
            assert of["max_violation"] == pytest.approx(of["load_max"] - 1)
            assert 0 < of["load_entropy"] <= 1 and 0 < of["entropy"] <= np.log(EXPERTS) and of["router_z"] > 0
            # A capacity of 1 holds all tokens of an even load only.
            assert 0 < of["dropped"] < 1
        # Half of layer 1's experts take everything.
        assert record["experts/layer_1/load_min"] == 0
        assert record["experts/layer_1/load_entropy"] == pytest.approx(0.5, abs=0.05)
        assert record["experts/layer_1/dropped"] >= 0.4
        assert record["experts/load_min"] == min(record[f"experts/layer_{layer}/load_min"] for layer in LAYERS)
        assert record["experts/load_max"] == max(record[f"experts/layer_{layer}/load_max"] for layer in LAYERS)


def test_tensorboard_has_the_same_figures(watched):
    shown: dict[int, dict[str, float]] = {}
    for step, value in events(watched[0]):
        if value.tag.startswith("7 experts/") and value.WhichOneof("value") == "simple_value":
            shown.setdefault(step, {})[value.tag.removeprefix("7 ")] = value.simple_value
    for record in logged(watched[0]):
        expected = {name: value for name, value in record.items() if name.startswith("experts/")}
        assert shown[record["step"]] == pytest.approx(expected, rel=1e-6)


def test_tensorboard_has_the_heat_map_as_a_picture(watched):
    pictures = {step: value.image for step, value in events(watched[0]) if value.HasField("image")}
    # The first and the last record of each half.
    assert list(pictures) == [2, 6, 8, 12]
    height, width, _ = heat_map(HeatMap(np.ones((len(LAYERS), EXPERTS)), LAYERS, "layer", "expert")).shape
    blank = encode_png(np.zeros((height, width, 3), np.uint8))
    for image in pictures.values():
        assert (image.height, image.width, image.colorspace) == (height, width, 3)
        assert image.encoded_image_string[:33] == blank[:33], "header of the picture"
        assert len(image.encoded_image_string) > len(blank)


def test_the_console_shows_the_range_of_loads(watched):
    first = logged(watched[0])[0]
    # Of what 80 columns can't show, what is least urgent is left out.
    assert f"{first['experts/dropped']:.1%} dropped" in watched[2]


def test_experts_that_starve_are_warned_of_once_in_each_run(watched):
    """Three reports, of two steps each, are the first half and the second."""
    first, second = [line for line in watched[1] if "experts" in line]
    told = "layer 1: of 4 experts, 2, 3 got less than 1% of the mean load in 3 reports of 2 steps each"
    assert first.startswith(f"warning: step 6: {told}")
    assert second.startswith(f"warning: step 12: {told}")
