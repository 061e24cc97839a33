"""Traces made up after what people do: retrieval, chats, agents.

Deterministic by seed. Nothing here knows how they will be replayed.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from random import Random

from kvboost.errors import ConfigError
from kvboost.keys import DIGEST_BYTES, ChunkKey, KeyKind
from kvboost.store.trace import Cost, Trace, TraceChunk, TraceRequest

Piece = tuple[ChunkKey, int]
"""A chunk that has no place yet: content and tokens."""


class _Writer:
    """Makes up text that no one has written before."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self._seed = seed
        self._written = 0

    def text(self, low: int, high: int) -> list[Piece]:
        """Between `low` and `high` tokens in chunks of 32 to 256, 80 on average. What is left at
        the end is a shorter chunk."""
        left, pieces = self.rng.randint(low, high), []
        while left > 0:
            tokens = min(left, 32 + int(self.rng.expovariate(1 / 48)), 256)
            self._written += 1
            digest = _digest(b"%d %d" % (self._seed, self._written))
            pieces.append((ChunkKey(KeyKind.CONTENT, digest), tokens))
            left -= tokens
        return pieces

    def texts(self, count: int, low: int, high: int) -> list[list[Piece]]:
        return [self.text(low, high) for _ in range(count)]


class _Prompt:
    """Chunks in their place, by what stands before them."""

    def __init__(self, pieces: Iterable[Piece] = ()) -> None:
        self.chunks: list[TraceChunk] = []
        self.extend(pieces)

    def extend(self, pieces: Iterable[Piece]) -> None:
        for content, tokens in pieces:
            before = self.chunks[-1].lineage.digest if self.chunks else b""
            lineage = ChunkKey(KeyKind.PREFIX, _digest(before + content.digest))
            self.chunks.append(TraceChunk(content, lineage, tokens))

    def request(self, answer: Sequence[Piece]) -> TraceRequest:
        """What is here, answered; the answer stays here."""
        self.extend(answer)
        return TraceRequest(tuple(self.chunks), len(answer))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest().ljust(DIGEST_BYTES, b"\0")


class _Zipf:
    """Draws ranks 0 to n - 1, rank r with weight (r + 1) ** -exponent."""

    def __init__(self, n: int, exponent: float) -> None:
        self._ranks = range(n)
        self._weights = list(accumulate((r + 1) ** -exponent for r in range(n)))

    def draw(self, rng: Random, k: int = 1) -> list[int]:
        """`k` different ones."""
        found: dict[int, None] = {}
        while len(found) < k:
            found.update(dict.fromkeys(rng.choices(self._ranks, cum_weights=self._weights, k=1)))
        return list(found)


def retrieval(seed: int) -> Iterator[TraceRequest]:
    """A system prompt, 4 to 8 of 2,500 passages in any order, a question that is asked once.

    Passages have Zipf popularity, and it drifts: a request in five lets one of them swap places
    with any other.
    """
    writer = _Writer(seed)
    rng = writer.rng
    system = writer.text(300, 600)
    passages = writer.texts(2500, 80, 400)
    zipf = _Zipf(len(passages), 0.9)
    while True:
        if rng.random() < 0.2:
            a, b = zipf.draw(rng)[0], rng.randrange(len(passages))
            passages[a], passages[b] = passages[b], passages[a]
        chosen = [passages[r] for r in zipf.draw(rng, rng.randint(4, 8))]
        rng.shuffle(chosen)
        prompt = _Prompt([*system, *(piece for passage in chosen for piece in passage)])
        prompt.extend(writer.text(15, 60))
        yield prompt.request(writer.text(40, 250))


@dataclass
class _Chat:
    prompt: _Prompt
    turns: int
    pace: float


