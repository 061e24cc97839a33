"""Whether an answer is right: a label by the next token's logits, a text by what stands in it.

Knows a tokenizer, nothing of models or systems.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kvboost.bench.request import Request


def told_apart(options: Sequence[str], tokenizer: Any) -> dict[str, set[int]]:
    """For each label the tokens that it alone begins with, with or without a space before it;
    nothing if there are labels that begin alike."""
    starts = {
        label: {
            tokenizer(text, add_special_tokens=False)["input_ids"][0]
            for text in (label, f" {label}")
        }
        for label in options
    }
    own = {}
    for label, ids in starts.items():
        others = (starts[other] for other in options if other != label)
        own[label] = ids.difference(*others)
    return own if all(own.values()) else {}


def given(first_V: Tensor, text: str, options: Sequence[str], tokenizer: Any) -> str:
    """What an answer says. first_V: the logits of its first token. The option that they prefer; if
    options begin alike, the one that the text names first; without options the text."""
    if not options:
        return text
    starts = told_apart(options, tokenizer)
    if not starts:
        return named(text, options)
    return max(options, key=lambda label: max(float(first_V[t]) for t in starts[label]))


def named(text: str, options: Sequence[str]) -> str:
    """The first label that a text names; "" if none."""
    labels = "|".join(re.escape(label) for label in sorted(options, key=len, reverse=True))
    found = re.search(rf"(?<!\w)(?:{labels})(?!\w)", text)
    return found.group() if found else ""


def says(text: str, wanted: str) -> bool:
    """Whether `wanted` stands in a text, but for case, punctuation and spaces."""
    return f" {_plain(wanted)} " in f" {_plain(text)} "


def _plain(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def right(request: Request, given: str) -> bool | None:
    """Whether a label or a text is the right answer; None if nobody knows the right one."""
    if not request.gold:
        return None
    return given == request.gold if request.options else says(given, request.gold)


def stale(request: Request, given: str) -> bool | None:
    """Whether it is the answer of one who has only seen the text before its edit."""
    if not request.stale:
        return None
    return given == request.stale if request.options else says(given, request.stale)
