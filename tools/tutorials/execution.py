"""Execution of a notebook in a temporary folder, with a kernel that ends with it, however it ends."""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode, v4

from .notebooks import code_cells
from .outputs import clean_outputs
from .source import Block, Page, TutorialError

CELL_SECONDS = 240

SETUP = '''
def _set_up():
    """Run commands without a terminal, show what they print, and stop at the first one that fails."""
    import os
    import subprocess
    import sys
    from collections import deque

    shell = get_ipython()

    def system(command):
        command = shell.var_expand(command, depth=1)
        # A kernel asks for colors and bars, for the reader of a notebook.
        env = {name: value for name, value in os.environ.items() if "COLOR" not in name} | {"NO_COLOR": "1"}
        run = subprocess.Popen(
            command, shell=True, env=env, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        last = deque(maxlen=5)
        for line in run.stdout:
            last.append(line)
            sys.stdout.write(line)
        if run.wait():
            raise RuntimeError(f"exit code {run.returncode} of: {command}\\n{''.join(last)}")

    shell.system = system


_set_up()
del _set_up
'''
"""Runs before a notebook's own cells, in a cell that is not kept."""

_LINE = re.compile(r"Cell In\[\d+\], line (\d+)")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def execute(page: Page, notebook: NotebookNode, *, cell_seconds: int = CELL_SECONDS) -> None:
    """Run a page's notebook, and set its outputs. No process that it started is left running.

    Raises:
        TutorialError: A cell failed, or took longer than `cell_seconds`; the message names the page and its line.
    """
    with tempfile.TemporaryDirectory(prefix="panax-tutorial-") as name:
        folder = Path(name, "work")
        folder.mkdir()
        client = NotebookClient(
            notebook, timeout=cell_seconds, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
        )
        # Through files of this folder, not a port that other users of the machine could reach.
        kernel = client.create_kernel_manager()
        kernel.transport, kernel.connection_file = "ipc", str(Path(name, "kernel.json"))
        with _started(client, Path(name)), _ending_processes(kernel):
            notebook.cells.insert(0, v4.new_code_cell(SETUP))
            client.execute_cell(notebook.cells[0], 0)
            del notebook.cells[0]
            for number, (block, cell) in enumerate(zip(page.blocks, code_cells(notebook), strict=True), start=1):
                _execute_cell(client, page, block, cell)
                cell.outputs = clean_outputs(cell.outputs, folder)
                cell.execution_count = number
                cell.metadata.pop("execution", None)


def _started(client: NotebookClient, folder: Path) -> contextlib.AbstractContextManager[None]:
    # What cells print arrives as messages; the kernel's own streams carry libraries' logs alone.
    return client.setup_kernel(env=_environment(folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _execute_cell(client: NotebookClient, page: Page, block: Block, cell: NotebookNode) -> None:
    try:
        client.execute_cell(cell, client.nb.cells.index(cell))
    except CellExecutionError as error:
        line, words = _locate(block, error.traceback), f"{error.ename}: {error.evalue}"
    except CellTimeoutError:
        line, words = block.line, f"the block took longer than {client.timeout} s"
    except DeadKernelError:
        line, words = block.line, "the kernel died"
    else:
        return
    raise TutorialError(f"{page.path}:{line}: {words.strip()}")


def _locate(block: Block, traceback: str) -> int:
    """Return the page's line that a traceback's last line in the cell belongs to."""
    found = _LINE.findall(_ANSI.sub("", traceback))
    # A console block has one line in the cell for each command, which may have several on the page.
    return block.line + int(found[-1]) - 1 if found and block.kind == "python" else block.line


@contextlib.contextmanager
def _ending_processes(manager: KernelManager) -> Iterator[None]:
    """Kill the kernel and what it started, such as a command that Ctrl-C interrupted, when the block ends."""
    provisioner: Any = manager.provisioner
    kernel = psutil.Process(provisioner.pid)
    try:
        yield
    finally:
        # A process with another parent by now is still in the kernel's session.
        started = [*kernel.children(recursive=True), kernel] if kernel.is_running() else []
        started += [process for process in psutil.process_iter() if _session(process) == kernel.pid]
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(started, timeout=10)


def _session(process: psutil.Process) -> int:
    try:
        return os.getsid(process.pid)
    except OSError:
        return 0


def _environment(folder: Path) -> Mapping[str, str]:
    """Return the environment of a kernel: one CPU device, empty caches, this interpreter's commands first."""
    left_out = ("XLA_", "JAX_", "PYTEST_", "PANAX_", "PYTHON")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return kept | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "JAX_PLATFORMS": "cpu",
        "KERAS_BACKEND": "jax",
        "HF_HUB_OFFLINE": "1",
        "PANAX_CACHE": str(folder / "cache"),
        # Which one is fastest differs between machines, and is reported.
        "PANAX_CPU_KERNELS": "xla",
        "IPYTHONDIR": str(folder / "ipython"),
        "PYTHONWARNINGS": "ignore",
        "COLUMNS": "100",
        "TERM": "dumb",
        "NO_COLOR": "1",
    }
