"""Trains the tiny decoder and a mixture on one mesh of many simulated devices, and compares it with one device; see its test."""

import dataclasses
import json
import os
import sys

sizes = json.loads(sys.argv[1])
count = 1
for size in sizes.values():
    count *= size
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={count}"

import jax  # noqa: E402
import tiny  # noqa: E402

from panax.layers import MoE  # noqa: E402
from panax.models import DecoderTask  # noqa: E402
from panax.testing import check_task  # noqa: E402

assert len(jax.devices()) == count
MIXTURE = MoE(experts=8, active=2, ffn=24, every=3, balance=0.0)
model = dataclasses.replace(tiny.CONFIG, num_layers=4, feed_forward=MIXTURE if "expert" in sizes else None)
rows = 2 * count // (sizes["context"] * sizes["tensor"])
print(check_task(DecoderTask(model=model), tiny.batch(rows=rows), layouts=[sizes]))
