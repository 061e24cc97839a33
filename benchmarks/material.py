"""Real text that every Python has: the language reference and the standard library's sources."""

from __future__ import annotations

import importlib
import inspect
import random
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

from kvboost import Document

_MODULES = """
argparse ast bisect calendar cmd codeop colorsys configparser contextlib copy csv dataclasses
difflib dis enum filecmp fileinput fnmatch fractions functools glob graphlib gzip heapq hmac
inspect json.decoder keyword linecache locale mailbox mimetypes numbers operator optparse
pathlib pprint profile queue random sched selectors shelve shlex shutil socketserver
statistics string subprocess tarfile tempfile textwrap timeit tokenize trace types uuid
warnings wave weakref zipfile
"""


@dataclass(frozen=True)
class Question:
    """Documents, and a question that one of them answers."""

    documents: tuple[Document, ...]
    text: str


def clip(text: str, tokens: int, tokenizer: Any) -> str:
    """The first `tokens` tokens of a text."""
    return str(tokenizer.decode(tokenizer(text, verbose=False)["input_ids"][:tokens]))


def reference_questions(
    n: int, documents: tuple[int, int], tokens: tuple[int, int], tokenizer: Any, seed: int
) -> list[Question]:
    """Passages of the language reference, each on one topic, and a question on one of them."""
    rng = random.Random(seed)
    names = sorted(name for name, text in topics.items() if len(text) > 1500)
    questions = []
    for _ in range(n):
        chosen = rng.sample(names, rng.randint(*documents))
        docs = tuple(
            Document(clip(topics[name], rng.randint(*tokens), tokenizer), name) for name in chosen
        )
        wanted = rng.choice(chosen)
        questions.append(Question(docs, f"In one sentence: what does the document {wanted!r} say?"))
    return questions


def sources(tokens: int, tokenizer: Any) -> list[str]:
    """Source files of at least this many tokens, cut to it."""
    texts = []
    for name in _MODULES.split():
        text = clip(inspect.getsource(importlib.import_module(name)), tokens, tokenizer)
        if len(tokenizer(text, verbose=False)["input_ids"]) >= tokens - 2:
            texts.append(text)
    return texts
