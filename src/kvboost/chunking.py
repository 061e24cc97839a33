"""Where a prompt is cut into chunks: a function of its token ids alone.

A *natural* boundary is a local maximum of a rolling hash: the hash of the WINDOW tokens before it
is strictly larger than that of every position within `radius` on either side. So it depends on
radius + WINDOW tokens before and radius tokens after it, and on nothing else: wherever that text
lands, it is cut there again. Two of them are at least radius + 1 >= min_tokens apart.

A gap longer than max_tokens holds no natural boundary (text that repeats itself, or bad luck). It
is cut by a sweep from its left end, so those cuts depend on where the gap begins, and are in step
again at the next natural boundary.

What an edit changes, precisely: boundaries max_tokens + radius or more before it stay. At and after
the first natural boundary that lies radius + WINDOW + STRUCTURE_GAP tokens or more behind it, all
boundaries are the old ones, shifted. Borders resynchronise at once.

This module knows nothing about tokenisers, text, models or storage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from kvboost.types import Chunk

WINDOW = 16  # tokens that a hash covers
STRUCTURE_GAP = 8  # special tokens this close to the one before belong to the same border
_BITS_PER_TOKEN = 4
_MASK = (1 << (WINDOW * _BITS_PER_TOKEN)) - 1


@dataclass(frozen=True, slots=True)
class ChunkingConfig:
    """Chunk lengths in tokens. A chunk is shorter than `min_tokens` only if it is all there is
    between two borders, never longer than `max_tokens`; `mean_tokens` is what text gives."""

    min_tokens: int = 32
    mean_tokens: int = 80
    max_tokens: int = 256

    def __post_init__(self) -> None:
        if self.min_tokens < 1:
            raise ValueError(f"min_tokens is {self.min_tokens}; set it to 1 or more")
        if self.mean_tokens < 2 * self.min_tokens:
            raise ValueError(
                f"mean_tokens is {self.mean_tokens}; set it to at least twice min_tokens "
                f"({2 * self.min_tokens}), or lower min_tokens"
            )
        if self.max_tokens < self.mean_tokens:
            raise ValueError(
                f"max_tokens is {self.max_tokens}; set it to at least mean_tokens "
                f"({self.mean_tokens}); three times as much is a good start"
            )

    @property
    def radius(self) -> int:
        """How far a natural boundary looks to either side. A random hash has one local maximum
        in 2 * radius + 1 positions. At least min_tokens - 1, since mean >= 2 * min."""
        return (self.mean_tokens - 1) // 2


class Chunker:
    """Splits token ids into chunks. Holds no state between calls; safe to share by threads."""

    def __init__(self, config: ChunkingConfig, special_ids: frozenset[int] = frozenset()) -> None:
        self.config = config
        self.special_ids = special_ids

    def split(self, ids: Sequence[int], borders: Iterable[int] = ()) -> list[Chunk]:
        """Chunks that cover `ids` exactly, in order, none empty.

        `borders` are token indices at which a chunk must start, such as the ends of messages or
        documents. What lies between two borders is split without a look at anything outside."""
        tokens = tuple(ids)
        edges = [0, *_checked(borders, len(tokens)), len(tokens)]
        return [
            Chunk(start, end, tokens[start:end])
            for left, right in pairwise(edges)
            for start, end in pairwise(left + cut for cut in self._cuts(tokens[left:right]))
        ]

    def _cuts(self, segment: tuple[int, ...]) -> Iterator[int]:
        """All boundaries of a segment between two of the caller's borders, both ends included."""
        yield 0
        edges = [0, *self._structure(segment), len(segment)]
        for left, right in pairwise(edges):
            yield from (left + cut for cut in _inner_cuts(segment[left:right], self.config))
            if right > left:
                yield right

    def _structure(self, segment: tuple[int, ...]) -> Iterator[int]:
        """Special tokens with no other special token, nor the segment's start, in the
        STRUCTURE_GAP tokens before: the first of a group such as `<|im_end|>\\n<|im_start|>`.

        Looks at special tokens, not at accepted ones: a rule that counted on from the last
        accepted one would carry an edit through a whole chat of short messages."""
        if not self.special_ids:
            return
        previous = 0
        for i, token in enumerate(segment):
            if token in self.special_ids:
                if i - previous > STRUCTURE_GAP:
                    yield i
                previous = i


def _checked(borders: Iterable[int], length: int) -> list[int]:
    """The borders that are not the prompt's own ends: sorted, each once."""
    unique = sorted(set(borders))
    if unique and (unique[0] < 0 or unique[-1] > length):
        raise ValueError(
            f"borders run from {unique[0]} to {unique[-1]}, but the prompt has {length} tokens; "
            "give token indices from 0 to its length"
        )
    return [border for border in unique if 0 < border < length]


@lru_cache(maxsize=1 << 16)
def _mix(token: int) -> int:
    """splitmix64: neighbouring ids get unrelated 64-bit values, the same in every process."""
    z = (token + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return z ^ (z >> 31)


def _roll(gear: int, mixed: int) -> int:
    # A token has been shifted out after WINDOW steps: the hash covers exactly the last WINDOW.
    return ((gear << _BITS_PER_TOKEN) + mixed) & _MASK


def _inner_cuts(tokens: tuple[int, ...], config: ChunkingConfig) -> Iterator[int]:
    """Boundaries strictly inside one segment: the natural ones, and the sweep's in long gaps."""
    if len(tokens) < 2 * config.min_tokens:
        return
    hashes = list(accumulate(map(_mix, tokens), _roll))
    start = 0
    for end in _natural_cuts(hashes, config):
        yield from _sweep(hashes, start, end, config)
        yield end
        start = end
    yield from _sweep(hashes, start, len(tokens), config)


def _natural_cuts(hashes: list[int], config: ChunkingConfig) -> Iterator[int]:
    """Cuts behind each i whose hash is strictly the largest in [i - radius, i + radius].

    Such an i is the largest of any radius + 1 neighbours that include it, so one look at each
    aligned block finds every candidate; the blocks do not influence which ones are accepted."""
    radius, last = config.radius, len(hashes) - config.min_tokens
    for left in range(0, len(hashes), radius + 1):
        block = hashes[left : left + radius + 1]
        peak = max(block)
        i = left + block.index(peak)
        if config.min_tokens <= i + 1 <= last:
            around = hashes[max(0, i - radius) : i + radius + 1]
            if max(around) == peak and around.count(peak) == 1:
                yield i + 1


def _sweep(hashes: list[int], start: int, end: int, config: ChunkingConfig) -> Iterator[int]:
    """Cuts that leave no piece of [start, end) longer than max, and none shorter than min.

    Each piece ends at the largest hash it may end at, the leftmost of equals."""
    peaks: deque[int] = deque()  # cuts still allowed, in order, their hashes never rising
    seen = start  # cuts up to here have been through `peaks`
    while end - start > config.max_tokens:
        first = start + config.min_tokens
        last = min(start + config.max_tokens, end - config.min_tokens)
        for cut in range(max(seen + 1, first), last + 1):
            while peaks and hashes[peaks[-1] - 1] < hashes[cut - 1]:
                peaks.pop()
            peaks.append(cut)
        seen = last
        while peaks[0] < first:
            peaks.popleft()
        start = peaks[0]
        yield start
