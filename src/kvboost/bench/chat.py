"""Conversations about two passages, whose history is rewritten as they go on."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from kvboost.bench.draws import zipf_sample
from kvboost.bench.material import Material
from kvboost.bench.passages import Passage, corpus
from kvboost.bench.request import Request
from kvboost.prompt import plain_documents

_REWRITTEN_FROM = 4
_SYSTEM = (
    "You talk with a user about passages of a handbook. Think first, between <think> and "
    "</think>, then answer in one or two sentences."
)
_ASKED = (
    "What are these two passages about?",
    "Which rule in the first passage matters most?",
    "And in the second passage?",
    "What do both have in common?",
    "Which of the two would a beginner need first, and why?",
    "Sum up our conversation in one sentence.",
)


def chat(n: int, rng: Random, material: Material) -> Iterator[Request]:
    """Sessions of six turns. From the fourth on, as chat templates do that drop reasoning, only
    the newest assistant turn has its thoughts."""
    passages = [p for p in corpus(rng, (400, 700), material) if p.sentences]
    for session in range(-(-n // len(_ASKED))):
        chosen = zipf_sample(passages, 2, rng)
        context = "".join(plain_documents([passage.document for passage in chosen]))
        users = [context + _ASKED[0], *_ASKED[1:]]
        scripted = [_answer(asked, chosen, rng) for asked in _ASKED]
        for turn, asked in enumerate(users):
            messages = [{"role": "system", "content": _SYSTEM}]
            for earlier in range(turn):
                thoughts, answer = scripted[earlier]
                kept = turn + 1 < _REWRITTEN_FROM or earlier == turn - 1
                messages += [
                    {"role": "user", "content": users[earlier]},
                    {"role": "assistant", "content": thoughts + answer if kept else answer},
                ]
            messages.append({"role": "user", "content": asked})
            yield Request(
                id=f"chat-{session}-{turn}", messages=tuple(messages), session=f"chat-{session}"
            )


def _answer(asked: str, passages: list[Passage], rng: Random) -> tuple[str, str]:
    """Thoughts and the answer, the same for whatever model is asked."""
    quotes = [rng.choice(passage.sentences) for passage in passages]
    rng.shuffle(quotes)
    thoughts = (
        f'<think>\nThe user asks: "{asked}" One of the passages says: "{quotes[0]}" The other one '
        f'says: "{quotes[1]}" I should go by the first of these.\n</think>\n\n'
    )
    return thoughts, f"The passage puts it like this: {quotes[0]}"
