"""A request between its prompt and its end: a token at a time, by whoever computes the steps.

Knows tokens and text, not how logits are made.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, fields, replace

from torch import Tensor

from kvboost.engine import Engine, Prefilled
from kvboost.metrics import Stopwatch
from kvboost.options import Options
from kvboost.sampling import Answer
from kvboost.types import Completion, Timing, Usage

ROOM = 512
"""Tokens of an answer that a buffer has room for at first."""


@dataclass
class Generation:
    """A prompt that was prefilled, and its answer so far. limit: tokens that the answer may have.
    weights: the version of the model's weights that it is computed with."""

    prefilled: Prefilled
    answer: Answer
    limit: int
    options: Options
    weights: int | None
    clock: Stopwatch
    ttft: float = 0.0

    @property
    def over(self) -> bool:
        return self.answer.finished or len(self.answer.ids) >= self.limit

    @property
    def ids(self) -> list[int]:
        """The prompt and the answer so far."""
        return [*self.prefilled.prompt.ids, *self.answer.ids]

    @property
    def stored(self) -> list[int]:
        """The tokens whose KV is in the buffer: all but an answer's last."""
        return self.ids[: max(len(self.prefilled.prompt.ids), len(self.ids) - 1)]

    @property
    def usage(self) -> Usage:
        return replace(self.prefilled.usage, generated=len(self.answer.ids))

    @property
    def timing(self) -> Timing:
        laps = self.clock.parts
        parts = {f.name: laps[f.name] for f in fields(Timing) if f.name in laps}
        total = self.ttft + parts.get("decode", 0.0) + parts.get("store", 0.0)
        return Timing(ttft=self.ttft, total=total, **parts)

    def take(self, logits_1V: Tensor) -> str:
        """The next token; the text that may be shown now."""
        first = not self.answer.ids
        piece = self.answer.take(logits_1V, self.prefilled.prompt.ids)
        self.clock.lap("sample" if first else "decode")
        if first:
            self.ttft = self.clock.elapsed()
        if not self.over:
            self._make_room()
        return piece

    def _make_room(self) -> None:
        """For the next token. Few answers get as long as they may."""
        buffer, tokens = self.prefilled.buffer, len(self.ids)
        if tokens > buffer.capacity:
            most = len(self.prefilled.prompt.ids) + self.limit - 1
            larger = buffer.copy(buffer.capacity, min(most, 2 * buffer.capacity))
            self.prefilled = replace(self.prefilled, buffer=larger)

    def steps(self, engine: Engine) -> Generator[str, None, None]:
        """Compute and yield what there is to show, until the answer is over."""
        logits = self.prefilled.logits
        while True:
            if piece := self.take(logits):
                yield piece
                self.clock.skip()
            if self.over:
                break
            logits = engine.step(self.prefilled, self.ids)
        if piece := self.answer.end():
            yield piece
            self.clock.skip()

    def completion(self) -> Completion:
        return Completion(
            text=self.answer.text,
            token_ids=tuple(self.answer.ids),
            finish_reason=self.answer.finish_reason,
            usage=self.usage,
            timing=self.timing,
            policy=self.options.policy.name,
            exact=self.prefilled.exact,
            passes=self.prefilled.passes,
        )
