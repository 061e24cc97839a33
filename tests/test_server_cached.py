"""`cached_tokens` tells the truth: never more than what the same tenant sent before, exactly so."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx2
import pytest
from server_real import Real, chat, serving, tiny, words

CHATS = 50
KEYS = [{"name": name, "key": f"sk-{name}"} for name in ("alice", "bob")]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    keys = tmp_path_factory.mktemp("keys") / "keys.json"
    keys.write_text(json.dumps({"keys": KEYS}))
    with serving(tiny(), Path(keys)) as made:
        yield made


@dataclass
class Oracle:
    """Remembers all that a tenant sent and got, and compares from the first token on."""

    known: list[list[int]] = field(default_factory=list)

    def most(self, ids: list[int]) -> int:
        """Tokens at the beginning of `ids` with which something known begins too."""
        return max((_common(ids, known) for known in self.known), default=0)


def _common(one: list[int], other: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


TOKENIZER: Any = tiny().tokenizer


def ids_of(messages: list[dict[str, str]]) -> list[int]:
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(TOKENIZER(text)["input_ids"])


def some(chance: random.Random, most: int) -> str:
    return " ".join(f"w{chance.randrange(10, 500)}" for _ in range(chance.randrange(1, most)))


@dataclass
class Talk:
    """A chat of one tenant. Half of them begin like others."""

    chance: random.Random
    tenant: str
    messages: list[dict[str, str]]

    @classmethod
    def random(cls, number: int, prefaces: list[str]) -> Talk:
        chance = random.Random(number)
        preface = chance.choice([*prefaces, some(chance, 200), ""])
        messages = [{"role": "system", "content": preface}] if preface else []
        return cls(chance, chance.choice(("alice", "bob")), messages)

    def ask(self, client: httpx2.Client, reuse: str) -> dict[str, Any]:
        body = {"model": "tiny", "messages": self.messages, "temperature": 0, "reuse": reuse}
        headers = {"authorization": f"Bearer sk-{self.tenant}"}
        length = {"max_tokens": 1 + len(self.messages) * 7 % 40}
        answer = client.post("/v1/chat/completions", json={**body, **length}, headers=headers)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def edit(self) -> None:
        """Some people change what they said."""
        place = self.chance.randrange(len(self.messages))
        changed = {**self.messages[place], "content": some(self.chance, 60)}
        self.messages = [*self.messages[:place], changed, *self.messages[place + 1 :]]


def said(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def turn(talk: Talk, oracle: Oracle, client: httpx2.Client) -> tuple[int, int]:
    """One question and its answer, checked. What was cached, and the most that could be."""
    talk.messages.append({"role": "user", "content": some(talk.chance, 120)})
    if talk.chance.random() < 0.2:
        talk.edit()
    ids = ids_of(talk.messages)
    reuse = talk.chance.choice(("exact", "exact", "auto"))
    most, answer = oracle.most(ids), talk.ask(client, reuse)
    usage = answer["usage"]
    details = usage["prompt_tokens_details"]
    cached = int(details["cached_tokens"])
    assert usage["prompt_tokens"] == len(ids) == sum(details.values())
    assert cached <= min(most, len(ids) - 1)
    if reuse == "exact":
        assert details["moved_tokens"] == details["recomputed_tokens"] == 0
        assert said(answer) == said(talk.ask(client, "off"))
    talk.messages.append({"role": "assistant", "content": said(answer)})
    oracle.known.append([*ids, *TOKENIZER(said(answer))["input_ids"]])
    return (cached, most) if reuse == "exact" else (0, 0)


def test_cached_tokens_of_random_chats(real: Real) -> None:
    chance = random.Random(0)
    prefaces = [some(chance, 200) for _ in range(4)]
    talks = [Talk.random(n, prefaces) for n in range(CHATS)]
    oracles = {"alice": Oracle(), "bob": Oracle()}
    found: list[tuple[int, int]] = []
    with httpx2.Client(base_url=real.url, timeout=30) as client:
        for _ in range(4 * CHATS):
            talk = chance.choice(talks)
            if sum(len(m["content"].split()) for m in talk.messages) < 700:
                found.append(turn(talk, oracles[talk.tenant], client))
    cached, most = (sum(column) for column in zip(*found, strict=True))
    assert len(found) > 150 and most > 5000
    assert cached > 0.6 * most  # and it is worth something: the rest is ends of chunks


def at_once(real: Real, body: dict[str, Any]) -> list[dict[str, int]]:
    """What the same request three times at the same moment was made of, the first one first."""
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: real.post("chat/completions", body, "sk-bob"), range(3)))
    found = [answer.json()["usage"]["prompt_tokens_details"] for answer in answers]
    return sorted(found, key=lambda each: each["cached_tokens"])


def test_who_forbids_reuse_shares_with_nobody(real: Real) -> None:
    for details in at_once(real, chat(words(500, 1), max_tokens=150, reuse="off")):
        assert details["computed_tokens"] == 502 and details["cached_tokens"] == 0


def test_what_stands_behind_moved_text_is_not_cached(real: Real) -> None:
    """Not for one who shares the computation with a request in flight either."""
    texts = [words(100, n) for n in (21, 22, 23)]
    real.ask("w9", "sk-bob", documents=texts)
    body = chat("w9", documents=texts[::-1], max_tokens=150)
    first, *others = at_once(real, body)
    assert first["moved_tokens"] > 100
    for details in others:
        assert details["cached_tokens"] == first["cached_tokens"]
