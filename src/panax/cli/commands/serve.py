"""`panax serve`: a server of OpenAI's interface for a trained model."""

import contextlib
import importlib.util
import ipaddress
import socket
from collections.abc import Sequence
from pathlib import Path

from ...core.errors import RecipeError
from ...core.install_hints import install_command
from ...job.join import check_single_process
from ...run.folder.addresses import ADAPTER_PREFIX, RELEASED_PREFIX
from ...run.folder.trained_model import load_model
from ...run.reporting.generation import check_generates
from ..engine_flags import add_engine_flags, create_engine, read_mesh
from ..failures import warn
from ..parser import Parser
from ..plugins import start_jax

SHUTDOWN_SECONDS = 5
"""Time that answers in progress have after Ctrl-C."""


LARGEST_PORT = 65535


def serve(arguments: Sequence[str]) -> int:
    """Answer HTTP requests with the model of a checkpoint, until Ctrl-C."""
    options = _parser().parse_args(arguments)
    if any(importlib.util.find_spec(name) is None for name in ("starlette", "uvicorn")):
        raise RecipeError(f"starlette and uvicorn are not installed; install them with: {install_command('serve')}")
    key = _read_key(options.key_file)
    if key is None and not _is_loopback(options.host):
        raise RecipeError(
            f"--host {options.host} can be reached by others; pass --key-file FILE with a key that clients must send, or serve "
            f"on 127.0.0.1"
        )
    check_single_process("panax serve")
    # Before the model is loaded, which may take minutes.
    listener = _listen(options.host, options.port)
    start_jax()
    import uvicorn

    from ...generate.serving import ServedModel, create_app

    trained = load_model(options.checkpoint, warn, mesh=read_mesh(options), base=options.base)
    model = trained.text_model
    tokenizer = check_generates(model)
    engine = create_engine(trained, options, rows=options.rows, length=options.length)
    name = options.name or Path(options.checkpoint.removeprefix(RELEASED_PREFIX).removeprefix(ADAPTER_PREFIX)).name
    config = uvicorn.Config(
        create_app(ServedModel(engine, tokenizer, name), key=key),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    host, port = listener.getsockname()[:2]
    print(f"{name} is served at http://{host}:{port}/v1 ({options.rows} answers at a time; Ctrl-C ends it)", flush=True)
    # The server ends in order, and raises the interrupt again.
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])
    return 0


def _listen(host: str, port: int) -> socket.socket:
    """Open the server's socket."""
    if not 0 <= port <= LARGEST_PORT:
        raise RecipeError(f"--port {port}; expected 1 to {LARGEST_PORT}, or 0 for a free one")
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise RecipeError(
            f"--host {host} --port {port} can't be listened on: {error}; choose another port, or 0 for a free one"
        ) from error


def _parser() -> Parser:
    parser = Parser(prog="panax serve", description="Serve a trained model by OpenAI's interface.")
    parser.add_argument(
        "checkpoint",
        help="a run's folder (its best checkpoint is used), a checkpoint's own, or a released model, hf:DIR or hf:ORG/NAME, or "
        "an adapter, peft:DIR",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine alone)"
    )
    parser.add_argument("--port", type=int, default=8000, help="0 for a free one (default: 8000)")
    parser.add_argument(
        "--key-file", metavar="FILE", help="a file with a key that clients must send; needed for other hosts"
    )
    parser.add_argument("--name", help="of the model, for clients (default: the checkpoint's folder)")
    parser.add_argument("--rows", type=int, default=8, help="answers at the same time (default: 8)")
    parser.add_argument(
        "--length", type=int, help="positions of prompt and answer (default: the model's, at most 2048)"
    )
    add_engine_flags(parser)
    return parser


def _read_key(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        key = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"--key-file {path} can't be read: {error}") from error
    if not key or not key.isascii() or any(each.isspace() for each in key):
        raise RecipeError(f"--key-file {path} holds no key; expected one line of ASCII characters without spaces")
    return key


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
