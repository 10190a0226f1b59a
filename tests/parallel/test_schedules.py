"""Every schedule's table does the work: played through symbol by symbol, it computes each unit once, on what the unit needs."""

import itertools
from collections import Counter

import pytest

from panax.core.errors import RecipeError
from panax.parallel.schedules import Pipeline, PipelineSchedule, build_schedule, layers_by_stage, schedule_table

PIPELINES = [
    Pipeline(),
    Pipeline(schedule="gpipe"),
    Pipeline(schedule="interleaved", chunks=2),
    Pipeline(schedule="interleaved", chunks=3),
]
GRID = [(p, s, m) for p, s, m in itertools.product(PIPELINES, (1, 2, 3, 4, 8), (1, 2, 3, 4, 7, 8, 16))]


def name_of(value) -> str:
    return f"{value.schedule}{value.chunks}" if isinstance(value, Pipeline) else str(value)


class Played:
    """The executor's work on symbols: ("input", m, k) goes into virtual stage k, ("gradient", m, k) is of what comes out of it.

    Whatever a stage computes for nothing, and whatever comes from a stage that did nothing, is "garbage".
    """

    def __init__(self, schedule: PipelineSchedule):
        self.schedule = schedule
        stages = range(schedule.stages)
        self.inputs = [["garbage"] * (schedule.slots + 1) for _ in stages]
        self.gradients = [["garbage"] * (schedule.gradient_slots + 1) for _ in stages]
        self.forwards: Counter = Counter()
        self.backwards: Counter = Counter()
        self.losses: Counter = Counter()
        self.embedded: Counter = Counter()
        for tick, rows in enumerate(schedule.rows):
            self.play(tick, rows)

    def virtual(self, stage: int, chunk: int) -> int:
        return chunk * self.schedule.stages + stage

    def play(self, tick: int, rows) -> None:
        stages, last = self.schedule.stages, self.schedule.stages * self.schedule.chunks - 1
        sent, returned = ["garbage"] * stages, ["garbage"] * stages
        for stage, row in enumerate(rows):
            where = f"tick {tick}, stage {stage}"
            if row["forward"]:
                m, k = row["forward_micro_batch"], self.virtual(stage, row["forward_chunk"])
                if row["forward_first"]:
                    assert k == 0, where
                    self.inputs[stage][row["forward_slot"]] = ("input", m, 0)
                assert self.inputs[stage][row["forward_slot"]] == ("input", m, k), where
                self.forwards[m, k] += 1
                sent[stage] = ("input", m, k + 1)
            else:
                # An idle forward writes its input back where nobody looks.
                assert row["forward_slot"] == self.schedule.slots and not row["forward_first"], where
        losses = {(row["loss"], row["loss_micro_batch"]) for row in rows}
        assert len(losses) == 1, f"tick {tick}: all stages do a share of one loss"
        ((lost, m),) = losses
        for stage, row in enumerate(rows):
            if lost and stage == stages - 1:
                assert sent[stage] == ("input", m, last + 1), f"tick {tick}: the loss is of what has just come out"
                self.losses[m] += 1
                self.gradients[stage][row["loss_slot"]] = ("gradient", m, last)
            elif lost:
                self.gradients[stage][row["loss_slot"]] = "garbage"
        for stage, row in enumerate(rows):
            if not row["backward"]:
                continue
            where = f"tick {tick}, stage {stage}"
            m, k = row["backward_micro_batch"], self.virtual(stage, row["backward_chunk"])
            assert self.forwards[m, k] == 1, where
            assert self.inputs[stage][row["backward_slot"]] == ("input", m, k), where
            assert self.gradients[stage][row["backward_gradient_slot"]] == ("gradient", m, k), where
            self.backwards[m, k] += 1
            returned[stage] = ("gradient", m, k - 1)
            if row["backward_first"]:
                assert k == 0, where
                self.embedded[m] += 1
        for stage, row in enumerate(rows):
            self.inputs[stage][row["arrival_slot"]] = sent[(stage - 1) % stages]
            self.gradients[stage][row["gradient_arrival_slot"]] = returned[(stage + 1) % stages]


@pytest.mark.parametrize("pipeline, stages, micro_batches", GRID, ids=name_of)
def test_every_unit_runs_once_each_way_on_its_own_input(pipeline, stages, micro_batches):
    schedule = build_schedule(pipeline, stages=stages, micro_batches=micro_batches)
    played = Played(schedule)
    units = dict.fromkeys(itertools.product(range(micro_batches), range(stages * pipeline.chunks)), 1)
    assert played.forwards == units and played.backwards == units
    assert played.losses == played.embedded == dict.fromkeys(range(micro_batches), 1)
    assert sum(ticks for _, _, ticks in schedule.phases) == len(schedule.rows) == len(schedule.ticks)


