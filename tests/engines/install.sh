#!/bin/bash
# usage: tests/engines/install.sh slurm|mpi|ray|kubernetes|aarch64...   installs what the tests of these engines start, where it is missing
# Debian's packages by apt-get (as root), Python's by pip into the environment of `python`.
set -euo pipefail
[ $# -gt 0 ] || { sed -n 2,3p "$0"; exit 2; }

packages() {
    local missing=()
    for each in "$@"; do dpkg -s "$each" >/dev/null 2>&1 || missing+=("$each"); done
    [ ${#missing[@]} -gt 0 ] || { echo "there already: $*"; return; }
    [ "$(id -u)" = 0 ] || { echo "run as root: apt-get install ${missing[*]}"; exit 1; }
    echo "installing ${missing[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

for engine in "$@"; do
    case $engine in
        # The services that Debian starts at once are not those of the tests: slurm.sh starts its own.
        slurm) packages slurmctld slurmd slurm-client munge ;;
        mpi) packages openmpi-bin mpich ;;
        ray) python -c "import ray" 2>/dev/null && echo "there already: ray" || { echo "installing ray"; python -m pip install -q "ray>=2.50"; } ;;
        kubernetes)
            python -c "import jsonschema" 2>/dev/null && echo "there already: jsonschema" || python -m pip install -q "jsonschema>=4.20"
            command -v kubectl >/dev/null && echo "there already: kubectl" || packages kubernetes-client ;;
        # An emulator of another processor: for the C files' kernels.
        aarch64) packages qemu-user ;;
        *) echo "no engine $engine; expected slurm, mpi, ray, kubernetes or aarch64"; exit 2 ;;
    esac
done
