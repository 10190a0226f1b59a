"""`panax check --full`: every kernel against its definition, layouts, a checkpoint and a benchmark, on the
attached devices."""

from .execution import cases, check_single_process, chip_name, full_check
from .output import format_markdown, part_lines, result_file, write_result
from .parts import Case, CaseSkipped, CheckOutcome, CheckResult, FullCheck, ResultMismatch, run_case
from .sizes import ACCELERATOR, CPU, Sizes, sizes_for

__all__ = [
    "ACCELERATOR", "CPU", "Case", "CaseSkipped", "CheckOutcome", "CheckResult", "FullCheck", "ResultMismatch", "Sizes",
    "cases", "check_single_process", "chip_name", "format_markdown", "full_check", "part_lines", "result_file",
    "run_case", "sizes_for", "write_result",
]  # fmt: skip
