"""`python -m benchmarks.serving`: what a server gives many clients, and what it keeps apart.

Every figure is a client's: the `openai` package against `kvboost serve` in a process of its own.
Writes docs/serving.md between its marks.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar

import openai
import psutil
import torch
import typer
from rich.progress import track

from benchmarks.report import between_marks, head
from kvboost import hub
from kvboost.bench.material import Material

T = TypeVar("T")
_CLIENTS, _ANSWER = 8, 96


@dataclass
class Heard:
    """What a client heard of one answer. Times are seconds of its own clock."""

    ttft: float
    gaps: list[float]
    total: float
    tokens: int
    usage: dict[str, Any]
    server_ttft: float
    text: str = ""


@dataclass
class Served:
    """A running server."""

    url: str
    process: subprocess.Popen[str]
    clients: dict[str, openai.AsyncOpenAI] = field(default_factory=dict)

    def client(self, key: str = "none") -> openai.AsyncOpenAI:
        if key not in self.clients:
            self.clients[key] = openai.AsyncOpenAI(
                base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=600
            )
        return self.clients[key]

    @property
    def memory(self) -> int:
        """Bytes of the process, resident."""
        return int(psutil.Process(self.process.pid).memory_info().rss)


@contextmanager
def server(model: str, *options: str) -> Iterator[Served]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = str(Path(sys.executable).with_name("kvboost"))
    command = [program, "serve", "--model", model, "--port", str(port)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([*command, *options], stdout=log, stderr=log, text=True)
        served = Served(f"http://127.0.0.1:{port}", process)
        try:
            asyncio.run(_until_up(served))
            yield served
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def talk(served: Served, what: Coroutine[Any, Any, T]) -> T:
    """Run it, and hang up."""

    async def run() -> T:
        try:
            return await what
        finally:
            for client in served.clients.values():
                await client.close()

    return asyncio.run(run())


async def _until_up(served: Served) -> None:
    for _ in range(600):
        try:
            with socket.create_connection(("127.0.0.1", int(served.url.rsplit(":", 1)[1]))):
                return
        except OSError:
            await asyncio.sleep(0.2)
    raise SystemExit("the server did not start")


async def ask(client: openai.AsyncOpenAI, prompt: str, tokens: int = _ANSWER, **own: Any) -> Heard:
    start, times, text, usage = time.perf_counter(), [], [], {}
    raw = await client.chat.completions.with_raw_response.create(
        model="default",
        messages=[{"role": "user", "content": prompt}],
        max_tokens=tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=own,
    )
    async for chunk in raw.parse():
        if chunk.choices and chunk.choices[0].delta.content:
            times.append(time.perf_counter())
            text.append(chunk.choices[0].delta.content)
        if chunk.usage:
            usage = chunk.usage.model_dump()
    gaps = [b - a for a, b in pairwise(times)]
    return Heard(
        ttft=(times[0] if times else time.perf_counter()) - start,
        gaps=gaps,
        total=time.perf_counter() - start,
        tokens=usage["completion_tokens"],
        usage=usage,
        server_ttft=float(raw.headers["x-kvboost-ttft-ms"]) / 1e3,
        text="".join(text),
    )


class Texts:
    """Prompts of source files that are on this machine, of each file once."""

    def __init__(self, material: Material, tokenizer: Any, seed: int) -> None:
        self.tokenizer, self.rng = tokenizer, random.Random(seed)
        self._files = [text for _, text in material.files]
        self.rng.shuffle(self._files)

    def piece(self, tokens: int) -> str:
        """So many tokens of a file."""
        for n, text in enumerate(self._files):
            ids = self.tokenizer(text).input_ids
            if len(ids) > tokens + 50:
                del self._files[n]
                start = self.rng.randrange(len(ids) - tokens)
                return str(self.tokenizer.decode(ids[start : start + tokens]))
        raise SystemExit("no file is left that is long enough")

    def mixed(self, n: int) -> tuple[list[str], list[str]]:
        """Documents to read ahead, and prompts: every other one asks about two of those in some
        order, the others about new text."""
        known = [self.piece(300) for _ in range(8)]
        asked = []
        for number in range(n):
            docs = self.rng.sample(known, 2) if number % 2 else [self.piece(300), self.piece(300)]
            asked.append("\n\n".join(docs) + f"\n\nExplain part {number} of this code in detail.")
        return known, asked


# -- bar 4


def load(model: str, texts: Texts, n: int) -> list[str]:
    known, asked = texts.mixed(n)
    rows: dict[str, tuple[float, list[Heard]]] = {}
    for name, clients in (("one at a time", 1), (f"{_CLIENTS} clients", _CLIENTS)):
        with server(model) as served:
            rows[name] = talk(served, _drive(served, known, asked, clients))
    lines = head("", "seconds", "tokens/s", "TTFT median", "gap median", "gap p95", "reused")
    for name, (took, heard) in rows.items():
        gaps = [g for h in heard for g in h.gaps]
        made, ttft = sum(h.tokens for h in heard), statistics.median(h.ttft for h in heard)
        reused = sum(_reused(h) for h in heard) / sum(h.usage["prompt_tokens"] for h in heard)
        cells = [f"{took:.1f}", f"{made / took:.1f}", _ms(ttft), _ms(statistics.median(gaps))]
        lines.append(_row(name, *cells, _ms(_p95(gaps)), f"{reused:.0%}"))
    (one, _), (many, _) = rows.values()
    said = f"throughput **{one / many:.2f}x** (bar 2.5x)"
    return [*lines, f"\n{n} requests of {_ANSWER} tokens; {said}."]


async def _drive(
    served: Served, known: Sequence[str], asked: Sequence[str], clients: int
) -> tuple[float, list[Heard]]:
    client = served.client()
    for document in known:
        await ask(client, document + "\n\nRead this.", tokens=1)
    waiting, heard = iter(asked), []

    async def one() -> None:
        for prompt in waiting:
            heard.append(await ask(client, prompt))

    start = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(clients)))
    return time.perf_counter() - start, heard


def stalls(model: str, texts: Texts) -> list[str]:
    """Seven answers go on while long prompts arrive."""

    async def run(served: Served) -> tuple[list[float], list[float], list[float]]:
        client = served.client()
        alone = [await ask(client, texts.piece(200), tokens=100) for _ in range(3)]
        full = await asyncio.gather(
            *(ask(client, texts.piece(200), tokens=100) for _ in range(_CLIENTS - 1))
        )
        talk = [
            asyncio.ensure_future(ask(client, texts.piece(200), tokens=160))
            for _ in range(_CLIENTS - 1)
        ]
        await asyncio.sleep(2)
        while not all(t.done() for t in talk):
            await ask(client, texts.piece(2500), tokens=1)
        busy = [await t for t in talk]
        # The first gaps are from before the first long prompt.
        return (
            [g for h in alone for g in h.gaps],
            [g for h in full for g in h.gaps[20:]],
            [g for h in busy for g in h.gaps[20:]],
        )

    with server(model) as served:
        found = talk(served, run(served))
    lines = head("gaps between tokens", "median", "p95", "p95 over the unloaded")
    others = f"{_CLIENTS - 1} clients"
    names = ("one client", others, f"{others} while prompts of 2,500 arrive")
    for name, gaps in zip(names, found, strict=True):
        over = f"{_p95(gaps) / _p95(found[0]):.2f}"
        lines.append(_row(name, _ms(statistics.median(gaps)), _ms(_p95(gaps)), over))
    return [*lines, "\nBar: the last figure below 3."]


def flat(model: str, n: int) -> list[str]:
    """Memory over many requests, beyond what the store is allowed."""

    async def run(served: Served) -> list[int]:
        client, rng, seen = served.client(), random.Random(1), []
        words = [f"word{k}" for k in range(500)]
        for start in track(range(0, n, 40), "Memory"):
            prompts = [" ".join(rng.choices(words, k=rng.randint(5, 60))) for _ in range(40)]
            for part in range(0, 40, _CLIENTS):
                await asyncio.gather(
                    *(ask(client, p, tokens=3) for p in prompts[part : part + _CLIENTS])
                )
            if start % 200 == 0:
                seen.append(served.memory)
        return [*seen, served.memory]

    with server(model, "--max-bytes", str(64 << 20)) as served:
        seen = talk(served, run(served))
    lines = head("requests", *(str(200 * k) for k in range(1, len(seen))))
    return [*lines, _row("resident, MB", *(f"{b / 1e6:.0f}" for b in seen[1:]))]


# -- bars 5 and 6


def overhead(model: str, texts: Texts) -> list[str]:
    async def run(served: Served) -> list[float]:
        client, prompt = served.client(), texts.piece(1000)
        await ask(client, prompt, tokens=2)
        return [(h.ttft - h.server_ttft) for _ in range(20) for h in [await ask(client, prompt, 2)]]

    with server(model) as served:
        extra = talk(served, run(served))
    usual, most = _ms(statistics.median(extra)), _ms(max(extra))
    return [
        f"\nOver HTTP a warm exact hit of 1,000 tokens takes {usual} more to its first token than "
        f"the engine's own clock says ({most} at most of 20; bar 10 ms)."
    ]


def tenants(model: str, texts: Texts, n: int) -> list[str]:
    """The same document from two tenants: B's time after A sent it, and without."""
    keys: list[dict[str, Any]] = [{"name": name, "key": f"key-{name}"} for name in "ab"]
    keys.append({"name": "corpus", "key": "key-corpus", "namespace": "common"})

    async def run(served: Served) -> tuple[list[float], list[int], list[int]]:
        ratios, cached, common = [], [], []
        for number in range(n):
            mine, other = texts.piece(400), texts.piece(400)
            await ask(served.client("key-a"), mine, tokens=2)
            pair = [("seen", mine), ("unseen", other)]
            took = {}
            for name, text in pair if number % 2 else pair[::-1]:
                heard = await ask(served.client("key-b"), text, tokens=2)
                took[name] = heard.ttft
                if name == "seen":
                    cached.append(_reused(heard))
            ratios.append(took["seen"] / took["unseen"])
            shared = texts.piece(400)
            await ask(served.client("key-corpus"), shared, tokens=2)
            common.append(_cached(await ask(served.client("key-b"), shared, tokens=2)))
        return ratios, cached, common

    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"keys": keys}, file)
        file.flush()
        with server(model, "--api-keys", file.name, "--shared", "common") as served:
            ratios, cached, common = talk(served, run(served))
    low, high = _interval(ratios)
    ratio = f"{statistics.median(ratios):.3f} [{low:.3f}, {high:.3f}]"
    return [
        f"\nTenant B, with a document that tenant A has just sent: at most {max(cached)} of about "
        f"430 tokens reused; time to the first token {ratio} of that with a "
        f"document nobody has sent (median of {n} pairs). With one of the shared namespace: "
        f"{min(common)} to {max(common)} tokens exact."
    ]


