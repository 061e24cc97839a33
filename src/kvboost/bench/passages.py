"""Passages of Python's language reference, and questions over some of them in any order."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pydoc_data.topics import topics
from random import Random

from kvboost.bench.draws import LETTERS, lettered, zipf_sample
from kvboost.bench.material import Material, clip
from kvboost.bench.request import Request
from kvboost.types import Document

_CORPUS, _SHOWN = 40, 8
_QUOTED_WORDS = range(8, 31)
_MARKUP = re.compile(r">>>|::=|\*\*|==|--|\|")
_SYSTEM = (
    "You answer questions about passages that a search found. The passages come in the order in "
    "which they were found, which means nothing. Read all of them: only one has the answer, the "
    "others are there because they look similar. Do not use what you know from elsewhere. Answer "
    "with a single letter and nothing else."
)


@dataclass(frozen=True, slots=True)
class Passage:
    """sentences: those that can be quoted, because no other passage has them."""

    document: Document
    sentences: tuple[str, ...]


def corpus(rng: Random, tokens: tuple[int, int], material: Material) -> list[Passage]:
    """About 40 passages on a topic each, of this many tokens, with at least two sentences to
    quote. Titles are numbers."""
    texts = []
    for name in rng.sample(sorted(topics), len(topics)):
        text = clip(topics[name], rng.randint(*tokens), material).strip()
        if len(material.tokens(text)) >= tokens[0] and len(_sentences(text)) >= 2:
            texts.append(text)
    texts = texts[:_CORPUS]
    flat = [" ".join(text.split()) for text in texts]
    numbers = rng.sample(range(1, len(texts) + 1), len(texts))
    return [
        Passage(
            Document(text, f"Passage {number}"),
            tuple(s for s in _sentences(text) if sum(s in other for other in flat) == 1),
        )
        for number, text in zip(numbers, texts, strict=True)
    ]


def retrieval(n: int, rng: Random, material: Material) -> Iterator[Request]:
    """8 of 40 passages in any order, some more popular than others, and which of four has a
    sentence."""
    found = [p for p in corpus(rng, (150, 300), material) if p.sentences]
    for number in range(n):
        shown = zipf_sample(found, _SHOWN, rng)
        asked = rng.choice(shown)
        question, gold = lettered(
            f"Which passage says this?\n\n{rng.choice(asked.sentences)}",
            asked.document.title,
            [passage.document.title for passage in shown],
            "passage",
            rng,
        )
        yield Request(
            id=f"retrieval-{number}",
            messages=(
                {"role": "system", "content": _SYSTEM},
                {"role": "user", "content": question},
            ),
            documents=tuple(passage.document for passage in shown),
            gold=gold,
            options=LETTERS,
        )


def _sentences(text: str) -> list[str]:
    """Whole sentences of a text, on one line each; not the first and the last, which may be a
    heading or cut."""
    parts = re.split(r"(?<=[.!?]) (?=[A-Z])", " ".join(text.split()))[1:-1]
    return [s for s in parts if len(s.split()) in _QUOTED_WORDS and not _MARKUP.search(s)]
