"""Requests from a file of questions with documents and answers.

`docs/workloads.md` describes the format.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from kvboost.bench.request import Request
from kvboost.errors import ConfigError
from kvboost.types import Document

ANSWER_TYPES = ("span", "value", "path", "letter")
_SYSTEM = (
    "You answer questions about documents. Answer with what is asked for and nothing else, in as "
    "few words as possible."
)
_DONOR_QUESTION = "Which document is the longest?"


@dataclass(frozen=True, slots=True)
class _Version:
    """A document as it is and as it was before an edit (the same if it had none)."""

    now: Document
    before: Document


@dataclass(frozen=True, slots=True)
class _Item:
    id: str
    documents: dict[str, _Version]
    question: str
    answer: str
    answer_type: str
    candidates: tuple[str, ...]
    stale: str


@dataclass(frozen=True, slots=True)
class _Group:
    """Items that are asked over the documents of all of them."""

    documents: dict[str, _Version] = field(default_factory=dict)
    items: list[_Item] = field(default_factory=list)

    def fits(self, item: _Item, per_prompt: int) -> bool:
        """Short enough, no title with two texts, and no text with two titles."""
        if len(self.documents | item.documents) > per_prompt:
            return False
        for title, version in item.documents.items():
            if self.documents.get(title, version) != version:
                return False
            for other, shown in self.documents.items():
                if other != title and _alike(shown.now.text, version.now.text):
                    return False
        return True

    def add(self, item: _Item) -> None:
        self.documents.update(item.documents)
        self.items.append(item)


def from_items(path: Path, n: int, seed: int, per_prompt: int) -> list[Request]:
    """At most `n` requests, one for each item, over the documents of several items: up to
    `per_prompt` of them, or those of a single item. Before the requests over the same documents
    comes a donor, which has them in another order and as they were before an edit.

    Raises ConfigError, naming file and line, for what is not an item.
    """
    rng = Random(f"items {seed}")
    items = _read(path)
    rng.shuffle(items)
    groups: list[_Group] = []
    for item in items[:n]:
        group = next((g for g in groups if g.fits(item, per_prompt)), None)
        if group is None:
            groups.append(group := _Group())
        group.add(item)
    return [r for number, group in enumerate(groups) for r in _requests(number, group, rng)]


def _requests(number: int, group: _Group, rng: Random) -> Iterator[Request]:
    session = f"items-{number}"
    titles = list(group.documents)
    donor = rng.sample(titles, len(titles))
    yield Request(
        id=f"{session}-donor",
        messages=_messages(_DONOR_QUESTION),
        documents=tuple(group.documents[title].before for title in donor),
        session=session,
        donor=True,
    )
    for item in group.items:
        order = rng.sample(titles, len(titles))
        if order == donor:
            order.reverse()
        options = {"path": tuple(sorted(titles)), "letter": item.candidates}
        yield Request(
            id=item.id,
            messages=_messages(item.question),
            documents=tuple(group.documents[title].now for title in order),
            gold=item.answer,
            options=options.get(item.answer_type, ()),
            stale=item.stale,
            session=session,
        )


def _messages(question: str) -> tuple[dict[str, str], ...]:
    return ({"role": "system", "content": _SYSTEM}, {"role": "user", "content": question})


def _alike(text: str, other: str) -> bool:
    """Whether more than half of the shorter one's lines are in both, as in copies of a file."""
    lines, others = _lines(text), _lines(other)
    return 2 * len(lines & others) > min(len(lines), len(others))


def _lines(text: str) -> set[str]:
    return {stripped for line in text.split("\n") if (stripped := line.strip())}


def _read(path: Path) -> list[_Item]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read {path} ({error}): give a file of JSON lines") from error
    items = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            items.append(_item(json.loads(line)))
        except KeyError as error:
            raise ConfigError(f"{path}, line {number}: an item needs {error}") from error
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}, line {number} is no item: {error}") from error
    if not items:
        raise ConfigError(f"{path} has no items: give one as a JSON object a line")
    return items


def _item(given: Any) -> _Item:
    answer, stale = str(given["answer"]), str(given.get("old_answer") or "")
    documents = _versions(given["docs"], answer, stale)
    answer_type = given["answer_type"]
    if answer_type not in ANSWER_TYPES:
        raise ValueError(f"answer_type is one of {', '.join(ANSWER_TYPES)}, not {answer_type!r}")
    edited = any(version.now != version.before for version in documents.values())
    return _Item(
        id=str(given["id"]),
        documents=documents,
        question=str(given["question"]),
        answer=answer,
        answer_type=answer_type,
        candidates=tuple(given.get("candidates") or ()),
        stale=stale if edited else "",
    )


def _versions(docs: Iterable[Any], answer: str, old_answer: str) -> dict[str, _Version]:
    """By title. Without `old` texts, an answer that occurs once is what was edited."""
    listed = [(str(doc["name"]), str(doc["text"]), doc.get("old")) for doc in docs]
    if not listed or len({name for name, _, _ in listed}) < len(listed):
        raise ValueError("it needs documents, each with a name of its own")
    occurrences = sum(text.count(answer) for _, text, _ in listed) if answer else 0
    once = bool(old_answer) and occurrences == 1 and not any(old for _, _, old in listed)
    versions = {}
    for name, text, old in listed:
        before = text.replace(answer, old_answer) if once else str(old or text)
        versions[name] = _Version(Document(text, name), Document(before, name))
    return versions
