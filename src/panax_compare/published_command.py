"""`panax compare vit --as-published`: the published comparison, measured and reported."""

import argparse
from pathlib import Path

from panax.system import json_reader

from .published_study import RESULTS, LogFn, Published, measure_published, read_published_settings
from .report.published_report import write_published


def run_published(options: argparse.Namespace, command: str, say: LogFn) -> int:
    """Run `panax compare vit --as-published`: measure and write the report. Returns the exit code."""
    settings = read_published_settings(options)
    steps, rounds = options.steps or 3, options.rounds or 3
    folder = Path(options.directory or f"comparisons/published-{settings.name}")
    code = 0
    try:
        published = measure_published(settings, folder, command, steps, rounds, say)
    except KeyboardInterrupt:
        code = 130
        if not (folder / RESULTS).is_file():
            say("stopped before anything was measured")
            return code
        published = Published(**json_reader.read(folder / RESULTS, constants=True))
        say("stopped; what was finished is kept, and the same command resumes from there")
    page, table = write_published(published, folder)
    print(table, end="")
    print(f"\nreport: {page}")
    return code
