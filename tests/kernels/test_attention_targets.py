"""Attention for GPUs and TPUs, from a machine that has neither: kernels interpreted, programs lowered, choices made."""

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import pytest
from attention_cases import CASES, assert_close, outputs_and_gradients, reference
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from panax.core import Target
from panax.kernels import AttentionCase, attention, choose
from panax.kernels.attention.gpu import GpuLaunch, gpu_attention
from panax.kernels.attention.tpu import TpuLaunch, tpu_attention
from panax.kernels.registry import _log_once, check_name, log_choice

CASE = AttentionCase(
    batch=8,
    query_seq=4096,
    key_seq=4096,
    heads=16,
    kv_heads=4,
    head_dim=128,
    dtype="bfloat16",
    causal=True,
    window=None,
    soft_cap=None,
    packed=False,
)


def with_(**changes) -> AttentionCase:
    return AttentionCase(**{**CASE.__dict__, **changes})


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gpu_kernels_equal_the_definition(case):
    launch = GpuLaunch(query=16, key=16, backward_query=16, backward_key=16, num_warps=4, interpret=True)
    attend = functools.partial(gpu_attention, launch=launch)
    assert_close(outputs_and_gradients(attend, case), reference(case))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tpu_kernels_equal_the_definition(case):
    # Blocks are at least 128 long: lengths that take three of them, and a window that skips one.
    longer = {"query_seq": 8 * case.query_seq, "key_seq": case.key_seq and 8 * case.key_seq}
    case = type(case)(**{**case.__dict__, **longer})
    attend = functools.partial(tpu_attention, launch=TpuLaunch(block=128, interpret=True))
    assert_close(outputs_and_gradients(attend, case), reference(case))


def test_kernels_in_bfloat16():
    case = CASES[3]
    gpu = dataclasses.replace(GpuLaunch.for_head_dim(head_dim=8, item_bytes=2), interpret=True)
    for kernel, launch in ((gpu_attention, gpu), (tpu_attention, TpuLaunch(interpret=True))):
        actual = outputs_and_gradients(functools.partial(kernel, launch=launch), case, jnp.bfloat16)
        assert_close(actual, reference(case, jnp.bfloat16), jnp.bfloat16)


@pytest.mark.parametrize(("platform", "call"), [("cuda", "__gpu$xla.gpu.triton"), ("tpu", "tpu_custom_call")])
@pytest.mark.parametrize("on_mesh", [False, True])
# From jax 0.12 on; see kernels/attention/gpu.py.
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_lowers_to_the_kernels_without_the_hardware(platform, call, on_mesh):
    def attend(q, k, v, segments):
        return attention(q, k, v, segments=segments, soft_cap=30.0, window=100, target=Target(platform))

    def loss(attend, q, k, v, segments):
        return attend(q, k, v, segments).astype(jnp.float32).sum()

    def calls(function, *arguments):
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,))
        return lowered.as_text().count(f"custom_call @{call}")

    shapes = [(8, 300, 4, 64), (8, 300, 2, 64), (8, 300, 2, 64), (8, 300)]
    dtypes = [jnp.bfloat16] * 3 + [jnp.int32]
    specs = (*(P("data", None, "tensor"),) * 3, P("data"))
    # From jax 0.12 on the GPU's lowering asks for its kind, which an abstract device answers.
    kind = {"cuda": "NVIDIA H100 80GB HBM3", "tpu": "TPU v5e"}[platform]
    device = AbstractDevice(device_kind=kind, num_cores=1, platform=platform)
    sizes, names = ((4, 2), ("data", "tensor")) if on_mesh else ((), ())
    mesh = AbstractMesh(sizes, names, axis_types=(AxisType.Explicit,) * len(sizes), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        if on_mesh:
            function = jax.shard_map(attend, in_specs=specs, out_specs=specs[0], check_vma=True)
            shardings = [NamedSharding(mesh, spec) for spec in specs]
        else:
            function, shardings = attend, [None] * 4
        arrays = [jax.ShapeDtypeStruct(s, d, sharding=on) for s, d, on in zip(shapes, dtypes, shardings)]
        assert calls(function, *arrays) == 1
        assert calls(jax.grad(lambda *a: loss(function, *a), (0, 1, 2)), *arrays) == 3


@pytest.mark.parametrize(
    ("changes", "platform", "name", "reason"),
    [
        ({}, "cpu", "blockwise", "fastest"),
        ({}, "cuda", "cudnn", "fastest"),
        ({"window": 128}, "gpu", "cudnn", "fastest"),
        ({"packed": True}, "gpu", "pallas", "packed segments"),
        ({"soft_cap": 30.0}, "gpu", "pallas", "soft_cap"),
        ({"dtype": "float32"}, "gpu", "pallas", "bfloat16 or float16"),
        ({"head_dim": 256}, "gpu", "pallas", "multiple of 8 up to 128"),
        ({"query_seq": 197, "key_seq": 197, "causal": False}, "gpu", "pallas", "even"),
        ({"window": 128, "causal": False}, "gpu", "pallas", "window must be causal"),
        ({"key_seq": 1024}, "gpu", "pallas", "equal lengths"),
        ({"dtype": "float64"}, "gpu", "blockwise", "16 or 32 bits"),
        ({"packed": True, "window": 5, "soft_cap": 1.0}, "tpu", "pallas", "fastest"),
        ({"dtype": "float16"}, "tpu", "blockwise", "bfloat16 or float32"),
        ({"head_dim": 512}, "tpu", "blockwise", "at most 256"),
    ],
)
def test_choice_is_a_function_of_the_case(changes, platform, name, reason):
    choice = choose("attention", with_(**changes), Target(platform), lacking={})
    assert choice.name == name
    assert reason in choice.reason


def test_without_cudnn_the_gpu_runs_our_kernels():
    choice = choose("attention", CASE, Target("gpu"), lacking={"cudnn": "it is not installed"})
    assert choice.name == "pallas"
    assert "not installed" in choice.reason


def test_reports_once_what_runs_and_why_nothing_faster(caplog):
    _log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="panax.kernels"):
        for changes in ({"packed": True}, {"packed": True, "batch": 9}, {}, {"dtype": "float64"}):
            log_choice(choose("attention", with_(**changes), Target("gpu"), lacking={}), Target("gpu"))
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO", "WARNING"]
    assert "runs 'pallas': cudnn can't run here: it has no packed segments" in caplog.messages[0]
    assert caplog.messages[1] == "attention on gpu runs 'cudnn': the fastest on gpu"
    assert "runs 'blockwise': cudnn can't run here" in caplog.messages[2]


def test_an_implementation_that_is_asked_for_names_its_limit():
    q = jnp.zeros((1, 8, 2, 8), jnp.bfloat16)
    for implementation, platform, options, limit in [
        ("cudnn", "tpu", {}, "it is for GPUs"),
        ("cudnn", "gpu", {"soft_cap": 1.0}, "it has no soft_cap"),
        ("pallas", "cpu", {}, "it is for GPUs and TPUs"),
    ]:
        with pytest.raises(ValueError, match=f"'{implementation}' can't do this attention: {limit}"):
            attention(q, q, q, target=Target(platform), implementation=implementation, **options)
    with pytest.raises(ValueError, match="did you mean 'blockwise'"):
        check_name("attention", "blokwise")