def _interval(values: Sequence[float]) -> tuple[float, float]:
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(2000))
    return medians[49], medians[1949]


def _reused(heard: Heard) -> int:
    details = heard.usage["prompt_tokens_details"]
    return int(details["cached_tokens"] + details["moved_tokens"])


def _cached(heard: Heard) -> int:
    return int(heard.usage["prompt_tokens_details"]["cached_tokens"])


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[int(0.95 * len(values))]


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def main(
    model: Annotated[str, typer.Option(help="As for kvboost serve.")] = "default",
    n: Annotated[int, typer.Option(help="Requests of the load.")] = 32,
    many: Annotated[int, typer.Option(help="Requests whose memory is watched.")] = 2000,
    only: Annotated[list[str] | None, typer.Option(help="Parts, as they are named here.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("docs"),
) -> None:
    """Minutes on two cores, with nothing beside it."""
    _, tokenizer = hub.load(model, torch.float32, "cpu")
    texts = Texts(Material.of(tokenizer, None), tokenizer, 3)
    parts = {
        "load": lambda: load(model, texts, n),
        "stalls": lambda: stalls(model, texts),
        "overhead": lambda: overhead(model, texts),
        "tenants": lambda: tenants(model, texts, 30),
        "flat": lambda: flat(model, many),
    }
    lines: list[str] = []
    for name, part in parts.items():
        if only is None or name in only:
            new = part()
            print("\n".join(new), flush=True)
            lines += new
    if only is None:
        between_marks(out / "serving.md", "\n".join(lines))


if __name__ == "__main__":
    typer.run(main)
