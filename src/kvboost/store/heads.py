"""Fronts of records that a tier keeps in one piece and can read the first bytes of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvboost.store.frame import front_size

_HEAD = 2048
"""Holds the front of a chunk of up to 400 tokens."""


def read_fronts(
    keys: Sequence[bytes], heads: Callable[[Sequence[bytes], int], list[bytes | None]]
) -> list[bytes | None]:
    """The front of each record, None for what is not there or is torn.

    heads(keys, n): the first n bytes of each record, or all of it if it is shorter.
    """
    found = heads(keys, _HEAD)
    ends = [front_size(head or b"") or 0 for head in found]
    longer = [n for n, end in enumerate(ends) if end > _HEAD]
    if longer:
        again = heads([keys[n] for n in longer], max(ends[n] for n in longer))
        for n, head in zip(longer, again, strict=True):
            found[n] = head
    return [
        head[:end] if head and 0 < end <= len(head) else None
        for head, end in zip(found, ends, strict=True)
    ]
