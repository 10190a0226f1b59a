"""Environment variables that are forwarded from the launching machine to a job's nodes, and those set for
each process."""

from collections.abc import Iterable, Mapping

SUPERVISOR, SECRET, NODE = "PANAX_SUPERVISOR", "PANAX_SECRET", "PANAX_NODE"

FORWARDED_VARIABLES = (
    "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "LOGNAME", "OMP_NUM_THREADS", "PATH", "PYTHONPATH", "SHELL", "TERM", "TMPDIR",
    "TZ", "USER", "VIRTUAL_ENV", "CONDA_PREFIX", "SSL_CERT_FILE", "HF_HOME", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM",
    "TF_CPP_MIN_LOG_LEVEL",
)  # fmt: skip
"""Names of variables that nodes get; keys and tokens are not among them, and are only forwarded if a launch
names them."""

FORWARDED_PREFIXES = ("JAX_", "XLA_", "PANAX_", "NCCL_", "LIBTPU_")

JOB_VARIABLES = frozenset({SUPERVISOR, SECRET, NODE, "PANAX_CONNECTION"})
"""Variables that are set for each of a job's processes separately."""

NODE_VARIABLES = (NODE, "JOB_COMPLETION_INDEX", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_NODEID")
"""Variables with an agent's node number; MPI before Slurm, since MPI may run in a Slurm allocation."""


def forwarded_variables(environment: Mapping[str, str], more: Iterable[str] = ()) -> dict[str, str]:
    """Return the variables that are forwarded to nodes.

    >>> forwarded_variables({"HOME": "/home/me", "AWS_SECRET_ACCESS_KEY": "x", "JAX_PLATFORMS": "cpu", "PANAX_SECRET": "y"})
    {'HOME': '/home/me', 'JAX_PLATFORMS': 'cpu'}
    """
    wanted = {*FORWARDED_VARIABLES, *more}
    return {
        name: value
        for name, value in sorted(environment.items())
        if (name in wanted or name.startswith(FORWARDED_PREFIXES)) and name not in JOB_VARIABLES
    }


def node_number(environment: Mapping[str, str]) -> str:
    """Return the number of an agent's node from its environment; empty if it is not set.

    >>> node_number({"SLURM_NODEID": "3"}), node_number({"PANAX_NODE": "1", "SLURM_NODEID": "0"}), node_number({})
    ('3', '1', '')
    """
    return next((environment[name] for name in NODE_VARIABLES if environment.get(name, "").isdecimal()), "")
