"""Illegal layouts are refused before anything is traced or compiled, with the numbers and the nearest meshes that are legal."""

import dataclasses
import math
import re
import subprocess
import sys
import time

import jax
import pytest
import tiny
import tiny_recipe

from panax.cli.main import main
from panax.core import LayoutError
from panax.core.layout.requirements import PipelineRequirement
from panax.layers.attention.attention import ulysses_requirement
from panax.mesh import MESH_AXES, MeshShape, Placement, Rules
from panax.mesh.legality import (
    MeshRequirements,
    check,
    find_problem,
    list_remarks,
    neighboring_meshes,
    resolve_mesh,
    suggest_meshes,
)
from panax.mesh.rules import COMPUTE, STORAGE
from panax.models import DecoderTask
from panax.parallel import Pipeline
from panax.train import CompiledStep, Program, StepConfig

NEEDS = MeshRequirements(
    arrays=(
        ("table", ("vocab", "embed"), (128, 48)),
        ("w_q", ("layer", "embed", "heads", "head_dim"), (6, 48, 12, 8)),
        ("w_k", ("layer", "embed", "kv_heads", "head_dim"), (6, 48, 2, 8)),
        ("w_up", ("layer", "embed", "ffn"), (6, 48, 96)),
    ),
    pipeline_requirement=PipelineRequirement(6, 1, 6),
    splits_residual=True,
)


def mesh(**sizes) -> dict[str, int]:
    return dict.fromkeys(MESH_AXES, 1) | sizes


def batch(rows: int, length: int):
    return (("batch leaf 'tokens'", ("batch", "seq"), (rows, length)),)


def refusal(needs: MeshRequirements, rules: Rules | None = None, **sizes) -> str:
    with pytest.raises(LayoutError) as error:
        check(needs, rules or Rules(), mesh(**sizes))
    return str(error.value)


def meshes_of(message: str) -> list[dict[str, int]]:
    """The meshes that a message lists, as its flags would be read."""
    listed = message[message.index("Nearest layouts") :].partition(": ")[2].split("; ")
    flags = [re.findall(r"--mesh\.(\w+) (\d+)", text) for text in listed]
    assert all(flags), message
    return [mesh(**{axis: int(size) for axis, size in pairs}) for pairs in flags]


ILLEGAL = {
    "heads": (NEEDS, {"tensor": 8}, r"w_q: heads=12 is not divisible by tensor=8; use tensor in \{1, 2, 3, 4, 6, 12\}"),
    "ffn": (
        dataclasses.replace(NEEDS, arrays=(("w_up", ("embed", "ffn"), (64, 90)),)),
        {"tensor": 4},
        r"w_up: ffn=90 is not divisible by tensor=4; use tensor in \{1, 2, 3, 5, 6, 9",
    ),
    "vocab": (
        dataclasses.replace(NEEDS, arrays=(("table", ("vocab", "embed"), (100, 64)),)),
        {"tensor": 8},
        "table: vocab=100 is not divisible by tensor=8; use tensor in {1, 2, 4, 5, 10",
    ),
    "embed": (NEEDS, {"fsdp": 16, "expert": 2}, "table: embed=48 is not divisible by fsdp=16·expert=2"),
    "rows": (
        dataclasses.replace(NEEDS, batch=batch(24, 64), micro_batches=2),
        {"replica": 2, "fsdp": 4},
        "a batch of 24 rows is not divisible by 8 data-parallel devices x 2 micro-batches; use a multiple of 16 rows",
    ),
    "zigzag": (
        dataclasses.replace(NEEDS, batch=batch(16, 36)),
        {"context": 2, "tensor": 4},
        "rows of 36 tokens are not divisible by 2 x context=2 x tensor=4, the pieces that a row is cut into; use a length "
        "of 32 or 48",
    ),
    "contiguous": (
        dataclasses.replace(NEEDS, batch=batch(16, 36), row_order="contiguous"),
        {"context": 2, "tensor": 4},
        "rows of 36 tokens are not divisible by context=2 x tensor=4, the pieces that a row is cut into; use a length "
        "of 32 or 40",
    ),
    "tensor length": (
        dataclasses.replace(NEEDS, batch=batch(16, 3)),
        {"tensor": 4},
        "rows of 3 tokens are not divisible by tensor=4, the pieces that a row is cut into; use a length of 4",
    ),
    "stages": (NEEDS, {"stage": 8}, "mesh.stage=8 is more than the 6 layers; use stage up to 6"),
    "chunks": (
        dataclasses.replace(NEEDS, pipeline_requirement=PipelineRequirement(6, 2, 6)),
        {"stage": 4},
        "mesh.stage=4 x pipeline.chunks=2 = 8 is more than the 6 layers; use stage up to 3, or chunks up to 1",
    ),
    "ulysses": (
        dataclasses.replace(NEEDS, exchange_requirements=(ulysses_requirement(12),)),
        {"context": 4, "tensor": 2},
        "heads=12 / tensor=2 = 6 on each device is not divisible by context=4; use context in {1, 2, 3, 6}, or",
    ),
    "axis": (
        dataclasses.replace(NEEDS, supported=frozenset({"fsdp"}), who="Foreign"),
        {"tensor": 4},
        "mesh.tensor=4: Foreign supports the mesh axes fsdp; set mesh.tensor to 1",
    ),
}


