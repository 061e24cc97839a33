"""A queue that serves tenants in turns, each in the order it asked."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: OrderedDict[str, deque[T]] = OrderedDict()

    def put(self, owner: str, item: T) -> None:
        with self._lock:
            self._queues.setdefault(owner, deque()).append(item)

    def take(self, fits: Callable[[T], bool]) -> T | None:
        """The first of whose turn it is, and the turn goes on; None if that one doesn't fit."""
        with self._lock:
            if not self._queues:
                return None
            owner, queue = next(iter(self._queues.items()))
            if not fits(queue[0]):
                return None
            item = queue.popleft()
            if queue:
                self._queues.move_to_end(owner)
            else:
                del self._queues[owner]
            return item

    def discard(self, item: T) -> None:
        with self._lock:
            for owner, queue in list(self._queues.items()):
                if item in queue:
                    queue.remove(item)
                    if not queue:
                        del self._queues[owner]

    def drain(self) -> list[T]:
        """Take all."""
        with self._lock:
            items = [item for queue in self._queues.values() for item in queue]
            self._queues.clear()
            return items

    def __iter__(self) -> Iterator[T]:
        with self._lock:
            return iter([item for queue in self._queues.values() for item in queue])

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._queues.values()))
