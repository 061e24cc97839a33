"""`make test-clients`: other people's clients against `kvboost serve`, each by its own python.

python check.py SCRIPT=PYTHON ...
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent


def main(pairs: list[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = Path(sys.executable).with_name("kvboost")
    server = subprocess.Popen([program, "serve", "--port", str(port)])
    try:
        wait_for(port)
        for pair in pairs:
            script, python = pair.split("=")
            subprocess.run([python, HERE / script, f"http://127.0.0.1:{port}/v1"], check=True)
            sys.stdout.write(f"{script}: passed\n")
    finally:
        server.terminate()
        server.wait(60)


def wait_for(port: int) -> None:
    for _ in range(300):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            time.sleep(0.2)
    raise SystemExit("the server did not start")


if __name__ == "__main__":
    main(sys.argv[1:])
