"""Outputs of cells: cleaned of what belongs to one machine or one moment, shortened for a page, and compared."""

import re
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from nbformat import NotebookNode, v4

SVG = "image/svg+xml"

MAX_LINES = 26
"""Lines of an output that a page shows; of a longer one the first and last are kept."""

TOLERANCE = 0.05
"""Relative difference up to which two numbers agree: sums round differently on each processor."""

_PROGRESS = re.compile(r"^\s*\d+/\d+  ")
_SPEED = re.compile(
    r"  (?:[\d,.]+ [\w ]+/s|MFU [\d.]+%|[\d.]+ GiB|\d+ ms/step|\d+% (?:data|hooks|saving)|ETA \d+:\d\d)(?=  |\s*$)"
)
_MACHINE = re.compile(
    r"^(?:goodput |kernels on CPU: |[\w ]+ on cpu runs |MFU divides |launch: \d+ processes; first )"
    r".*\n(?:  [^\s\d].*\n)*",
    re.M,
)
"""Lines about the machine and its speed, with their continuations."""

_CHANGING = {
    re.compile(r"\x1b\[[0-9;?]*[A-Za-z]"): "",
    re.compile(r"\b0x[0-9a-f]{6,}\b"): "0x...",
    re.compile(r"\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\b"): "YYYY-MM-DD hh:mm:ss",
    re.compile(r"\b(after|in) \d+(?:\.\d+)? s\b"): r"\1 N s",
    re.compile(r", goodput \d+%"): "",
}
"""Colors, addresses, moments and durations, and what replaces them."""

_NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?", re.I)


def clean_outputs(outputs: Sequence[NotebookNode], folder: Path) -> list[NotebookNode]:
    """Keep what cells print and return, without paths below `folder`, moments, speeds, colors and addresses.

    Logs and warnings (stderr) are dropped; of results that have several forms, text and SVG are kept.
    """
    cleaned: list[NotebookNode] = []
    for output in outputs:
        if output.output_type == "stream" and output.name == "stdout":
            if cleaned and cleaned[-1].output_type == "stream":
                cleaned[-1].text += output.text
            else:
                cleaned.append(v4.new_output("stream", name="stdout", text=output.text))
        elif output.output_type in ("execute_result", "display_data"):
            data = {kind: output.data[kind] for kind in (SVG, "text/plain") if kind in output.data}
            if SVG in data:
                data = {SVG: data[SVG], "text/plain": "Chart"}
            elif "text/plain" in data:
                data["text/plain"] = clean_text(data["text/plain"], folder)
            cleaned.append(v4.new_output("display_data", data=data))
    for output in cleaned:
        if output.output_type == "stream":
            output.text = clean_text(output.text, folder)
    return [output for output in cleaned if picture_of(output) or text_of(output)]


def clean_text(text: str, folder: Path) -> str:
    """Remove from a text what belongs to one machine or one moment.

    >>> clean_text("     4/8  loss 5.1234  1,234 tok/s  0.41 GiB  ETA 0:03\\n", Path("/x"))
    '     4/8  loss 5.1234\\n'
    """
    for path in {str(folder), str(folder.resolve())}:
        text = text.replace(f"{path}/", "").replace(path, ".")
    text = text.replace(f"{Path(sys.executable).parent}/", "")
    text = re.sub(rf"\bon {re.escape(socket.gethostname())}\b", "on localhost", text)
    for pattern, constant in _CHANGING.items():
        text = pattern.sub(constant, text)
    lines = []
    for line in text.split("\n"):
        # A line that was overwritten is not shown.
        line = line.rstrip("\r").rpartition("\r")[2].rstrip()
        lines.append(_SPEED.sub("", line) if _PROGRESS.match(line) else line)
    return _MACHINE.sub("", "\n".join(lines))


def picture_of(output: NotebookNode) -> str:
    """Return an output's SVG; empty if it has none."""
    return output.get("data", {}).get(SVG, "")


def text_of(output: NotebookNode) -> str:
    """Return an output's text, without the empty lines around it."""
    text = output.text if output.output_type == "stream" else output.data.get("text/plain", "")
    return text.strip("\n").rstrip()


def shorten_text(text: str, max_lines: int = MAX_LINES) -> str:
    """Cut a long text in the middle.

    >>> shorten_text("a\\nb\\nc\\nd\\ne", 4)
    'a\\nb\\n...\\ne'
    """
    lines = text.split("\n")
    if len(lines) <= max_lines:
        return text
    last = (max_lines - 1) // 2
    return "\n".join([*lines[: max_lines - 1 - last], "...", *lines[len(lines) - last :]])


def find_difference(recorded: Sequence[NotebookNode], new: Sequence[NotebookNode]) -> str:
    """Describe the first difference between two outputs of a cell; empty if they agree.

    Words must be equal, numbers agree to `TOLERANCE`, and pictures must both be there.
    """
    if [bool(picture_of(each)) for each in recorded] != [bool(picture_of(each)) for each in new]:
        return f"{len(recorded)} outputs were recorded, and {len(new)} of other kinds came"
    for old, fresh in zip(recorded, new, strict=True):
        if picture_of(old):
            continue
        olds, news = text_of(old).split("\n"), text_of(fresh).split("\n")
        for before, after in zip(olds, news):
            if not lines_agree(before, after):
                return f"recorded {before!r}, came {after!r}"
        if len(olds) != len(news):
            return f"{len(olds)} lines were recorded, {len(news)} came"
    return ""


def lines_agree(first: str, second: str) -> bool:
    """Return True if two lines have the same words, and numbers that agree to `TOLERANCE`.

    >>> lines_agree("loss 5.1234", "loss  5.1235"), lines_agree("loss 5.1", "loss 6.1")
    (True, False)
    """
    if _NUMBER.sub("#", first).split() != _NUMBER.sub("#", second).split():
        return False
    pairs = zip(_numbers(first), _numbers(second), strict=True)
    return all(abs(a - b) <= TOLERANCE * max(abs(a), abs(b), 1e-6) for a, b in pairs)


def _numbers(line: str) -> Iterator[float]:
    return (float(match.replace(",", "")) for match in _NUMBER.findall(line))
