"""Compare the programs of all golden runs and recipes with those that were recorded: none of them changes unless it is meant to.

    python tests/programs [--renew] [--only NAME ...]

traces each program and compares its canonical hash with the recorded one, which holds for one version of JAX. `--renew`
records the hashes of today's programs, after a change that alters them on purpose. Nothing is compiled. The exit code is 1 if
a program differs, 2 if the hashes are another JAX's.
"""  # fmt: skip

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT / "recipes"))
sys.path.insert(0, str(ROOT / "src"))

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    "PANAX_CPU_KERNELS": "xla",
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python tests/programs", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--renew", action="store_true", help="record the hashes of today's programs")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="GROUP or GROUP/NAME")
    options = parser.parse_args(arguments)
    os.environ.update(ENVIRONMENT)
    # These read the environment.
    import jax
    from traced_programs import RECORDED, hashes_of, names, read_recorded, write_recorded

    chosen = [name for name in names() if not options.only or {name, name.partition("/")[0]} & {*options.only}]
    found = {}
    for name in chosen:
        began = time.monotonic()
        found |= hashes_of(name)
        print(f"{time.monotonic() - began:6.1f} s  {name}", file=sys.stderr, flush=True)
    version, recorded = read_recorded() if RECORDED.exists() else (jax.__version__, {})
    if options.renew:
        write_recorded({**(recorded if options.only and version == jax.__version__ else {}), **found})
        return 0
    if version != jax.__version__:
        parser.error(f"the hashes were recorded with jax {version}; this is {jax.__version__}")
    differing = [name for name, hashed in found.items() if recorded.get(name) != hashed]
    for name in differing:
        print(f"{'differs' if name in recorded else 'is not recorded'}: {name}")
    print(f"{len(found) - len(differing)} of {len(found)} programs are as recorded")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
