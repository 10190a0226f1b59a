"""Memory that loading a released model takes beside its parameters: `python benchmarks/load_memory.py llama3_3b`.

Writes random bfloat16 weights of a preset in shards of 2 GB to a temporary folder, then loads them in a process of its own, which
samples its anonymous memory. Pages of the files, which the system takes back when it needs them, don't count. Reads /proc.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

GIB = 2**30


def write_release(preset: str, folder: Path) -> int:
    """Write random weights; return their bytes."""
    import jax
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    from panax.adapters.huggingface.family_choice import to_config_json
    from panax.adapters.huggingface.tensor_map import match_parameters
    from panax.models import PRESETS, DecoderTask

    task = DecoderTask(model=PRESETS[preset], parameter_dtype="bfloat16")
    params, state = jax.eval_shape(task.init, jax.random.key(0))
    family, raw = to_config_json(PRESETS[preset], None)
    shapes = {
        match.tensor(place): match.tensor_shape
        for match in match_parameters(family, params, state)
        for place in match.places
    }
    rng, shard, size, total, files = np.random.default_rng(0), {}, 0, 0, {}
    for number, (name, shape) in enumerate(shapes.items()):
        shard[name] = (rng.standard_normal(shape, np.float32) * 0.02).astype(ml_dtypes.bfloat16)
        size += shard[name].nbytes
        if size > 2e9 or number == len(shapes) - 1:
            file = f"model-{len(set(files.values())) + 1:05d}.safetensors"
            save_file(shard, folder / file)
            files |= dict.fromkeys(shard, file)
            total, shard, size = total + size, {}, 0
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (folder / "config.json").write_text(json.dumps(raw))
    return total


def anonymous_bytes() -> int:
    """Return the memory of this process that belongs to no file."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))


def load(preset: str, folder: Path, *, nf4: bool) -> dict[str, float]:
    """Load the weights, and return the memory before and at the highest, and the seconds."""
    import jax

    from panax.adapters.huggingface import load as load_weights
    from panax.models import PRESETS, DecoderTask, LoRA
    from panax.spmd.composite.low_rank import base_weights

    adapter = LoRA(rank=1, base="nf4") if nf4 else None
    task = DecoderTask(model=PRESETS[preset], parameter_dtype="bfloat16", adapter=adapter)
    params, state = jax.eval_shape(task.init, jax.random.key(0))
    highest, ended = [anonymous_bytes()], threading.Event()

    def sample() -> None:
        while not ended.wait(0.01):
            highest[0] = max(highest[0], anonymous_bytes())

    before, begin = anonymous_bytes(), time.monotonic()
    sampler = threading.Thread(target=sample)
    sampler.start()
    # Adapters are not in the files, and stay abstract.
    loaded = base_weights(load_weights(folder, task, params, state)[0])
    jax.block_until_ready(loaded)
    ended.set()
    sampler.join()
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(loaded))
    return {"before": before, "highest": highest[0], "parameters": held, "seconds": time.monotonic() - begin}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("preset")
    parser.add_argument("--nf4", action="store_true", help="quantize the layers' matrices to NF4, beside adapters")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:
        print(json.dumps(load(options.preset, options.folder, nf4=options.nf4)))
        return
    with tempfile.TemporaryDirectory() as folder:
        total = write_release(options.preset, Path(folder))
        command = [sys.executable, __file__, options.preset, "--folder", folder, *(["--nf4"] if options.nf4 else [])]
        done = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    gib = {name: value / GIB for name, value in done.items()} | {"files": total / GIB}
    loaded = f"{gib['files']:.2f} GiB of files loaded in {done['seconds']:.1f} s"
    print(f"{options.preset}: {loaded}; parameters {gib['parameters']:.2f} GiB,")
    beside = gib["highest"] - gib["parameters"]
    print(
        f"at most {gib['highest']:.2f} GiB of memory, {beside:.2f} beside the parameters, {gib['before']:.2f} before loading"
    )


if __name__ == "__main__":
    main()
