"""How much a prefill may compute at a time, so that answers in the making go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LEAST, _MOST = 16, 512
"""Rows of a pass. Fewer than so many cost nearly as much; with more, nobody could end a prefill."""


_SHARE = 0.8
"""Of the time that a step takes, what a pass of a prefill may take before the next step."""


class Turns:
    """What an engine asks between its passes (`kvboost.passes.Pauses`).

    While answers are in the making, a pass takes about as long as one of their steps: a token
    then comes after twice its usual time. For each request that waits it takes a step's time more,
    for small passes are dear and so are steps of few answers: eight that come at once are soon
    answered together. Times are measured, and smoothed.
    """

    def __init__(
        self, between: Callable[[], None], busy: Callable[[], bool], waiting: Callable[[], int]
    ) -> None:
        """between: takes the steps, and raises to end the prefill. busy: whether there are any.
        waiting: requests that wait to be read."""
        self._between, self._busy, self._waiting = between, busy, waiting
        self._step = 0.05
        self._row = 0.001
        self._given, self._since = 0, 0.0

    def rows(self) -> int:
        share = _SHARE + self._waiting()
        wanted = int(share * self._step / self._row) if self._busy() else _MOST
        self._given, self._since = min(max(wanted, _LEAST), _MOST), time.perf_counter()
        return self._given

    def pause(self) -> None:
        if self._given:
            took = (time.perf_counter() - self._since) / self._given
            self._row += 0.3 * (took - self._row)
            self._given = 0
        self._between()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step."""
        start = time.perf_counter()
        yield
        self._step += 0.2 * (time.perf_counter() - start - self._step)
