"""A run: every request of every workload, answered by every system, and written down.

Systems take turns at going first. Each keeps its store from one request to the next; before a
workload all are emptied.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from kvboost.bench.answers import right, stale
from kvboost.bench.cost import floor
from kvboost.bench.peers import Peer, PeerError
from kvboost.bench.record import RECORD, Log, Record, begin_peak, machine, peak, read
from kvboost.bench.request import Request
from kvboost.bench.systems import (
    ANSWER,
    Asked,
    Begun,
    Judged,
    Ours,
    Plain,
    Prompts,
    System,
    Theirs,
    options_of,
    room,
)
from kvboost.boost import KVBoost
from kvboost.config import Config
from kvboost.types import Usage


@dataclass(frozen=True)
class Setup:
    """What is run. systems: names; "plain" is always among them and first. peers: of those names,
    the folders of the ones that are others'. told: what else the header says of the options."""

    model: str
    dtype: str
    seed: int
    systems: Sequence[str]
    peers: Mapping[str, Path]
    out: Path
    told: Mapping[str, Any] = field(default_factory=dict)

    @property
    def file(self) -> Path:
        return self.out / RECORD


_WARM_UP = [
    Request("warm-up", ({"role": "user", "content": text * 40},))
    for text in ("Say hello. ", "Please: say hello. ")
]


class Bench:
    """The systems around one loaded model, and the record they fill."""

    def __init__(self, setup: Setup) -> None:
        """Loads the model; goes on with the record there is. Raises ConfigError if that is of
        another setup."""
        self.setup = setup
        self.before = read(setup.file)[0] if setup.file.exists() else {}
        dtype = self.before.get("dtype", "auto") if setup.dtype == "auto" else setup.dtype
        self.boost = KVBoost.from_pretrained(setup.model, dtype=dtype)
        self.device = self.boost._engine.runner.layout.device
        self.prompts = Prompts(self.boost.tokenizer)
        ours = [name for name in setup.systems if name != "plain" and name not in setup.peers]
        self.floor = self.before.get("floor") or asdict(floor(self.boost))
        self.max_bytes = self.before.get("max_bytes") or _max_bytes(self.device, len(ours))
        self.systems: list[System] = [Plain(self.boost), *map(self._ours, ours)]

    def _ours(self, name: str) -> Ours:
        boost = KVBoost(self.boost.model, self.boost.tokenizer, max_bytes=self.max_bytes)
        return Ours(name, boost, options_of(name))

    def _theirs(self, name: str, longest: int) -> Theirs:
        dtype, window = self.boost.stats().dtype, longest + ANSWER
        make = partial(Peer, name, self.setup.peers[name], self.setup.model, dtype, window)
        return Theirs(name, make, self.boost, self.prompts.make(_WARM_UP[0]))

    def run(self, workloads: Mapping[str, Sequence[Request]]) -> Log:
        """All of it, or what is still to do."""
        asked = {
            name: [self.prompts.make(request) for request in requests]
            for name, requests in workloads.items()
        }
        every = [one for many in asked.values() for one in many]
        for one in every:
            room(self.boost, one)
        longest = max(len(one.ids) for one in every)
        self.systems += [self._theirs(name, longest) for name in self.setup.peers]
        log = Log(self.setup.file, self._header(asked))
        out = {record.system for record in log.done if record.failed}
        self.systems = [system for system in self.systems if system.name not in out]
        try:
            with _bars() as progress:
                tasks = {
                    name: progress.add_task(name, total=len(many), said="", start=False)
                    for name, many in asked.items()
                }
                self._warm_up()
                for name, many in asked.items():
                    self._workload(name, many, log, progress, tasks[name])
        finally:
            for system in self.systems:
                system.close()
        return log

    def _header(self, asked: Mapping[str, Sequence[Asked]]) -> dict[str, Any]:
        prompts = hashlib.sha256(repr([[a.request for a in m] for m in asked.values()]).encode())
        return {
            "model": self.setup.model,
            "seed": self.setup.seed,
            "systems": [system.name for system in self.systems],
            "workloads": {name: len(many) for name, many in asked.items()},
            **self.setup.told,
            "prompts": prompts.hexdigest()[:16],
            "max_bytes": self.max_bytes,
            **machine(self.boost.stats().dtype, self.device),
            "floor": self.floor,
        }

    def _warm_up(self) -> None:
        """No first call of anything of ours is on the clock."""
        ours = [system for system in self.systems if not isinstance(system, Theirs)]
        for request in _WARM_UP:
            asked = self.prompts.make(request)
            begun = [system.begin(asked) for system in ours]
            reference = begun[0].reference
            assert reference is not None
            for one in begun:
                one.judge(reference)

    def _replay(self, asked: Asked, systems: Sequence[System]) -> None:
        """Answer off the record. A peer that fails will do so again on it, and be noted there."""
        for system in systems:
            try:
                system.begin(asked)
            except PeerError:
                continue

    def _workload(
        self, name: str, many: Sequence[Asked], log: Log, progress: Progress, task: TaskID
    ) -> None:
        done = len({record.place for record in log.of(name)})
        progress.start_task(task)
        if done == len(many):
            progress.update(task, completed=done, said=_said(log.of(name)))
            return
        for system in self.systems:
            system.clear()
        for place, asked in enumerate(many[:done], 1):
            self._replay(asked, self.systems[1:])
            progress.update(task, completed=place, said="replaying what is recorded")
        for place in range(done, len(many)):
            log.add(self._request(name, place, many[place]))
            progress.update(task, completed=place + 1, said=_said(log.of(name)))

    def _request(self, name: str, place: int, asked: Asked) -> list[Record]:
        """Every system up to the first token, then all are judged. Donors only make KV."""
        first = self.systems[place % len(self.systems)]
        rest = [system for system in self.systems if system is not first]
        random.Random(f"{self.setup.seed} {name} {place}").shuffle(rest)
        begun: dict[str, tuple[Begun, int]] = {}
        records = []
        for system in (first, *rest):
            begin_peak(self.device)
            try:
                begun[system.name] = system.begin(asked), peak(self.device)
            except PeerError as error:
                self.systems.remove(system)
                system.close()
                records.append(replace(_record(name, place, asked, system), failed=str(error)))
        reference = begun["plain"][0].reference
        assert reference is not None
        for system in self.systems:
            answer, needed = begun[system.name]
            fields = _counted(answer) | _judged(asked.request, answer.judge(reference))
            records.append(replace(_record(name, place, asked, system), **fields, peak=needed))
        return records