@pytest.mark.parametrize("case", ILLEGAL)
def test_a_refusal_has_the_numbers_and_legal_meshes_of_the_same_devices(case):
    needs, sizes, says = ILLEGAL[case]
    message = refusal(needs, **sizes)
    assert re.search(says if "\\" in says else re.escape(says), message), message
    found = meshes_of(message)
    assert 1 <= len(found) <= 3
    for other in found:
        assert math.prod(other.values()) == math.prod(sizes.values())
        assert find_problem(needs, Rules(), other) is None


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor": 4, "fsdp": 2},  # two key-value heads are replicated
        {"stage": 4},  # six layers in uneven stages
        {"stage": 2, "fsdp": 8},
        {"stage": 2, "fsdp": 16},  # what no stage holds is replicated over them
        {"context": 4, "tensor": 4},
    ],
)
def test_what_can_be_laid_out_otherwise_is_legal(sizes):
    assert find_problem(NEEDS, Rules(), mesh(**sizes)) is None


def test_uneven_stages_of_a_published_model_are_legal():
    needs = MeshRequirements(
        arrays=(("w_up", ("layer", "embed", "ffn"), (126, 16384, 53248)),),
        pipeline_requirement=PipelineRequirement(126, 1, 126),
    )
    assert find_problem(needs, Rules(), mesh(stage=16, fsdp=128, tensor=8)) is None


def test_rules_that_collide_are_refused():
    with pytest.raises(LayoutError, match=r"rules\.storage: embed -> \('fsdp', 'fsdp'\) names a mesh axis twice"):
        Rules(storage={"embed": ("fsdp", "fsdp")})
    both = Rules(storage={"heads": ("tensor",), "ffn": ("tensor",)}, compute={})
    needs = MeshRequirements(arrays=(("w", ("heads", "ffn"), (8, 8)),))
    assert "w: its dimensions 'heads' and 'ffn' are both mapped to mesh axis 'tensor'" in refusal(needs, both, tensor=2)
    with pytest.raises(LayoutError, match=r"heads -> \('fsdp',\) must begin with its compute axes"):
        Rules(storage={"heads": ("fsdp",)}, compute={"heads": ("tensor",)})
    split = Rules(compute={"vocab": ("tensor", "context")}, storage={})
    assert "vocab is split over tensor=2·context=2; the loss" in refusal(NEEDS, split, tensor=2, context=2)


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        # A vocabulary that is whole beside a split residual stream once doubled the gradients, without a word.
        ({"vocab": ()}, r"vocab is split over \(\), and residual over \('tensor',\) beyond seq"),
        ({"ffn": ()}, r"ffn is split over \(\), and residual over \('tensor',\)"),
        ({"heads": ()}, r"heads is split over \(\), and residual over \('tensor',\)"),
        ({"embed": ("context",)}, r"embed -> \('context',\), and the task computes embed whole"),
        ({"head_dim": ("context",)}, r"head_dim -> \('context',\), and the task computes head_dim whole"),
        ({"residual": ("fsdp", "tensor")}, r"residual -> \('fsdp', 'tensor'\), .* further ones that split no batch"),
        ({"residual": ("tensor",)}, r"seq -> \('context',\) .* residual takes seq's axes and further ones"),
    ],
)
def test_rules_that_no_layer_computes_are_refused(compute: dict, message: str):
    storage = {name: (*axes, *(a for a in STORAGE.get(name, ()) if a not in axes)) for name, axes in compute.items()}
    storage = {name: axes for name, axes in storage.items() if name != "residual"}
    rules = Rules(storage={**STORAGE, **storage}, compute={**COMPUTE, **compute})
    assert re.search(message, refusal(NEEDS, rules, fsdp=2, context=2, tensor=2))
    assert find_problem(NEEDS, rules, mesh(replica=8)) is None


