"""Nothing waits without an end for what another thread, process or peer does; found on the syntax tree."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "panax"
ROOMS = ("system", "job", "cluster", "stores", "data", "checkpoint", "comms", "environments")

PIPES = {"response", "stdout", "stderr", "stdin", "rfile", "connection", "pipe", "source"}

EXCEPTIONS = {
    ("job/rendezvous.py", "wait"): "the loop of process 0, which has a deadline",
    ("cluster/node/worker_process.py", "wait"): "of a process that was killed: the kernel ends it",
    ("cluster/node/standby.py", "wait"): "of a process that was killed",
    ("cluster/node/agent.py", "wait"): "of workers that were killed",
    ("cluster/engines/ray_client.py", "wait"): "an actor that lives as long as its agent, and is ended by Ray",
    (
        "checkpoint/snapshot.py",
        "wait",
    ): "for a copy that this process's own devices make: JAX's own waits have no limit either",
    ("checkpoint/snapshot.py", "join"): "the same",
    ("checkpoint/memory.py", "join"): "of a thread whose requests to peers have limits of their own",
    ("stores/objects.py", "wait"): "for a slot of requests that have limits of their own",
    ("stores/peer.py", "join"): "of the server's loop, which was told to end",
}


def waits_in(source: str) -> list[tuple[str, int]]:
    """(what is called, the line) of calls that may wait without an end."""
    timeouts = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        name = called.rpartition(".")[2]
        limited = bool(node.args) or any(word.arg in ("timeout", "seconds") for word in node.keywords)
        if called in ("subprocess.run", "subprocess.call", "subprocess.check_output", "subprocess.check_call"):
            if not any(word.arg == "timeout" for word in node.keywords):
                timeouts.append((called, node.lineno))
        elif called.startswith("self.") and called.count(".") == 1:
            continue  # a method of one's own, in which the waits are
        elif isinstance(node.func, ast.Attribute) and name in ("wait", "join", "communicate") and not limited:
            timeouts.append((name, node.lineno))
        elif name == "read" and not node.args and isinstance(node.func, ast.Attribute):
            receiver = ast.unparse(node.func.value).rpartition(".")[2]
            if receiver in PIPES:
                timeouts.append((name, node.lineno))
    return timeouts


def all_waits() -> dict[tuple[str, str], list[int]]:
    found: dict[tuple[str, str], list[int]] = {}
    for room in ROOMS:
        for path in (SOURCE / room).rglob("*.py"):
            for name, line in waits_in(path.read_text(encoding="utf-8")):
                found.setdefault((str(path.relative_to(SOURCE)), name), []).append(line)
    return found


def test_every_wait_has_an_end():
    assert {place: lines for place, lines in all_waits().items() if place not in EXCEPTIONS} == {}


def test_exceptions_are_still_needed():
    assert EXCEPTIONS.keys() <= all_waits().keys()


@pytest.mark.parametrize(
    "planted",
    [
        "thread.join()", "process.wait()", "event.wait()", "process.communicate()", "subprocess.run(command)",
        "process.stdout.read()", "response.read()", "self._pool.worker.join()",
    ],
)  # fmt: skip
def test_a_wait_without_an_end_is_seen(planted):
    assert len(waits_in(f"def f():\n    {planted}\n")) == 1


@pytest.mark.parametrize(
    "usual",
    [
        '", ".join(words)',
        "process.wait(3)",
        "thread.join(timeout=1)",
        "file.read()",
        "subprocess.run(c, timeout=3)",
        "pipe.read(9)",
    ],
)
def test_one_with_an_end_is_not(usual):
    assert waits_in(usual) == []


def swallowed_in(source: str) -> list[int]:
    """The lines of handlers that take any exception, and do nothing."""

    def idle(each: ast.stmt) -> bool:
        return isinstance(each, ast.Pass | ast.Continue) or isinstance(getattr(each, "value", None), ast.Constant)

    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or ast.unparse(node.type) in ("Exception", "BaseException"))
        and all(map(idle, node.body))
    ]


def test_no_exception_is_swallowed():
    paths = [*SOURCE.rglob("*.py"), *(SOURCE.parent / "panax_compare").rglob("*.py")]
    found = {str(path): lines for path in paths if (lines := swallowed_in(path.read_text(encoding="utf-8")))}
    assert found == {}
    for planted in ("except Exception:\n    pass", "except:\n    pass", "except BaseException:\n    ..."):
        assert swallowed_in(f"try:\n    f()\n{planted}\n") == [3]
