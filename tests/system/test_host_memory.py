"""Memory that a process may use of the host's: a container's limits, a job's and its own count."""

import resource

import pytest

from panax.system import host_memory
from panax.system.host_memory import free_bytes, host_bytes

GIB = 2**30


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    """Makes cgroups from {file: text}, of which this process's own one is the last line's."""

    def make(own, files):
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            path = tmp_path / "fs" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.setattr(host_memory, "OWN_CGROUPS", tmp_path / "own")
        monkeypatch.setattr(host_memory, "CGROUPS", tmp_path / "fs")

    monkeypatch.setattr(host_memory, "OWN_CGROUPS", tmp_path / "absent")
    monkeypatch.setattr(host_memory, "_available", lambda: 64 * GIB)
    return make


def test_without_cgroups_the_host_states(cgroups):
    assert free_bytes() == 64 * GIB and host_bytes() > GIB


def test_the_least_of_a_job_and_what_it_runs_in(cgroups):
    cgroups(
        "0::/slurm/job_7/step_0\n",
        {
            "slurm/job_7/step_0/memory.max": "max\n",
            "slurm/job_7/step_0/memory.current": f"{2 * GIB}\n",
            "slurm/job_7/memory.max": f"{8 * GIB}\n",
            "slurm/job_7/memory.current": f"{3 * GIB}\n",
            "slurm/job_7/memory.stat": f"anon 1\ninactive_file {GIB}\n",
            "slurm/memory.max": f"{32 * GIB}\n",
            "slurm/memory.current": f"{30 * GIB}\n",
        },
    )
    assert host_bytes() == 8 * GIB
    # Slurm's other jobs leave 2 GiB, this one's own limit would leave 6: what is read of files is given back.
    assert free_bytes() == 2 * GIB


def test_the_older_version(cgroups):
    cgroups(
        "4:memory:/box\n3:cpu:/\n0::/\n",
        {
            "memory/box/memory.limit_in_bytes": f"{GIB}\n",
            "memory/box/memory.usage_in_bytes": f"{GIB // 4}\n",
            "memory/box/memory.stat": f"total_inactive_file {GIB // 8}\n",
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
            "memory/memory.usage_in_bytes": f"{60 * GIB}\n",
        },
    )
    assert host_bytes() == GIB and free_bytes() == GIB - GIB // 8


def test_files_that_report_itmething_else_limit_nothing(cgroups):
    cgroups("0::/../a\nnonsense\n", {"a/memory.max": "much\n", "memory.max": ""})
    assert free_bytes() == 64 * GIB


def test_ulimit_counts(cgroups, monkeypatch):
    limits = {resource.RLIMIT_AS: (2 * GIB, -1), resource.RLIMIT_DATA: (resource.RLIM_INFINITY, -1)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    assert host_bytes() == 2 * GIB and free_bytes() < 2 * GIB
