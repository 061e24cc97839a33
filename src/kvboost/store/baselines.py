"""Eviction policies that exist to be compared with: no store offers them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container

from kvboost.keys import ChunkKey
from kvboost.store.eviction import Ranking, Worth


class LFU:
    """The chunk used least often goes first; of equals the one used longest ago, of one request's
    the deepest in the prompt. Uses are forgotten with the chunk."""

    name = "lfu"

    def __init__(self) -> None:
        self._now = 0
        self._uses: dict[ChunkKey, int] = {}
        self._positions: dict[ChunkKey, int] = {}
        self._ranking = Ranking()

    def tick(self) -> None:
        self._now += 1
        self._ranking.recall()

    def add(self, key: ChunkKey, worth: Worth) -> None:
        self._uses[key] = 0
        self._positions[key] = worth.position
        self.hit(key, 1.0)

    def hit(self, key: ChunkKey, share: float) -> None:
        self._uses[key] += 1
        self._ranking.put(key, (self._uses[key], self._now, -self._positions[key]))

    def victim(self, spared: Container[ChunkKey]) -> ChunkKey | None:
        return self._ranking.least(spared)

    def remove(self, key: ChunkKey, *, evicted: bool) -> None:
        del self._uses[key], self._positions[key]
        self._ranking.drop(key)


class S3FIFO:
    """S3-FIFO (Yang et al., SOSP 2023): a small queue, a main queue, and a ghost list.

    What is new enters the small queue, a tenth of the bytes; what was used more than once there
    moves on to the main queue, the rest leaves and is remembered. What is remembered enters the
    main queue at once. There, used chunks go round again, one use (of at most 3) less each time.

    Two liberties: the ghost list knows contents, not keys, and the chunks of one request enter
    deepest first, so that chains lose their ends first here too.
    """

    name = "s3-fifo"

    def __init__(self) -> None:
        self._small: OrderedDict[ChunkKey, Worth] = OrderedDict()
        self._main: OrderedDict[ChunkKey, Worth] = OrderedDict()
        self._new: dict[ChunkKey, Worth] = {}
        self._uses: dict[ChunkKey, int] = {}
        self._ghosts: OrderedDict[ChunkKey, None] = OrderedDict()
        self._small_bytes = self._main_bytes = 0

    def tick(self) -> None:
        """The last request's chunks enter their queues."""
        for key, worth in sorted(self._new.items(), key=lambda new: -new[1].position):
            if worth.content in self._ghosts:
                del self._ghosts[worth.content]
                self._main[key] = worth
                self._main_bytes += worth.bytes
            else:
                self._small[key] = worth
                self._small_bytes += worth.bytes
        self._new.clear()

    def add(self, key: ChunkKey, worth: Worth) -> None:
        self._uses[key] = 0
        self._new[key] = worth

    def hit(self, key: ChunkKey, share: float) -> None:
        self._uses[key] = min(3, self._uses[key] + 1)

    def victim(self, spared: Container[ChunkKey]) -> ChunkKey | None:
        while True:
            small = next((key for key in self._small if key not in spared), None)
            main = next((key for key in self._main if key not in spared), None)
            full = self._small_bytes >= 0.1 * (self._small_bytes + self._main_bytes)
            if small is not None and (full or main is None):
                if self._uses[small] <= 1:
                    return small
                self._promote(small)
            elif main is not None:
                if self._uses[main] == 0:
                    return main
                self._uses[main] -= 1
                self._main.move_to_end(main)
            else:
                return next((key for key in self._new if key not in spared), None)

    def remove(self, key: ChunkKey, *, evicted: bool) -> None:
        del self._uses[key]
        self._new.pop(key, None)
        if key in self._main:
            self._main_bytes -= self._main.pop(key).bytes
        elif key in self._small:
            worth = self._small.pop(key)
            self._small_bytes -= worth.bytes
            if evicted:
                self._ghosts[worth.content] = None
        while len(self._ghosts) > 0.9 * len(self._uses):
            self._ghosts.popitem(last=False)

    def _promote(self, key: ChunkKey) -> None:
        worth = self._main[key] = self._small.pop(key)
        self._small_bytes -= worth.bytes
        self._main_bytes += worth.bytes
        self._uses[key] = 0
