"""The passes of one prefill: what a policy may ask of the request in hand, and the rows it wants.

Knows in what order rows are computed, not which.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from kvboost.drift import Patch, Run, patches
from kvboost.kv import KVBuffer
from kvboost.metrics import Stopwatch
from kvboost.plan import QUESTION
from kvboost.recompute import Look
from kvboost.runner import ModelRunner
from kvboost.types import ForwardPass

_BLOCK = 512
"""Rows of a pass behind a prefix. 1,760 tokens with 26 of them stored cost 1.06 of a plain prefill
in blocks of 512, 1.09 to 1.10 in 256 or 1,024, and 1.30 in one pass (135M, bf16, 2 cores)."""

_PRODUCTS = 1024
"""Rows of a pass that attends by products: 4,200 tokens take .61 of a plain prefill's time in
blocks of 1,024, .65 in 512, .59 in 2,048 and .72 in one pass (135M; docs/adr/0013)."""


class Pauses(Protocol):
    """Lets others run between the passes of a prefill."""

    def rows(self) -> int:
        """How many rows the next pass may have at most."""

    def pause(self) -> None:
        """Called between two passes, without the runner's lock. May raise to end the prefill."""


@dataclass
class Passes:
    """What a policy may ask of the request in hand; keeps the account of it."""

    runner: ModelRunner
    buffer: KVBuffer
    ids: Sequence[int]
    clock: Stopwatch
    pauses: Pauses | None = None
    passes: list[ForwardPass] = field(default_factory=list)
    computed: set[int] = field(default_factory=set)
    mass: Tensor | None = None
    runs: Sequence[Run] = ()

    @property
    def layers(self) -> int:
        return self.runner.layers

    def deviation(self, rows: Sequence[int], layer: int) -> Tensor:
        self._count(rows, layer)
        return self.runner.deviation(self.buffer, self.ids, rows, layer)

    def attention(self, rows: Sequence[int], look: Look) -> Tensor:
        after = 0
        if self.pauses is not None:  # what comes before the question, in passes of its own
            before = len(rows) - min(len(look.queries), QUESTION)
            for block in self._blocks(rows[:before]) if before else ():
                self._pass(block, after)
                after = block[-1] + 1
                self.pause("probe")
            rows = rows[before:]
        self._count(rows, look.depth)
        patched, self.runs = self._patches(rows, after), ()
        self.mass = self.runner.attention(self.buffer, self.ids, rows, look, patched)
        return self.mass

    def spread(self, runs: Sequence[Run]) -> None:
        self.runs = runs

    def _patches(self, rows: Sequence[int], after: int) -> list[Patch]:
        return list(patches(self.runs, rows, after, self.buffer.k[0]))

    def forward(self, rows: Sequence[int]) -> Tensor:
        """Compute `rows` through all layers, a block at a time: the last logits.

        Behind a prefix attention is masked, and masked attention costs all keys that are there: a
        block sees those up to its own end. The whole prompt takes the causal path, in one pass,
        unless products are faster.
        """
        after = 0
        for block in self._blocks(rows):
            logits = self._pass(block, after)
            after = block[-1] + 1
            if block[-1] != rows[-1]:
                self.pause("forward")
        return logits

    def _blocks(self, rows: Sequence[int]) -> Iterator[Sequence[int]]:
        """Even parts of `rows`, as large as a pass may be."""
        # LongRoPE takes its frequencies from a pass's last position: none ends in another regime.
        regime, start = self.runner.support.regime, 0
        whole = regime(len(self.ids))
        most = _PRODUCTS if self.runner.products else _BLOCK
        if len(rows) == len(self.ids) and not self.runner.products:
            most = len(rows)
        while left := len(rows) - start:
            if self.pauses is not None:
                most = self.pauses.rows()
            end = start + -(-left // -(-left // most))
            while end < len(rows) and regime(rows[end - 1] + 1) != whole:
                end += 1
            yield rows[start:end]
            start = end

    def _pass(self, block: Sequence[int], after: int) -> Tensor:
        self._count(block, self.layers)
        patched = self._patches(block, after)
        return self.runner.forward(self.buffer, self.ids[: block[-1] + 1], block, patches=patched)

    def pause(self, part: str) -> None:
        if self.pauses is None:
            return
        self.clock.lap(part)
        self.runner.lock.release()
        try:
            self.pauses.pause()
        finally:
            self.runner.lock.acquire()
        self.clock.lap("wait")

    def _count(self, rows: Sequence[int], layers: int) -> None:
        self.passes.append(ForwardPass(len(rows), layers))
        if layers == self.layers:
            self.computed.update(rows)
