"""Which file is it: questions over source files that come back in other company."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from random import Random

from kvboost.bench.draws import LETTERS, lettered, module_names, zipf_sample
from kvboost.bench.excerpts import Excerpt, Excerpts
from kvboost.bench.material import Material
from kvboost.bench.request import Request
from kvboost.bench.sources import Fact
from kvboost.types import Document

BUCKETS = (512, 1024, 2048, 3072, 4096)
_SHOWN, _POOL = 4, 8
_SYSTEM = (
    "You help programmers to find their way in a code base. You are shown excerpts of source "
    "files and then a question about them. Exactly one of the files is right. Answer with a "
    "single letter and nothing else."
)
_ASKED = {
    "raises": "A program stopped with this error:\n\n{}\n\nWhich file raises it?",
    "describes": "Which file has the definition that this describes?\n\n{}",
    "defines": "Which file defines the {}?",
}


@dataclass(frozen=True, slots=True)
class _File:
    document: Document
    facts: tuple[Fact, ...]


def bugs(n: int, rng: Random, material: Material) -> Iterator[Request]:
    """Each request shows 4 files of a pool of 8 in any order, behind a header that is new each
    time. Lengths take turns."""
    excerpts = Excerpts(material, rng)
    pools = {
        bucket: [
            _named(excerpts.pool(_POOL, bucket // _SHOWN), rng) for _ in range(max(1, n // 500))
        ]
        for bucket in BUCKETS
    }
    clock = datetime(2025, 1, 6, 9, 0)
    for number in range(n):
        bucket = BUCKETS[number % len(BUCKETS)]
        pool = rng.randrange(len(pools[bucket]))
        shown = zipf_sample(pools[bucket][pool], _SHOWN, rng)
        clock += timedelta(seconds=rng.randint(5, 900))
        header = f"Date: {clock}\nSession: {rng.getrandbits(64):016x}\nRequest: {number + 1}\n\n"
        question, gold = _question(_pick(shown, rng), shown, rng)
        yield Request(
            id=f"bugs-{number}",
            messages=_messages(header + _SYSTEM, question),
            documents=tuple(file.document for file in shown),
            gold=gold,
            options=LETTERS,
            bucket=bucket,
            session=f"bugs-{bucket}-{pool}",
        )


def paired(n: int, rng: Random, material: Material) -> Iterator[Request]:
    """Every context twice, one right after the other, with another question."""
    excerpts = Excerpts(material, rng)
    for pair in range((n + 1) // 2):
        bucket = BUCKETS[pair % len(BUCKETS)]
        shown = _named(excerpts.pool(_SHOWN, bucket // _SHOWN), rng)
        picked: dict[tuple[_File, Fact], None] = {}
        while len(picked) < 2:
            picked[_pick(shown, rng)] = None
        for turn, asked in enumerate(picked):
            question, gold = _question(asked, shown, rng)
            yield Request(
                id=f"paired-{pair}-{turn}",
                messages=_messages(_SYSTEM, question),
                documents=tuple(file.document for file in shown),
                gold=gold,
                options=LETTERS,
                bucket=bucket,
                session=f"paired-{pair}",
            )


def _named(excerpts: Sequence[Excerpt], rng: Random) -> list[_File]:
    names = module_names(len(excerpts), rng)
    return [
        _File(Document(excerpt.text, name), excerpt.facts)
        for name, excerpt in zip(names, excerpts, strict=True)
    ]


def _pick(shown: Sequence[_File], rng: Random) -> tuple[_File, Fact]:
    """What to ask about. All kinds of questions that the files allow are equally likely."""
    kind = rng.choice(sorted({fact.kind for file in shown for fact in file.facts}))
    file = rng.choice([f for f in shown if any(fact.kind == kind for fact in f.facts)])
    return file, rng.choice([fact for fact in file.facts if fact.kind == kind])


def _question(asked: tuple[_File, Fact], shown: Sequence[_File], rng: Random) -> tuple[str, str]:
    """The question, and the letter of the file that answers it."""
    file, fact = asked
    names = [other.document.title for other in shown]
    text = _ASKED[fact.kind].format(fact.quote)
    return lettered(text, file.document.title, names, "file", rng)


def _messages(system: str, question: str) -> tuple[dict[str, str], ...]:
    return ({"role": "system", "content": system}, {"role": "user", "content": question})
