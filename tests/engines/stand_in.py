"""Stands in for an agent: it prints its node and its process, and ends when the connection does."""

import os
import socket

from panax.cluster.engines import node_number

if __name__ == "__main__":
    host, port = os.environ["PANAX_SUPERVISOR"].rsplit(":", 1)
    connection = socket.create_connection((host, int(port)), timeout=10)
    connection.settimeout(None)
    words = (
        os.environ["PANAX_SECRET"],
        node_number(os.environ) or "?",
        str(os.getpid()),
        os.environ.get("HF_TOKEN", "-"),
    )
    connection.sendall((" ".join(words) + "\n").encode())
    connection.recv(1)