def _record(workload: str, place: int, asked: Asked, system: System) -> Record:
    request = asked.request
    return Record(
        workload=workload,
        place=place,
        request=request.id,
        system=system.name,
        prompt=len(asked.ids),
        session=request.session,
        bucket=request.bucket,
        donor=request.donor,
    )


def _counted(begun: Begun) -> dict[str, Any]:
    usage = begun.usage or Usage()
    return {
        "ttft": begun.ttft,
        "store": begun.parts.get("store", 0.0),
        "parts": begun.parts,
        "exact": usage.exact,
        "moved": usage.moved,
        "recomputed": usage.recomputed,
        "computed": usage.computed,
        "cached": begun.cached,
        "note": begun.note,
        "passes": [(done.rows, done.layers) for done in begun.passes],
        "bytes": begun.bytes,
    }


def _judged(request: Request, judged: Judged) -> dict[str, Any]:
    return {
        **(asdict(judged.apart) if judged.apart else {}),
        "same": judged.same,
        "given": judged.given,
        "right": right(request, judged.given),
        "stale": stale(request, judged.given),
    }


def _bars() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[said]}"),
    )


def _said(records: Sequence[Record]) -> str:
    """How much faster KVBoost has been so far."""
    spent: dict[str, float] = {}
    for record in records:
        if not record.donor:
            spent[record.system] = spent.get(record.system, 0.0) + record.ttft
    ours = "auto" if "auto" in spent else list(spent)[-1] if spent else "plain"
    others = [name for name in ("plain", "exact") if name in spent and name != ours]
    faster = [f"{spent[name] / spent[ours]:.2f}x faster than {name}" for name in others]
    return f"{ours} {', '.join(faster)}" if faster else ""


def _max_bytes(device: torch.device, stores: int) -> int:
    """Of each store: all of them together in half of the memory there is."""
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[0]
    elif hasattr(os, "sysconf"):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        return Config().max_bytes
    return total // 2 // max(1, stores)
