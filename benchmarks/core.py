"""The core's bars: what reuse costs and gives on one model, each against plain transformers."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.progress import track

from benchmarks.material import clip, reference_questions, sources
from benchmarks.measure import Plain, chat, first_token
from kvboost import (
    CacheBlendRecompute,
    DriftRecompute,
    KVBoost,
    NoRecompute,
    QueryRecompute,
    RecomputePolicy,
    SelectiveRecompute,
)
from kvboost.bench.stats import Interval, median_ratio
from kvboost.metrics import Divergence, divergence


@dataclass(frozen=True)
class Row:
    """One line of the report: time over plain transformers, and quality beside it."""

    what: str
    time: Interval
    kl: float = 0.0
    kl_max: float = 0.0
    top1: float = 1.0
    reused: float = 0.0
    bar: str = ""

    def json(self) -> dict[str, Any]:
        return asdict(self)


def cold(boost: KVBoost, n: int) -> list[Row]:
    """Nothing stored: what being ready to reuse costs. The two take turns at going first."""
    plain = Plain(boost)
    ttft, total = [], []
    first_token(boost, "Warm up."), plain.ttft("Warm up.")
    for turn, text in enumerate(track(sources(2000, boost.tokenizer)[:n], "Cold prompts")):
        boost.clear()
        theirs = plain.ttft(text) if turn % 2 else 0.0
        first, done = first_token(boost, text)
        theirs = theirs or plain.ttft(text)
        ttft.append((first, theirs))
        total.append((done, theirs))
    return [
        Row("cold, 2,000 tokens: first token", median_ratio(ttft), bar="<= 1.05"),
        Row("cold, 2,000 tokens: harvest and storing included", median_ratio(total), bar="<= 1.10"),
    ]


def exact(boost: KVBoost, n: int) -> list[Row]:
    """1,500 tokens shared from the very front, 50 new ones."""
    plain = Plain(boost)
    shared = sources(1500, boost.tokenizer)[0]
    tails = [clip(t, 50, boost.tokenizer) for t in sources(2000, boost.tokenizer)[1 : n + 2]]
    boost.clear()
    first_token(boost, f"{shared}\n\n# A note\n{tails.pop()}")
    pairs, apart, reused = [], [], []
    for tail in track(tails, "Exact prefixes"):
        text = f"{shared}\n\n# A note\n{tail}"
        theirs = plain.answer(text)
        scored = boost.score(chat(text), theirs.ids)
        apart.append(divergence(theirs.logits, scored.logits))
        reused.append(scored.usage.exact / scored.usage.prompt)
        pairs.append((first_token(boost, text)[0], theirs.ttft))
    return [_row("exact, 1,500 shared + 50 new", pairs, apart, reused, "<= 0.12")]


def edit(boost: KVBoost, n: int, what: str = "") -> list[Row]:
    """8 tokens inserted near the top of a 2,000-token file; nothing marked by the caller."""
    plain = Plain(boost)
    pairs, apart, reused, assembly = [], [], [], []
    for text in track(sources(2000, boost.tokenizer)[:n], f"Edits{what}"):
        lines = text.splitlines(keepends=True)
        edited = "".join([*lines[:6], "# checked: no defects known here\n", *lines[6:]])
        boost.clear()
        first_token(boost, f"{text}\n\nWhat is this file for?")
        ask = f"{edited}\n\nWhich class or function is defined first?"
        theirs = plain.answer(ask)
        scored = boost.score(chat(ask), theirs.ids)
        apart.append(divergence(theirs.logits, scored.logits))
        reused.append(1 - scored.usage.computed / scored.usage.prompt)
        done = boost.generate(chat(ask), max_new_tokens=1)
        pairs.append((done.timing.ttft, theirs.ttft))
        assembly.append((done.timing.assemble, theirs.ttft))
    return [
        _row(f"edit, 8 of 2,000 tokens inserted{what}", pairs, apart, reused, "<= 0.15"),
        Row(f"of it fetch, rotate and place{what}", median_ratio(assembly), bar="<= 0.02"),
    ]


def _policies() -> Iterator[tuple[str, str | RecomputePolicy]]:
    yield "none", NoRecompute()
    for k in (16, 32):
        yield f"selective, heads {k}", SelectiveRecompute(head=k)
    yield "selective, tails 16", SelectiveRecompute(head=0, tail=16)
    for r in (0.05, 0.15, 0.25):
        yield f"cacheblend, {r:.0%}", CacheBlendRecompute(r)
    for k in (0, 16, 32, 64):
        yield f"drift, heads {k}", DriftRecompute(head=k)
    for r in (0.04, 0.08, 0.16, 0.30):
        yield f"query, {r:.0%}", QueryRecompute(r)
    yield "auto", "auto"


def composition(boost: KVBoost, n: int) -> list[Row]:
    """6 to 8 passages of 150 to 300 tokens, stored in another order, and a question.

    The store is left as it is while the policies take turns (`score` stores nothing); plain
    transformers is timed anew after every fifth.
    """
    plain, rng = Plain(boost), random.Random(1)
    policies = dict(_policies())
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in policies}
    apart: dict[str, list[Divergence]] = {name: [] for name in policies}
    reused: list[float] = []
    for q in track(reference_questions(n, (6, 8), (150, 300), boost.tokenizer, 7), "Compositions"):
        docs, ask = q.documents, chat(q.text)
        boost.clear()
        other = rng.sample(docs, len(docs))
        boost.generate(chat("Which document is the longest?"), documents=other, max_new_tokens=1)
        wanted = plain.answer(q.text, docs)
        theirs = wanted.ttft
        for turn, (name, policy) in enumerate(policies.items()):
            if turn % 5 == 4:
                theirs = plain.ttft(q.text, docs)
            ours = boost.score(ask, wanted.ids, documents=docs, recompute=policy)
            pairs[name].append((ours.ttft, theirs))
            apart[name].append(divergence(wanted.logits, ours.logits))
        reused.append(1 - ours.usage.computed / ours.usage.prompt)
    return [_row(name, pairs[name], apart[name], reused) for name in policies]


def _row(
    what: str,
    pairs: list[tuple[float, float]],
    apart: list[Divergence],
    reused: list[float],
    bar: str = "",
) -> Row:
    return Row(
        what,
        median_ratio(pairs),
        kl=statistics.mean(d.kl_mean for d in apart),
        kl_max=max(d.kl_max for d in apart),
        top1=statistics.mean(d.top1 for d in apart),
        reused=statistics.mean(reused),
        bar=bar,
    )