@pytest.mark.parametrize("pipeline, stages, micro_batches", GRID, ids=name_of)
def test_an_evaluation_goes_forward_only(pipeline, stages, micro_batches):
    schedule = build_schedule(pipeline, stages=stages, micro_batches=micro_batches, forward_only=True)
    played = Played(schedule)
    assert played.forwards == dict.fromkeys(itertools.product(range(micro_batches), range(stages * pipeline.chunks)), 1)
    assert played.losses == dict.fromkeys(range(micro_batches), 1)
    assert not played.backwards and schedule.gradient_slots == 0


def test_the_player_sees_a_wrong_table():
    """A slot that two live inputs share, and a unit that runs before its input is there."""
    schedule = build_schedule(Pipeline(), stages=2, micro_batches=4)
    crowded = [tuple({**row, "arrival_slot": 0 * row["arrival_slot"]} for row in rows) for rows in schedule.rows]
    early = [schedule.rows[1], schedule.rows[0], *schedule.rows[2:]]
    for rows in (crowded, early):
        with pytest.raises(AssertionError):
            Played(PipelineSchedule(2, 1, 4, schedule.ticks, schedule.slots, schedule.gradient_slots, tuple(rows)))


@pytest.mark.parametrize("pipeline", PIPELINES, ids=name_of)
@pytest.mark.parametrize("stages, rounds", [(s, r) for s in (2, 4, 8) for r in (1, 2, 5)])
def test_the_bubble_is_the_published_one(pipeline, stages, rounds):
    count = rounds * stages
    schedule = build_schedule(pipeline, stages=stages, micro_batches=count)
    published = (stages - 1) / (count * pipeline.chunks + stages - 1)
    assert schedule.bubble() == pytest.approx(published, rel=1e-12)
    # However much a backward pass costs: no tick mixes stages that wait with stages that need not.
    assert schedule.bubble(forward=1.0, backward=2.0) == pytest.approx(published, rel=1e-12)


def test_one_stage_never_waits():
    assert build_schedule(Pipeline(), stages=1, micro_batches=5).bubble() == 0.0


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_only_gpipe_keeps_more_for_more_micro_batches(stages):
    def kept(pipeline: Pipeline) -> list[int]:
        return [build_schedule(pipeline, stages=stages, micro_batches=n * stages).slots for n in (3, 4, 8)]

    assert kept(Pipeline()) == [2 * stages - 1] * 3
    assert kept(Pipeline(schedule="gpipe")) == [n * stages for n in (3, 4, 8)]
    for chunks in (2, 3):
        # Of layers that are `chunks` times fewer.
        interleaved = Pipeline(schedule="interleaved", chunks=chunks)
        assert kept(interleaved) == [(chunks + 1) * stages - 1] * 3


@pytest.mark.parametrize(
    "layers, stages, chunks", [(126, 16, 1), (7, 2, 2), (8, 4, 2), (80, 8, 4), (5, 5, 1), (61, 4, 3)]
)
def test_layers_are_dealt_out_in_order_and_evenly(layers, stages, chunks):
    held = layers_by_stage(layers, stages=stages, chunks=chunks)
    parts = [held[stage][chunk] for chunk in range(chunks) for stage in range(stages)]
    assert [layer for part in parts for layer in part] == list(range(layers))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 1 and sizes == sorted(sizes, reverse=True)


def test_too_few_layers_name_what_would_fit():
    with pytest.raises(
        RecipeError, match=r"6 layers are fewer than stage=8 x chunks=1 = 8 .*mesh\.stage in \{1, .*6\}$"
    ):
        layers_by_stage(6, stages=8, chunks=1)
    with pytest.raises(RecipeError, match=r"mesh\.stage in \{1, 2, 3\} with 2 chunks, or fewer chunks"):
        layers_by_stage(6, stages=4, chunks=2)


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"chunks": 0}, "chunks=0; expected 1 or more"),
        ({"chunks": 2}, "schedule='1f1b' with chunks=2; interleaved takes 2 or more"),
        ({"schedule": "interleaved"}, "schedule='interleaved' with chunks=1"),
        ({"schedule": "gpipe", "chunks": 2}, "schedule='gpipe' with chunks=2"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, says):
    with pytest.raises(RecipeError, match=says):
        Pipeline(**settings)


def test_the_table_for_documents_has_the_executors_numbers():
    _, _, *rows = schedule_table(4, 16, 2).splitlines()
    cells = {row.split(" | ")[0].strip("| "): row.strip("| ").split(" | ")[1:] for row in rows}
    assert cells["gpipe"] == ["38 (19, 0, 19)", "15.8%", "16", "1/4"]
    assert cells["1f1b"] == ["22 (3, 16, 3)", "15.8%", "7", "1/4"]
    assert cells["interleaved, 2 chunks"][1] == "8.6%"
