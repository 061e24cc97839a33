"""The core's bars: what reuse costs and gives on one model, each against plain transformers."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from rich.progress import track

from benchmarks.material import Question, clip, reference_questions, sources
from benchmarks.measure import Plain, Ratio, chat, first_token, ratio, seconds
from kvboost import (
    CacheBlendRecompute,
    Document,
    KVBoost,
    NoRecompute,
    QueryRecompute,
    RecomputePolicy,
    SelectiveRecompute,
)
from kvboost.metrics import Divergence, divergence

ANSWER = 16


@dataclass(frozen=True)
class Row:
    """One line of the report: time over plain transformers, and quality beside it."""

    what: str
    time: Ratio
    kl: float = 0.0
    kl_max: float = 0.0
    top1: float = 1.0
    reused: float = 0.0
    bar: str = ""

    def json(self) -> dict[str, Any]:
        return asdict(self)


def cold(boost: KVBoost, n: int) -> list[Row]:
    """Nothing stored: what being ready to reuse costs."""
    plain = Plain(boost)
    ttft, total = [], []
    for text in track(sources(2000, boost.tokenizer)[:n], "Cold prompts"):
        boost.clear()
        theirs = seconds(partial(plain.first_token, text))
        first, done = first_token(boost, text)
        boost.clear()
        again = seconds(partial(plain.first_token, text))
        ttft.append((first, (theirs + again) / 2))
        total.append((done, (theirs + again) / 2))
    return [
        Row("cold, 2,000 tokens: first token", ratio(ttft), bar="<= 1.05"),
        Row("cold, 2,000 tokens: harvest and storing included", ratio(total), bar="<= 1.10"),
    ]


def exact(boost: KVBoost, n: int) -> list[Row]:
    """1,500 tokens shared from the very front, 50 new ones."""
    plain = Plain(boost)
    shared = sources(1500, boost.tokenizer)[0]
    tails = [clip(t, 50, boost.tokenizer) for t in sources(2000, boost.tokenizer)[1 : n + 1]]
    boost.clear()
    first_token(boost, f"{shared}\n\n{tails[0]}")
    pairs, apart, reused = [], [], []
    for tail in track(tails, "Exact prefixes"):
        text = f"{shared}\n\n# A note\n{tail}"
        theirs = seconds(partial(plain.first_token, text))
        apart.append(compare(boost, Question((), text)))
        pairs.append((first_token(boost, text)[0], theirs))
        reused.append(reuse_share(boost, text))
    return [_row("exact, 1,500 shared + 50 new", pairs, apart, reused, "<= 0.12")]


def edit(boost: KVBoost, n: int, what: str = "") -> list[Row]:
    """8 tokens inserted near the top of a 2,000-token file; nothing marked by the caller."""
    plain = Plain(boost)
    pairs, apart, reused = [], [], []
    for text in track(sources(2000, boost.tokenizer)[:n], f"Edits{what}"):
        lines = text.splitlines(keepends=True)
        edited = "".join([*lines[:6], "# checked: no defects known here\n", *lines[6:]])
        boost.clear()
        first_token(boost, f"{text}\n\nWhat is this file for?")
        ask = f"{edited}\n\nWhich class or function is defined first?"
        apart.append(compare(boost, Question((), ask)))
        reused.append(reuse_share(boost, ask))
        theirs = seconds(partial(plain.first_token, ask))
        pairs.append((first_token(boost, ask)[0], theirs))
    return [_row(f"edit, 8 of 2,000 tokens inserted{what}", pairs, apart, reused, "<= 0.15")]


def _policies() -> Iterator[tuple[str, str | RecomputePolicy]]:
    yield "none", NoRecompute()
    for k in (16, 24, 32, 48):
        yield f"selective, heads {k}", SelectiveRecompute(head=k)
    yield "selective, tails 16", SelectiveRecompute(head=0, tail=16)
    for r in (0.05, 0.10, 0.15, 0.25):
        yield f"cacheblend, {r:.0%}", CacheBlendRecompute(r)
    for head, r in ((0, 0.12), (16, 0.12), (24, 0.06), (32, 0.03), (32, 0.06), (32, 0.12)):
        yield f"query, heads {head} + {r:.0%}", QueryRecompute(r, head)
    yield "auto", "auto"


def composition(boost: KVBoost, n: int) -> list[Row]:
    """6 to 8 passages of 150 to 300 tokens, stored in another order, and a question.

    The store is left as it is while the policies take turns (`score` stores nothing); plain
    transformers is timed anew after every fourth.
    """
    plain, rng = Plain(boost), random.Random(1)
    policies = dict(_policies())
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in policies}
    apart: dict[str, list[Divergence]] = {name: [] for name in policies}
    reused: list[float] = []
    for q in track(reference_questions(n, (6, 8), (150, 300), boost.tokenizer, 7), "Compositions"):
        docs, ask, theirs = q.documents, chat(q.text), 0.0
        boost.clear()
        other = rng.sample(docs, len(docs))
        boost.generate(chat("Which document is the longest?"), documents=other, max_new_tokens=1)
        answer = boost.generate(ask, documents=docs, reuse="off", max_new_tokens=ANSWER).token_ids
        wanted = boost.score(ask, answer, documents=docs, reuse="off")
        reused.append(reuse_share(boost, q.text, docs))
        for turn, (name, policy) in enumerate(policies.items()):
            if turn % 4 == 0:
                theirs = seconds(partial(plain.first_token, q.text, docs))
            ours = boost.score(ask, answer, documents=docs, recompute=policy)
            pairs[name].append((ours.ttft, theirs))
            apart[name].append(divergence(wanted.logits, ours.logits))
    return [_row(name, pairs[name], apart[name], reused) for name in policies]


def compare(boost: KVBoost, q: Question) -> Divergence:
    """Reuse against full recompute, over full recompute's own greedy answer."""
    answer = boost.generate(
        chat(q.text), documents=q.documents, reuse="off", max_new_tokens=ANSWER
    ).token_ids
    wanted = boost.score(chat(q.text), answer, documents=q.documents, reuse="off")
    got = boost.score(chat(q.text), answer, documents=q.documents)
    return divergence(wanted.logits, got.logits)


