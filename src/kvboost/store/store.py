"""Stored chunks wherever they are: in memory first, then on shelves (disk, a shared server).

One request looks up through one `Lookup`. Knows nothing of models. Safe to use from several
threads.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from kvboost.keys import ChunkKey, lineages
from kvboost.plan import Entry, ReusePlan, make_plan
from kvboost.store.codec import PackedKV
from kvboost.store.entry import Codebook
from kvboost.store.memory import Memory
from kvboost.store.shelf import Found, Shelf, TierStats
from kvboost.types import Chunk

_ASKS = 64
"""Questions that one plan may ask the shelves beyond the first two, about neighbours of what was
found; unanswered, a run counts as one among new neighbours."""

_ASKING = 0.1
"""Of the time that computing the prompt takes, what those questions may take together."""

PACE = 1e-3
"""Seconds a token is taken to cost until one has been measured."""

_LITTLE = 0.15
"""So small a share of a prompt is not reused: behind it attention is masked, which costs more than
the share saves (2,400 tokens of a 135M model on two cores: 1.09 of a plain prefill with 2 or 10 %
reused, .99 with 20 %; 1,000 tokens: 1.06, 1.02, .91)."""

_PATIENCE = 5.0
"""Seconds that loading may take as long as nobody knows what computing takes."""


class ChunkStore:
    """Memory, and shelves below it in order of speed.

    What is stored goes to memory at once and to every shelf in the background. What a plan takes
    from a shelf goes to memory, and to the shelves above.
    """

    def __init__(self, memory: Memory, shelves: Sequence[Shelf] = ()) -> None:
        self.memory = memory
        self.shelves = tuple(shelves)

    def lookup(
        self, chunks: Sequence[Chunk], books: Sequence[Codebook], pace: float | None, *, move: bool
    ) -> Lookup:
        """What is known about a prompt's chunks. books: of the own namespace, and of a shared one
        if there is one. pace: seconds to compute a token, if known; a shelf that takes longer than
        that is left out."""
        self.memory.begin()
        own, *others = [Lookup(self, chunks, book, pace, move=move) for book in books]
        return SharedLookup(own, others[0]) if others else own

    def put(
        self,
        entry: Entry,
        kv: PackedKV,
        seconds: float,
        spared: Container[ChunkKey],
        book: Codebook,
    ) -> None:
        """Store a chunk, if it is wanted. seconds, spared: see `Memory.put`."""
        if not self.memory.wants(entry):
            return
        self.memory.put(entry, kv, seconds, spared)
        for shelf in self.shelves:
            shelf.store(entry, kv, book, seconds)

    def flush(self, seconds: float) -> bool:
        """Wait until all that was stored is written; False if that takes longer."""
        written = [shelf.flush(seconds) for shelf in self.shelves]
        return all(written)

    def close(self) -> None:
        """Write what is queued and let go of the shelves."""
        for shelf in self.shelves:
            shelf.close()

    def tiers(self) -> tuple[TierStats, ...]:
        return tuple(shelf.stats() for shelf in self.shelves)


class Lookup:
    """What is stored for one request: a `plan.Index`, its plan, and the KV that the plan names.

    Entries on shelves are asked for in batches before planning; what planning asks beyond that
    (neighbours of what was found) is asked one by one, up to a limit.
    """

    def __init__(
        self,
        store: ChunkStore,
        chunks: Sequence[Chunk],
        book: Codebook,
        pace: float | None,
        *,
        move: bool,
    ) -> None:
        self._memory, self.chunks, self.book = store.memory, chunks, book
        self._pace, self.move = pace, move
        self._shelves = [shelf for shelf in store.shelves if shelf.up]
        self._found: dict[ChunkKey, tuple[Found, Shelf]] = {}
        self._unknown: set[ChunkKey] = set()
        self._gone: set[ChunkKey] = set()
        self._groups: dict[ChunkKey, list[Entry]] = {}
        self.loaded: dict[ChunkKey, PackedKV] = {}
        self._asks = _ASKS
        if self._shelves:
            self._prefetch()

    def plan(self) -> ReusePlan:
        """What would be reused, by the index alone: all that can be, or nothing if it is little."""
        plan = make_plan(self.chunks, self.book.keys, self, move=self.move)
        reused = sum(splice.end - splice.start for splice in plan.splices)
        return plan if reused >= _LITTLE * plan.length else ReusePlan(plan.length, ())

    # -- plan.Index

    def get(self, key: ChunkKey) -> Entry | None:
        entry = self._memory.get(key)
        if entry is None and key not in self._found and key not in self._unknown:
            self._get([key])
        return entry or (self._found[key][0].entry if key in self._found else None)

    def children(self, parent: ChunkKey) -> Iterable[Entry]:
        if parent not in self._groups:
            self._find([parent])
        return self._merged(self._memory.children(parent), parent)

    def variants(self, content: ChunkKey) -> Iterable[Entry]:
        found = self._merged(self._memory.variants(content), content)
        # A prompt's first tokens are its attention sink; elsewhere they would be a second.
        return sorted((e for e in found if e.position > 0), key=lambda e: not e.exact)

    def _merged(self, entries: Iterable[Entry], group: ChunkKey) -> list[Entry]:
        found = [e for e in self._groups.get(group, ()) if e.key in self._found]
        return list({e.key: e for e in (*entries, *found)}.values())

    # -- shelves

    def _prefetch(self) -> None:
        """Ask in two batches what the shelves know of the prompt's chunks; forget what a shelf
        knows if loading it takes longer than computing it."""
        keys, chunks = self.book.keys, self.chunks
        chain = lineages(chunks, chunks[-1].end, keys)
        absent = [key for key in chain if self._memory.get(key) is None]
        if not absent:
            return
        self._get(absent)
        if self.move:
            missed = [c for c, k in zip(chunks, chain, strict=True) if k in self._unknown]
            contents = dict.fromkeys(keys.content(c.ids) for c in missed)
            self._find([c for c in contents if not self._memory.variants(c)])
        if self._pace is None:
            return
        for shelf in list(self._shelves):
            mine = [found for found, where in self._found.values() if where is shelf]
            once = {found.entry.content: found for found in mine}.values()
            tokens, size = sum(len(f.entry.ids) for f in once), sum(f.bytes for f in once)
            if once and not shelf.faster(size, self._pace * tokens):
                self._leave(shelf)
        slowest = max((shelf.latency for shelf in self._shelves), default=0.0)
        affordable = _ASKING * self._pace * chunks[-1].end / max(slowest, 1e-6)
        self._asks = min(self._asks, int(affordable))

    def _leave(self, shelf: Shelf) -> None:
        """Go on without this shelf."""
        self._shelves.remove(shelf)
        for key in [key for key, (_, where) in self._found.items() if where is shelf]:
            if key not in self.loaded:
                self._drop(key)

    def _get(self, keys: Sequence[ChunkKey]) -> None:
        for shelf in self._ask():
            keys = [key for key in keys if key not in self._found]
            self._note(shelf, shelf.get(keys, self.book) if keys else [])
        self._unknown.update(key for key in keys if key not in self._found)

    def _find(self, groups: Sequence[ChunkKey]) -> None:
        for group in groups:
            self._groups[group] = []
        for shelf in self._ask():
            groups = [group for group in groups if not self._groups[group]]
            answers = shelf.find(groups, self.book) if groups else []
            for group, found in zip(groups, answers, strict=True):
                self._note(shelf, found)
                self._groups[group] = [f.entry for f in found]

    def _ask(self) -> list[Shelf]:
        self._asks -= 1
        return self._shelves if self._asks >= 0 else []

    def _note(self, shelf: Shelf, found: Iterable[Found | None]) -> None:
        for f in found:
            if f is not None and f.entry.key not in self._gone:
                self._found.setdefault(f.entry.key, (f, shelf))

    def _drop(self, key: ChunkKey) -> None:
        self._found.pop(key, None)
        self._unknown.add(key)
        self._gone.add(key)

    # -- KV

    def fetch(self, plan: ReusePlan) -> list[list[PackedKV]] | None:
        """The KV of every piece of every splice; what comes from a shelf is kept in memory.

        None if one is gone, or late: a new plan won't name it.
        """
        pieces = [piece for splice in plan.splices for piece in splice.pieces]
        entries = {piece.entry.key: piece.entry for piece in pieces}
        if not self.load(entries):
            return None
        return [[self.loaded[p.entry.key] for p in splice.pieces] for splice in plan.splices]

    def load(self, entries: Mapping[ChunkKey, Entry]) -> bool:
        """Have the KV of these in `loaded`; False if one is gone, or late."""
        for key in entries.keys() - self.loaded.keys():
            if kv := self._memory.load(key):
                self.loaded[key] = kv
        for shelf in list(self._shelves):
            wanted = [
                entry
                for key, entry in entries.items()
                if key not in self.loaded and key in self._found and self._found[key][1] is shelf
            ]
            if wanted:
                self._load(shelf, wanted, entries.keys())
        gone = entries.keys() - self.loaded.keys()
        for key in gone:
            self._drop(key)
        return not gone

    def _load(self, shelf: Shelf, wanted: Sequence[Entry], spared: Container[ChunkKey]) -> None:
        tokens = sum(len(entry.ids) for entry in wanted)
        patience = tokens * self._pace if self._pace else _PATIENCE
        loaded = shelf.load(wanted, self.book, patience)
        above = self._shelves[: self._shelves.index(shelf)]
        for entry in wanted:
            if kv := loaded.get(entry.key):
                kv = kv.to(self.book.layout.device)
                seconds = (self._pace or PACE) * len(entry.ids)
                self.loaded[entry.key] = kv
                self._memory.put(entry, kv, seconds, spared)
                for other in above:
                    other.store(entry, kv, self.book, seconds)
        if len(loaded) < len(wanted):  # gone or late: don't wait for it again and again
            self._leave(shelf)


class SharedLookup(Lookup):
    """What is stored for one request in its own namespace and in a shared one: a chain may begin in
    the one and go on in the other.

    Keys differ between the two, the chunks are the same; entries keep the keys they are stored by.
    """

    def __init__(self, own: Lookup, other: Lookup) -> None:
        self._own, self._other = own, other
        self.chunks, self.book, self.move = own.chunks, own.book, own.move
        mine, theirs = own.book.keys, other.book.keys
        end = own.chunks[-1].end
        chains = (lineages(own.chunks, end, keys) for keys in (mine, theirs))
        self._twins = {mine.root: theirs.root, **dict(zip(*chains, strict=True))}
        self._twins |= {mine.content(c.ids): theirs.content(c.ids) for c in own.chunks}
        self._theirs: set[ChunkKey] = set()

    def get(self, key: ChunkKey) -> Entry | None:
        if key not in self._theirs:
            entry = self._own.get(key)
            if entry is not None or key not in self._twins:
                return entry
        found = self._other.get(self._twins.get(key, key))
        self._note_theirs([found] if found else [])
        return found

    def children(self, parent: ChunkKey) -> Iterable[Entry]:
        return self._both(parent, Lookup.children)

    def variants(self, content: ChunkKey) -> Iterable[Entry]:
        return sorted(self._both(content, Lookup.variants), key=lambda e: not e.exact)

    def fetch(self, plan: ReusePlan) -> list[list[PackedKV]] | None:
        entries = {p.entry.key: p.entry for splice in plan.splices for p in splice.pieces}
        theirs = {key: entry for key, entry in entries.items() if key in self._theirs}
        mine = {key: entry for key, entry in entries.items() if key not in theirs}
        if not (self._own.load(mine) and self._other.load(theirs)):
            return None
        loaded = {**self._own.loaded, **self._other.loaded}
        return [[loaded[p.entry.key] for p in splice.pieces] for splice in plan.splices]

    def _both(
        self, group: ChunkKey, ask: Callable[[Lookup, ChunkKey], Iterable[Entry]]
    ) -> list[Entry]:
        found = [] if group in self._theirs else list(ask(self._own, group))
        if group in self._twins or group in self._theirs:
            others = list(ask(self._other, self._twins.get(group, group)))
            self._note_theirs(others)
            found += others
        return found

    def _note_theirs(self, entries: Iterable[Entry]) -> None:
        self._theirs.update(key for e in entries for key in (e.key, e.parent))
