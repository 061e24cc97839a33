"""`kvboost demo`: real documents, questions, an edited file and a chat, three ways, side by side.

Full recompute, prefix caching and KVBoost answer the same requests in the same order. Each of the
last two keeps its own store; nothing is warmed and cold requests count.
"""

from __future__ import annotations

import inspect
import statistics
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pydoc_data.topics import topics
from typing import Literal

from rich.console import Console
from rich.table import Table

from kvboost.boost import KVBoost
from kvboost.metrics import Divergence, divergence
from kvboost.types import Completion, Document, Message

_ANSWER_TOKENS = 24


@dataclass(frozen=True)
class Turn:
    """One request. `follows`: the chat so far comes first."""

    what: str
    question: str
    documents: tuple[Document, ...] = ()
    follows: bool = False


@dataclass
class Result:
    """One request, answered three ways."""

    turn: Turn
    full: Completion
    prefix: Completion
    ours: Completion
    apart: Divergence


@dataclass
class Demo:
    """Runs the requests and shows each as it is done."""

    ours: KVBoost
    prefix: KVBoost
    console: Console
    results: list[Result] = field(default_factory=list)
    chat: list[Message] = field(default_factory=list)

    def run(self) -> None:
        for scene, turns in _scenes():
            self.console.print(f"\n[bold]{scene}")
            self.console.print(_table(header=True))
            for turn in turns:
                with self.console.status(f"{turn.what}: full recompute, prefix caching, KVBoost"):
                    result = self._ask(turn)
                self.results.append(result)
                self.console.print(_row(result))
                answer = " ".join(result.ours.text.split())
                same = (
                    "same answer"
                    if result.ours.text == result.full.text
                    else (f"full recompute: {' '.join(result.full.text.split())}")
                )
                self.console.print(
                    f"  [dim]{textwrap.shorten(answer, 96)}  ({same})", highlight=False
                )
        self._summary()

    def _ask(self, turn: Turn) -> Result:
        messages: list[Message] = [
            *(self.chat if turn.follows else []),
            {"role": "user", "content": turn.question},
        ]
        docs, n = turn.documents, _ANSWER_TOKENS
        full = self.ours.generate(messages, documents=docs, max_new_tokens=n, reuse="off")
        prefix = self.prefix.generate(messages, documents=docs, max_new_tokens=n, reuse="exact")
        wanted = self.ours.score(messages, full.token_ids, documents=docs, reuse="off")
        got = self.ours.score(messages, full.token_ids, documents=docs)
        ours = self.ours.generate(messages, documents=docs, max_new_tokens=n)
        self.chat = [*messages, {"role": "assistant", "content": ours.text}]
        return Result(turn, full, prefix, ours, divergence(wanted.logits, got.logits))

    def _summary(self) -> None:
        full = statistics.mean(r.full.timing.ttft for r in self.results)
        prefix = statistics.mean(r.prefix.timing.ttft for r in self.results)
        ours = statistics.mean(r.ours.timing.ttft for r in self.results)
        kl = statistics.mean(r.apart.kl_mean for r in self.results)
        top1 = statistics.mean(r.apart.top1 for r in self.results)
        self.console.print(
            f"\nMean time to first token of {len(self.results)} requests, cold ones included: "
            f"full recompute {full * 1e3:,.0f} ms, prefix caching {prefix * 1e3:,.0f} ms, "
            f"KVBoost {ours * 1e3:,.0f} ms.\n"
            f"KVBoost is {full / ours:.1f}x faster than full recompute and {prefix / ours:.1f}x "
            f"faster than prefix caching, at KL {kl:.4f} nats per token and top-1 {top1:.1%} "
            "against full recompute.",
            style="bold",
            highlight=False,
        )


