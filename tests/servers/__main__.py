"""`python -m servers s3` and `python -m servers proxy`: each prints its address as JSON, and ends with its input or its time."""

import argparse
import json
import os
import sys
import threading

from .proxy import FaultProxy


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m servers", description=__doc__)
    parser.add_argument("server", choices=["s3", "proxy"])
    parser.add_argument("--port", type=int, default=0, help="default: any that is free")
    parser.add_argument("--seconds", type=float, default=1800.0, help="how long it runs")
    parser.add_argument("--upstream", help="for the proxy: the server's address, http://127.0.0.1:PORT")
    parser.add_argument(
        "--rules", help="for the proxy: a JSON file, a list of objects with the fields of servers.Fault"
    )
    arguments = parser.parse_args()
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    if arguments.server == "s3":
        from moto.server import ThreadedMotoServer

        server = ThreadedMotoServer(ip_address="127.0.0.1", port=arguments.port, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        print(json.dumps({"url": f"http://{host}:{port}"}), flush=True)
        ended.wait(arguments.seconds)
    else:
        if not arguments.upstream:
            parser.error("the proxy needs --upstream")
        with FaultProxy(arguments.upstream, port=arguments.port) as proxy:
            if arguments.rules:
                proxy.faults.load(arguments.rules)
            print(json.dumps({"url": proxy.url}), flush=True)
            ended.wait(arguments.seconds)
    os._exit(0)


if __name__ == "__main__":
    main()
