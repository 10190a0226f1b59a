"""`panax check --full`: every kernel against its definition, layouts, a checkpoint and a benchmark, on the
devices here."""

from .parts import Case, CaseSkipped, CheckOutcome, CheckResult, FullCheck, ResultMismatch, run_case
from .running import cases, check_single_process, chip_name, full_check
from .sizes import ACCELERATOR, CPU, Sizes, sizes_for
from .writing import format_markdown, part_lines, result_file, write_result

__all__ = [
    "ACCELERATOR", "CPU", "Case", "CaseSkipped", "CheckOutcome", "CheckResult", "FullCheck", "ResultMismatch", "Sizes",
    "cases", "check_single_process", "chip_name", "format_markdown", "full_check", "part_lines", "result_file",
    "run_case", "sizes_for", "write_result",
]  # fmt: skip
