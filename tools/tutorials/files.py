"""The small files that tutorials and guides speak of, written into the working directory.

Each function stands alone: a notebook has a copy of its source as a cell, so that a reader can run the notebook anywhere.
"""

import inspect
from collections.abc import Callable


def write_texts() -> None:
    """Write `texts/`: a few sources of Python's own library, as texts."""
    import json
    import shutil
    from pathlib import Path

    Path("texts").mkdir(exist_ok=True)
    for source in sorted(Path(json.__path__[0]).glob("*.py")):
        shutil.copy(source, Path("texts") / f"{source.stem}.txt")


def write_chat() -> None:
    """Write `chat.jsonl`: questions and answers about sums."""
    import json

    with open("chat.jsonl", "w", encoding="utf-8") as lines:
        for a in range(12):
            for b in range(12):
                record = {"question": f"What is {a} and {b}? ", "answer": f"{a} and {b} is {a + b}."}
                lines.write(json.dumps(record) + "\n")


def write_clicks() -> None:
    """Write `clicks.csv`: 400 people, who each click the ten items of a favorite group more often than 70 others."""
    import random

    rng = random.Random(0)
    rows = []
    for person in range(400):
        favorite = rng.randrange(8)
        for _ in range(20):
            group = favorite if rng.random() < 0.8 else rng.randrange(8)
            rows.append((rng.randrange(1_000_000), person, 10 * group + rng.randrange(10)))
    with open("clicks.csv", "w", encoding="utf-8") as lines:
        lines.write("time,person,item\n")
        for row in sorted(rows):
            lines.write(",".join(map(str, row)) + "\n")


WRITERS: dict[str, Callable[[], None]] = {
    "texts": write_texts,
    "chat.jsonl": write_chat,
    "clicks.csv": write_clicks,
}
"""The function that writes each of them, by the name that a page uses."""


def write_files() -> None:
    """Write all of them."""
    for write in WRITERS.values():
        write()


def cell_source(names: str) -> str:
    """Return the code that writes the files of a `files` directive, for a cell of a notebook.

    Raises:
        KeyError: A name is not one of `WRITERS`.
    """
    writers = [WRITERS[name.strip()] for name in names.split(",")]
    calls = [f"{write.__name__}()" for write in writers]
    return "\n\n\n".join([inspect.getsource(write).rstrip() for write in writers]) + "\n\n\n" + "\n".join(calls)
