"""The record of a run: a file with a header and one line for each request and system.

It grows request by request, so that a run that was stopped goes on where it stopped.
"""

from __future__ import annotations

import gzip
import json
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import kvboost
from kvboost.errors import ConfigError

if sys.platform != "win32":
    import resource

RECORD = "run.jsonl"
"""In the folder of a run."""


@dataclass(frozen=True, slots=True)
class Record:
    """One request, answered by one system.

    place: in the order of the workload. ttft, store, parts: seconds. prompt, exact, moved,
    recomputed, computed: tokens. cached: tokens that a peer says it had; note: what it
    says of itself. passes: (rows, layers).
    kl_mean, kl_max, top1: against plain transformers, over its answer; None where a system hides
    its logits. same: the same greedy answer. given: the option chosen, or the text. right, stale:
    None where that isn't known. bytes: stored by then. peak: bytes that this process has needed at
    most so far, or the device during this request. failed: why there is no answer.
    """

    workload: str
    place: int
    request: str
    system: str
    prompt: int
    session: str = ""
    bucket: int = 0
    donor: bool = False
    ttft: float = 0.0
    store: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    exact: int = 0
    moved: int = 0
    recomputed: int = 0
    computed: int = 0
    cached: int | None = None
    note: str = ""
    passes: Sequence[Sequence[int]] = ()
    kl_mean: float | None = None
    kl_max: float | None = None
    top1: float | None = None
    same: bool | None = None
    given: str = ""
    right: bool | None = None
    stale: bool | None = None
    bytes: int = 0
    peak: int = 0
    failed: str = ""

    @property
    def total(self) -> float:
        """Seconds to the first token and for storing; decoding is not in it."""
        return self.ttft + self.store

    @property
    def reused(self) -> float:
        """Share of the prompt whose KV was not computed for the first time here."""
        known = self.exact + self.moved + self.recomputed
        return (known if self.cached is None else self.cached) / self.prompt


class Log:
    """The file of a run. `done` holds what it has so far, whole requests only."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        """Begins the file, or goes on with one whose header is the same; else ConfigError."""
        self.path = path
        self.done: list[Record] = []
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_line(header), encoding="utf-8")
            return
        found, self.done = read(path)
        _check(path, found, header)
        lines = [_line(found), *(_line(asdict(record)) for record in self.done)]
        partial = path.with_suffix(".partial")
        partial.write_text("".join(lines), encoding="utf-8")
        partial.replace(path)

    def add(self, records: Sequence[Record]) -> None:
        """All of one request, at once."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(_line(asdict(record)) for record in records))
        self.done += records

    def of(self, workload: str) -> list[Record]:
        return [record for record in self.done if record.workload == workload]


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"


def read(path: Path) -> tuple[dict[str, Any], list[Record]]:
    """Header and records of a run, up to the last request that all its systems have answered.
    The file may be gzipped."""
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    parsed = list(_parsed(text.split("\n")))
    if not parsed or "systems" not in parsed[0]:
        raise ConfigError(f"{path} is no record of `kvboost bench`: choose another --out")
    try:
        header, records = parsed[0], [Record(**line) for line in parsed[1:]]
    except TypeError as error:
        raise ConfigError(f"{path} is of another version: choose another --out") from error
    whole, open_, out = 0, set(header["systems"]), set[str]()
    for number, record in enumerate(records, 1):
        open_.discard(record.system)
        if record.failed:
            out.add(record.system)
        if not open_:
            whole, open_ = number, set(header["systems"]) - out
    return header, records[:whole]


def _parsed(lines: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Up to a line that a crash has torn."""
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            return


def _check(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    told = [
        f"{name} {found.get(name)!r}, not {wanted.get(name)!r}"
        for name in {**found, **wanted}
        if found.get(name) != wanted.get(name)
    ]
    if told:
        raise ConfigError(
            f"{path} is of a run with {'; '.join(told)}. To go on with it, run it the same way; "
            "else choose another --out"
        )


def machine(dtype: str, device: torch.device) -> dict[str, Any]:
    """What a record says of where it was made."""
    cuda = device.type == "cuda"
    return {
        "processor": torch.cuda.get_device_name(device) if cuda else _processor(),
        "device": device.type,
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers")},
        "kvboost": kvboost.__version__,
        "commit": _commit(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _commit() -> str:
    """The last commit of this package's folder; "" if it was installed from elsewhere."""
    git = ["git", "-C", str(Path(kvboost.__file__).parent), "log", "-1", "--format=%h", "--", "."]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def peak(device: torch.device) -> int:
    """Bytes that the device has needed at most since `begin_peak`; on a CPU this process so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def begin_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