def reuse_share(boost: KVBoost, text: str, documents: tuple[Document, ...] = ()) -> float:
    """Share of prompt tokens that the store covers."""
    told = boost.explain(chat(text), documents=documents)
    return sum(s.end - s.start for s in told.spans if s.kind != "computed") / told.tokens


def assembly(boost: KVBoost, n: int) -> list[Row]:
    """Fetch, rotate and place of some 2,000 moved tokens, as the engine times it."""
    plain = Plain(boost)
    pairs = []
    for text in track(sources(2000, boost.tokenizer)[:n], "Assembly"):
        boost.clear()
        first_token(boost, f"An older header.\n\n{text}\n\nWhat is this file for?")
        moved = f"A newer and somewhat longer header.\n\n{text}\n\nWhat is this?"
        theirs = seconds(partial(plain.first_token, moved))
        done = boost.generate(chat(moved), max_new_tokens=1, recompute="none")
        assert done.usage.moved > 1700
        pairs.append((done.timing.assemble, theirs))
    return [Row("assembly of 2,000 moved tokens", ratio(pairs), bar="<= 0.02")]


def _row(
    what: str,
    pairs: list[tuple[float, float]],
    apart: list[Divergence],
    reused: list[float],
    bar: str = "",
) -> Row:
    return Row(
        what,
        ratio(pairs),
        kl=statistics.mean(d.kl_mean for d in apart),
        kl_max=max(d.kl_max for d in apart),
        top1=statistics.mean(d.top1 for d in apart),
        reused=statistics.mean(reused),
        bar=bar,
    )