def chats(seed: int) -> Iterator[TraceRequest]:
    """40 conversations at a time, each of 1 to 40 turns (10 on average) and its own pace, behind
    one of five system prompts. When one ends, another begins; one in seven times it is an old one
    that goes on after a long while."""
    writer = _Writer(seed)
    rng = writer.rng
    systems = writer.texts(5, 300, 1200)
    zipf = _Zipf(len(systems), 1.0)
    ended: list[_Chat] = []

    def begin() -> _Chat:
        turns, pace = min(40, 1 + int(rng.expovariate(1 / 9.5))), rng.lognormvariate(0, 1)
        if len(ended) > 40 and rng.random() < 1 / 7:
            old = ended.pop(rng.randrange(len(ended) - 20))
            return _Chat(old.prompt, turns, pace)
        return _Chat(_Prompt(systems[zipf.draw(rng)[0]]), turns, pace)

    active = [begin() for _ in range(40)]
    while True:
        i = rng.choices(range(len(active)), [chat.pace for chat in active])[0]
        chat = active[i]
        chat.prompt.extend(writer.text(15, 250))
        yield chat.prompt.request(writer.text(60, 500))
        chat.turns -= 1
        if chat.turns == 0:
            ended.append(chat)
            active[i] = begin()


@dataclass
class _Agent:
    """The history is what follows tools and task: a list of steps."""

    head: list[Piece]
    files: list[list[Piece]]
    steps: int
    history: deque[list[Piece]] = field(default_factory=deque)
    prompt: _Prompt = field(default_factory=_Prompt)


def agents(seed: int) -> Iterator[TraceRequest]:
    """16 agents in turns of one to five steps. Tool definitions are shared by kind of agent,
    each task is new and takes 5 to 60 steps. A step's result is seen for the first time, or is a
    file of the agent's repository (200 of them) as it has been read before. When the history is
    over 5,000 tokens, all but its last four steps become a summary."""
    writer = _Writer(seed)
    rng = writer.rng
    tools = writer.texts(3, 800, 2500)
    repositories = [writer.texts(200, 100, 900) for _ in range(4)]
    zipf = _Zipf(200, 0.8)

    def begin() -> _Agent:
        head = [*rng.choice(tools), *writer.text(60, 300)]
        return _Agent(head, rng.choice(repositories), rng.randint(5, 60), prompt=_Prompt(head))

    def step(agent: _Agent) -> TraceRequest:
        action = writer.text(20, 150)
        request = agent.prompt.request(action)
        known = rng.random() < 0.4
        result = agent.files[zipf.draw(rng)[0]] if known else writer.text(30, 900)
        agent.history.append([*action, *result])
        agent.prompt.extend(result)
        if sum(tokens for done in agent.history for _, tokens in done) > 5000:
            kept = [agent.history.pop() for _ in range(4)][::-1]
            agent.history = deque([writer.text(150, 400), *kept])
            agent.prompt = _Prompt([*agent.head, *(p for done in agent.history for p in done)])
        agent.steps -= 1
        return request

    active = [begin() for _ in range(16)]
    while True:
        i = rng.randrange(len(active))
        for _ in range(rng.randint(1, 5)):
            yield step(active[i])
            if active[i].steps == 0:
                active[i] = begin()


def mixed(seed: int) -> Iterator[TraceRequest]:
    """The three others by turns, at random."""
    rng = Random(seed)
    streams = [retrieval(3 * seed), chats(3 * seed + 1), agents(3 * seed + 2)]
    while True:
        yield next(rng.choice(streams))


WORKLOADS: dict[str, Callable[[int], Iterator[TraceRequest]]] = {
    "retrieval": retrieval,
    "chats": chats,
    "agents": agents,
    "mixed": mixed,
}


def generate(kind: str, seed: int, requests: int) -> Trace:
    """The first `requests` of a workload. Raises ConfigError if there is none of this kind."""
    if kind not in WORKLOADS:
        raise ConfigError(f"there is no workload {kind!r}; known are {', '.join(WORKLOADS)}")
    return Trace(Cost(), tuple(islice(WORKLOADS[kind](seed), requests)))
