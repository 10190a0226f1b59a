"""A comparison with made-up figures, for its report."""

from panax_compare.results import ColumnResult, Comparison
from panax_compare.workload.settings import Settings

MACHINE = {
    "processor": "a processor",
    "cores": 2,
    "memory_bytes": 2**34,
    "accelerators": [],
    "system": "a system",
    "python": "3.11",
    "versions": {"jax": "1"},
    "variables": {},
}


def turns(*seconds, others=0.0):
    return [
        {"seconds": value, "cpu_seconds": 2 * value, "loss": 1.0, "others": others, "load": 1.0, "round": number}
        for number, value in enumerate(seconds)
    ]


def column(name, title, framework, seconds, losses=(2.0, 1.9, 1.8), **more):
    return ColumnResult(
        name,
        title,
        state="measured",
        framework=framework,
        device="cpu",
        losses=list(losses),
        first_step_seconds=5.0,
        compile_seconds=1.0,
        peak_bytes=2**30,
        product=1e11,
        turns=turns(*seconds),
        **more,
    )


def comparison(*columns, rounds=3, **more):
    settings = Settings(work="decoder", size="tiny", rounds=rounds)
    columns_by_name = {entry.name: entry for entry in columns}
    return Comparison(
        settings=vars(settings),
        command="panax compare decoder",
        started="today",
        work={
            "title": "a model",
            "family": "llama",
            "unit": "tokens",
            "units_per_step": 256,
            "flops_per_step": 1e9,
            "parameters": 1000,
            "recipe": "",
            "optimizer": {"name": "adamw", "learning_rate": 1e-3},
        },
        environment=MACHINE,
        reference=next(iter(columns_by_name), ""),
        columns=columns_by_name,
        sessions=1,
        complete=True,
        **more,
    )


EAGER = column("torch_eager", "PyTorch eager", "torch", (1.0, 1.1, 1.2))
COMPILED = column("torch_compile", "torch.compile", "torch", (0.9, 0.95, 1.0))
OWN = column("panax", "Panax", "jax", (1.8, 1.9, 2.0))
