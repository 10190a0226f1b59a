"""`panax check --full`: every kernel against its definition, layouts, a checkpoint and a benchmark, on the devices here."""

from .parts import Case, CheckOutcome, CheckResult, Differs, FullCheck, LeftOut, run_case
from .running import cases, chip_name, full_check, refuse_several
from .sizes import ACCELERATOR, CPU, Sizes, sizes_for
from .writing import format_markdown, part_lines, result_file, write_result

__all__ = [
    "ACCELERATOR",
    "CPU",
    "Case",
    "CheckOutcome",
    "CheckResult",
    "Differs",
    "FullCheck",
    "LeftOut",
    "Sizes",
    "cases",
    "chip_name",
    "format_markdown",
    "full_check",
    "part_lines",
    "refuse_several",
    "result_file",
    "run_case",
    "sizes_for",
    "write_result",
]