def test_what_is_computed_split_must_rest_split():
    rules = Rules(storage={**STORAGE, "kv_heads": ()})
    assert "kv_heads is stored whole, and rules.compute has kv_heads -> ('tensor',)" in refusal(NEEDS, rules, tensor=2)
    assert find_problem(NEEDS, rules, mesh(fsdp=8)) is None


def test_the_nearest_mesh_changes_least():
    assert meshes_of(refusal(NEEDS, tensor=8))[0] == mesh(fsdp=2, tensor=4)
    assert meshes_of(refusal(NEEDS, tensor=8, replica=2))[0] == mesh(replica=2, fsdp=2, tensor=4)
    nearest = meshes_of(refusal(dataclasses.replace(NEEDS, batch=batch(4, 64)), fsdp=8, tensor=2))
    assert nearest[0] == mesh(fsdp=4, tensor=4)
    first = [other for other, _ in zip(neighboring_meshes(mesh(fsdp=4, tensor=2), 8), range(2))]
    assert first == [mesh(fsdp=4, tensor=2), mesh(replica=2, fsdp=2, tensor=2)]


def test_fewer_devices_are_proposed_where_all_of_them_fit_nothing():
    needs = dataclasses.replace(NEEDS, batch=batch(3, 15), pipeline_requirement=PipelineRequirement(1, 1, 1))
    message = refusal(needs, fsdp=8)
    assert "Nearest layouts of 1 device (of 8, none is legal): --mesh.fsdp 1" in message


def test_a_mesh_that_is_no_mesh_of_the_devices_names_those_nearest():
    with pytest.raises(
        LayoutError, match=r"needs a multiple of 3 devices, there are 8.*Nearest layouts of 8 devices: --m"
    ):
        resolve_mesh(MeshShape(tensor=3), 8)
    with pytest.raises(LayoutError, match="has 16 devices, there are 8") as error:
        resolve_mesh(MeshShape(fsdp=4, tensor=4), 8)
    assert meshes_of(str(error.value)) == [mesh(fsdp=2, tensor=4), mesh(replica=2, tensor=4), mesh(fsdp=4, tensor=2)]
    with pytest.raises(LayoutError, match="there are 8") as error:
        resolve_mesh(MeshShape(tensor=5), 8, dataclasses.replace(NEEDS, batch=batch(4, 64)))
    assert meshes_of(str(error.value))[0] == mesh(fsdp=2, tensor=4)
    with pytest.raises(LayoutError, match=r"fsdp=0; expected a positive number, or -1 for all devices left$"):
        resolve_mesh(MeshShape(fsdp=0), 8)


def test_a_pipeline_that_waits_is_remarked_upon():
    needs = dataclasses.replace(NEEDS, micro_batches=2)
    assert list_remarks(needs, mesh(stage=2)) == []
    (remark,) = list_remarks(needs, mesh(stage=4))
    assert remark.startswith(
        "mesh.stage=4 with step.micro_batches=2: each stage waits for 60% of a step; use 4 micro-batches"
    )


def test_thousands_of_devices_take_no_time():
    needs = dataclasses.replace(NEEDS, batch=batch(7, 64))
    start = time.process_time()
    assert "of 4096, none is legal" in suggest_meshes(needs, Rules(), mesh(fsdp=4096), 4096)
    assert time.process_time() - start < 20