def demo(model: str, console: Console) -> None:
    """Load the model twice over (one set of weights, two stores) and run the demo."""
    with console.status(f"Loading {model!r}"):
        ours = KVBoost.from_pretrained(model)
        prefix = KVBoost(ours.model, ours.tokenizer)
    stats = ours.stats()
    console.print(
        f"[bold]{model}[/bold] in {stats.dtype} on {stats.device}; KV reuse: {stats.reuse}.\n"
        "Each request is answered three ways, in this order: full recompute, prefix caching alone,"
        " KVBoost. Times are milliseconds from the call to the first token, everything included.\n"
        "[bold]exact[/bold]: KV after the same history. [bold]moved[/bold]: KV of the same tokens"
        " from elsewhere. [bold]again[/bold]: moved, then recomputed to repair it."
        " [bold]new[/bold]: computed.\n"
        "[bold]KL, top1[/bold]: KVBoost's next-token distributions against full recompute's, over"
        " full recompute's answer.",
        highlight=False,
    )
    Demo(ours, prefix, console).run()


def _scenes() -> Iterator[tuple[str, list[Turn]]]:
    names = ("while", "try", "with", "for", "if")
    docs = [Document(topics[n][:1300], f"The {n} statement") for n in names]
    yield (
        "1. Documents in changing order: five passages of Python's language reference",
        [
            Turn("cold", "What does a while statement do?", tuple(docs)),
            Turn("same order", "What is a finally clause for?", tuple(docs)),
            Turn("reversed", "What does a with statement do?", tuple(docs[::-1])),
            Turn("three", "What is an else clause?", (docs[3], docs[0], docs[4])),
            Turn("shuffled", "How does a for loop end?", tuple(docs[i] for i in (2, 4, 1, 0, 3))),
        ],
    )
    source = inspect.getsource(textwrap)[:6500]
    head, rest = source.split("\n\n", 1)
    edited = head + "\n# Reviewed: no known defects.\n\n" + rest
    renamed = edited.replace("self.width", "self.columns", 2)

    def file(text: str) -> tuple[Document, ...]:
        return (Document(text, "textwrap.py"),)

    yield (
        "2. A file that is edited between questions: the standard library's textwrap.py",
        [
            Turn("cold", "What is the class TextWrapper for?", file(source)),
            Turn("line added", "What does expand_tabs do?", file(edited)),
            Turn("renamed", "What does fix_sentence_endings do?", file(renamed)),
        ],
    )
    yield (
        "3. A growing chat about two of the passages",
        [
            Turn("cold chat", "Explain both in one sentence.", (docs[1], docs[2])),
            Turn("second turn", "Which one closes files?", follows=True),
            Turn("third turn", "Give a short example.", follows=True),
        ],
    )


_COLUMNS: tuple[tuple[str, int, Literal["left", "right"]], ...] = (
    ("request", 11, "left"),
    ("tok", 4, "right"),
    ("full", 6, "right"),
    ("prefix", 6, "right"),
    ("KVBoost", 7, "right"),
    ("gain", 5, "right"),
    ("exact", 5, "right"),
    ("moved", 5, "right"),
    ("again", 5, "right"),
    ("new", 4, "right"),
    ("KL", 6, "right"),
    ("top1", 4, "right"),
)
"""Fits a terminal of 80 columns."""


def _table(*, header: bool) -> Table:
    table = Table(box=None, show_header=header, header_style="underline", padding=(0, 1, 0, 0))
    for name, width, justify in _COLUMNS:
        table.add_column(name, width=width, justify=justify, no_wrap=True)
    return table


def _row(result: Result) -> Table:
    usage, apart = result.ours.usage, result.apart
    ours = result.ours.timing.ttft
    table = _table(header=False)
    table.add_row(
        result.turn.what,
        f"{usage.prompt}",
        *(f"{c.timing.ttft * 1e3:,.0f}" for c in (result.full, result.prefix, result.ours)),
        f"{result.full.timing.ttft / ours:.1f}x",
        *(f"{n}" for n in (usage.exact, usage.moved, usage.recomputed, usage.computed)),
        f"{apart.kl_mean:.4f}" if not result.ours.exact else "exact",
        f"{apart.top1:.0%}",
    )
    return table
