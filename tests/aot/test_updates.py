"""What an update sends and computes: by its formula, in its trace, and in the program that is compiled for absent devices."""

import math

import pytest
from planned import plan, walk

from panax.optim import Adafactor, AdamW, Lamb, Muon, Shampoo
from panax.optim.matrix.roots import count_products
from panax.plan import count_collectives, summarize_collectives, traffic_totals
from panax.plan.step import disable_compilation_cache
from panax.plan.walk.walk import walk_renewal

MATRICES = {(4096, 4096): 2, (1024, 4096): 2, (4096, 14336): 3}
"""Of each layer of Llama 3 8B, rows before columns: queries and outputs, keys and values, the feed-forward's."""
LAYERS = 4
ITERATIONS, ITEM = 5, 2

MESHES = {
    "fsdp": ("h100x64", {"fsdp": 64}, 64),
    "hsdp": ("h100x64", {"replica": 8, "fsdp": 8}, 64),
    "fsdp-tensor": ("h100x64", {"fsdp": 8, "tensor": 8}, 64),
    "copies alone": ("h100x64", {"replica": 64}, 64),
    "replica-fsdp-tensor, 256": ("h100x256", {"replica": 4, "fsdp": 8, "tensor": 8}, 64),
}


def owners(mesh):
    """(that hold shards, that hold copies)"""
    copies = mesh.get("replica", 1)
    return math.prod(mesh.values()) // copies, copies


def muon_bytes(mesh):
    """What each device sends: to owners and back, over all that hold shards; and results to those that hold copies."""
    shards, copies = owners(mesh)
    sent = 0
    for (rows, columns), each in MATRICES.items():
        owned = math.ceil(each * LAYERS / (shards * copies))
        whole = owned * rows * columns * ITEM
        sent += 2 * whole * (shards - 1) // shards + whole * (copies - 1)
    return sent


def muon_flops(mesh):
    """Of a device that owns as many as any."""
    shards, copies = owners(mesh)
    return sum(
        math.ceil(each * LAYERS / (shards * copies)) * ITERATIONS * (4 * rows**2 * columns + 2 * rows**3)
        for (rows, columns), each in MATRICES.items()
    )


@pytest.mark.parametrize("name", ["fsdp", "hsdp", "replica-fsdp-tensor, 256"])
def test_muon_sends_and_computes_as_its_formulas_say(name):
    target, mesh, rows = MESHES[name]
    usual, cost = walk(target, mesh, rows).cost, walk(target, mesh, rows, optimizer=Muon()).cost
    sent = sum(one.wire_bytes for one in cost.traffic if one.purpose == "optimizer")
    assert sent == pytest.approx(muon_bytes(mesh), rel=1e-4)
    assert cost.work.flops - usual.work.flops == pytest.approx(muon_flops(mesh), rel=1e-6)
    assert cost.unknown == ()


def shampoo_bytes(mesh):
    """(in a step, in a renewal): arrays in float32, of which statistics and roots rest split over all that hold shards."""
    shards, copies = owners(mesh)
    step = renewal = 0
    for (rows, columns), each in MATRICES.items():
        owned = math.ceil(each * LAYERS / (shards * copies))
        matrix, side = owned * rows * columns * 4, owned * rows * columns * 4
        away = (shards - 1) / shards
        # There: the gradient, its mean, both sides' statistics and roots. Back: the direction and the statistics.
        step += 2 * matrix * away + 4 * side * away + (matrix + 2 * side) * (away + copies - 1)
        # Blocks are square, so either side has as many numbers as the matrix.
        renewal += 2 * side * away + 2 * side * (away + copies - 1)
    return step, renewal


def shampoo_flops(mesh, block):
    shards, copies = owners(mesh)
    step = renewal = 0
    for (rows, columns), each in MATRICES.items():
        owned = math.ceil(each * LAYERS / (shards * copies))
        blocks = rows * columns // block**2
        # Two statistics, and a root from either side.
        step += owned * blocks * 4 * 2 * block**3
        renewal += owned * blocks * 2 * count_products(4) * 2 * block**3
    return step, renewal


@pytest.mark.parametrize(
    "name", ["fsdp-tensor", *(pytest.param(n, marks=pytest.mark.slow) for n in ("hsdp", "replica-fsdp-tensor, 256"))]
)
def test_shampoo_sends_and_computes_as_its_formulas_say(name):
    target, mesh, rows = MESHES[name]
    usual, planned = walk(target, mesh, rows), walk(target, mesh, rows, optimizer=Shampoo(block=1024))
    cost, renewal = planned.cost, walk_renewal(planned.step)
    assert renewal is not None
    sent_bytes = [sum(one.wire_bytes for one in each.traffic if one.purpose == "optimizer") for each in (cost, renewal)]
    # Beside them two norms of each layer's own array.
    assert sent_bytes == pytest.approx(shampoo_bytes(mesh), rel=1e-4)
    beyond = cost.work.flops - usual.cost.work.flops, renewal.work.flops
    assert beyond == pytest.approx(shampoo_flops(mesh, 1024), rel=1e-6)
    assert cost.unknown == renewal.unknown == ()


@pytest.mark.parametrize("optimizer", [Lamb(), Adafactor()], ids=["lamb", "adafactor"])
def test_layerwise_optimizers_send_sums_alone(optimizer):
    target, mesh, rows = MESHES["fsdp-tensor"]
    cost = walk(target, mesh, rows, optimizer=optimizer).cost
    sent = sum(one.wire_bytes for one in cost.traffic if one.purpose == "optimizer")
    # Adafactor's rows and columns: of all parameters about 2e-4, in float32.
    assert 0 < sent < 2e6
    assert walk(target, mesh, rows, optimizer=AdamW()).cost.work.flops == cost.work.flops


def beyond(counted, before):
    """What a program sends that another one does not, in all."""
    return sum(sent - before.get(key, 0) for key, sent in counted.items())


def totals(collectives):
    return {(total.kind, total.axes): total.wire_bytes for total in summarize_collectives(collectives)}


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_the_compiled_program_sends_and_computes_what_was_counted(name):
    target, mesh, rows = MESHES[name]
    found, walked = plan(target, mesh, rows, optimizer=Muon())
    usual, before = plan(target, mesh, rows)
    assert beyond(totals(found.collectives), totals(usual.collectives)) == pytest.approx(muon_bytes(mesh), rel=0.02)
    traced = beyond(traffic_totals(walked.cost.traffic), traffic_totals(before.cost.traffic))
    assert traced == pytest.approx(muon_bytes(mesh), rel=1e-3)


@pytest.mark.slow
def test_shampoo_s_compiled_programs_send_what_was_counted():
    target, mesh, rows = MESHES["fsdp-tensor"]
    found, walked = plan(target, mesh, rows, optimizer=Shampoo(block=1024))
    usual, _ = plan(target, mesh, rows)
    with disable_compilation_cache():
        renewal = walked.step.trace_renewal().lower().compile()
    sent = beyond(totals(found.collectives), totals(usual.collectives))
    renewed = beyond(totals(count_collectives(renewal.as_text(), walked.step.placement.sizes)), {})
    assert (sent, renewed) == pytest.approx(shampoo_bytes(mesh), rel=0.02)
