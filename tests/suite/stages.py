"""Print the minutes that each stage of `.ci/run` took beside its budget in `tests/budget.toml`.

    python tests/suite/stages.py FILE               lines of FILE: seconds, a tab, the stage's name
    python tests/suite/stages.py --minutes STAGE    the budget of one stage

Overruns are warnings; the exit code is 0 unless the file names a stage that has no budget.
"""

import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


def compare_stages(used: Iterable[tuple[str, float]], budget: Mapping[str, float]) -> list[str]:
    """Lines of a table of minutes used and allowed, with a warning for each stage over its budget.

    Args:
        used: Stages and their seconds; a stage may come more than once.
        budget: Minutes of each stage.

    Raises:
        ValueError: A stage has no budget.
    """
    minutes = dict.fromkeys(budget, 0.0)
    for stage, seconds in used:
        if stage not in budget:
            raise ValueError(
                f"stage {stage!r} has no budget; add it to [stages] in tests/budget.toml: {', '.join(budget)}"
            )
        minutes[stage] += seconds / 60
    rows = [*minutes.items(), ("all", sum(minutes.values()))]
    allowed = {**budget, "all": sum(budget.values())}
    lines = [f"{'stage':14}{'minutes':>9}{'budget':>8}"]
    lines += [f"{stage:14}{spent:9.1f}{allowed[stage]:8.0f}" for stage, spent in rows]
    lines += [
        f"warning: {stage} took {spent:.1f} minutes of {allowed[stage]:g}"
        for stage, spent in rows
        if spent > allowed[stage]
    ]
    return lines


def main(arguments: Sequence[str]) -> None:
    """Print the table for a file of recorded stages, or one stage's minutes."""
    budget = tomllib.loads((Path(__file__).parent.parent / "budget.toml").read_text(encoding="utf-8"))["stages"]
    try:
        if arguments[0] == "--minutes":
            print(budget[arguments[1]])
            return
        rows = [line.split("\t") for line in Path(arguments[0]).read_text(encoding="utf-8").splitlines()]
        print("\n".join(compare_stages([(stage, float(seconds)) for seconds, stage in rows], budget)))
    except ValueError as error:
        sys.exit(f"stages.py: {error}")
    except KeyError as error:
        sys.exit(f"stages.py: no stage {error} in tests/budget.toml; its stages: {', '.join(budget)}")


if __name__ == "__main__":
    main(sys.argv[1:])