def test_no_jax_is_needed():
    code = (
        "import sys\n"
        "from panax.mesh.legality import MeshRequirements, find_problem\n"
        "from panax.mesh.rules import Rules\n"
        "needs = MeshRequirements(arrays=(('w', ('heads',), (12,)),))\n"
        "assert 'heads=12' in find_problem(needs, Rules(), {'tensor': 8})\n"
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def untraced(task: DecoderTask, sizes, micro_batches: int = 1) -> CompiledStep:
    program = Program.create(task, tiny.ADAMW, num_steps=10, config=StepConfig(micro_batches=micro_batches))
    placement = Placement.create(MeshShape(**mesh(**sizes)), devices=jax.devices()[: math.prod(sizes.values())])
    return CompiledStep(program, placement, tiny.AXES)


@pytest.fixture
def nothing_compiles(monkeypatch):
    """Fail whatever is traced by the step, lowered or compiled."""

    def fail(*_, **__):
        pytest.fail("something was traced")

    monkeypatch.setattr(Program, "step", fail)
    monkeypatch.setattr(Program, "evaluate", fail)
    monkeypatch.setattr(Program, "initial_state", fail)


@pytest.mark.parametrize(
    "task, sizes, says",
    [
        (
            tiny.task(),
            {"tensor": 8},
            r"w_q: heads=4 is not divisible by tensor=8.*Nearest layouts of 8 devices: --mesh.fsdp 2",
        ),
        (
            tiny.task(),
            {"stage": 4},
            r"mesh.stage=4 is more than the 3 layers; use stage up to 3. Nearest layouts of 4 devices",
        ),
        (
            tiny.task(pipeline=Pipeline(schedule="interleaved", chunks=2)),
            {"stage": 2},
            r"mesh.stage=2 x pipeline.chunks=2 = 4 is more than the 3 layers; use chunks up to 1. Nearest",
        ),
        (tiny.task(context_attention="ulysses"), {"context": 4, "tensor": 2}, r"heads=4 / tensor=2 = 2 on each device"),
    ],
)
def test_a_step_refuses_a_mesh_before_it_traces(task, sizes, says, nothing_compiles):
    with pytest.raises(LayoutError, match=says):
        untraced(task, sizes)


def test_a_step_refuses_a_batch_before_it_traces(nothing_compiles):
    step = untraced(tiny.task(), {"fsdp": 4}, micro_batches=3)
    with pytest.raises(LayoutError, match=r"10 rows is not divisible by 4 data-parallel devices x 1 micro-batches"):
        step.put(tiny.batch(rows=10))
    batch = step.put(tiny.batch())
    with pytest.raises(
        LayoutError, match=r"16 rows is not divisible by 4 data-parallel devices x 3 micro-batches"
    ) as error:
        step.lower(batch)
    assert "Nearest layouts" not in str(error.value)  # 16 rows are no multiple of 3 on any mesh
    step = untraced(tiny.task(), {"context": 4, "tensor": 2})
    with pytest.raises(LayoutError, match=r"rows of 24 tokens.*2 x context=4 x tensor=2.*use a length of 16 or 32"):
        step.put(tiny.batch(length=24))
    assert step.compile_seconds == 0.0


def test_a_pipeline_short_of_micro_batches_warns():
    step = untraced(tiny.task(), {"stage": 2}, micro_batches=1)
    with pytest.warns(
        UserWarning, match=r"mesh\.stage=2 with step\.micro_batches=1: each stage waits for 50% of a step"
    ):
        step.lower(step.put(tiny.batch()))


@pytest.mark.parametrize(
    "flags, says",
    [
        (("--mesh.tensor", "3"), "needs a multiple of 3 devices, there are 8; make the product"),
        (("--mesh.tensor", "4"), "w_q: heads=2 is not divisible by tensor=4; use tensor in {1, 2}"),
        (("--mesh.fsdp", "16"), "the mesh fsdp=16 has 16 devices, there are 8"),
        (("--data.batch-size", "6"), "a batch of 6 rows is not divisible by 8 data-parallel devices"),
    ],
)
def test_the_command_line_shows_one_message(flags, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PANAX_CACHE", str(tmp_path / "cache"))
    assert main(["train", tiny_recipe.__file__, *flags]) == 2
    message = capsys.readouterr().err.strip()
    assert message.startswith("panax: error: ") and message.count("panax: error") == 1
    assert says in message and "Traceback" not in message
    listed = message[message.index("Nearest layouts of 8 devices: ") :].partition(": ")[2].split("; ")
    assert 1 <= len(listed) <= 3
    # What it proposes can be typed as it stands.
    if "3" not in flags:
        assert main(["inspect", tiny_recipe.__file__, *flags, *listed[0].split(), "--no-compile"]) == 0
