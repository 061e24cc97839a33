"""What is compared: plain transformers, KVBoost under several policies, and systems of others.

Each answers one request at a time, in two steps: `begin` is on the clock (to the first token, then
what is stored for later), what it returns is judged against the reference off the clock.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from kvboost.bench.answers import given, named, told_apart
from kvboost.bench.peers import Peer, PeerError
from kvboost.bench.request import Request
from kvboost.boost import KVBoost
from kvboost.engine import Prefilled
from kvboost.errors import ConfigError, PromptError
from kvboost.metrics import Divergence, divergence
from kvboost.options import Options, PromptOptions
from kvboost.prompt import plain_documents
from kvboost.recompute import (
    CacheBlendRecompute,
    DriftRecompute,
    QueryRecompute,
    RecomputePolicy,
    SelectiveRecompute,
    policy,
)
from kvboost.types import ForwardPass, Usage

ANSWER = 16
"""Tokens of an answer at most. It ends with its end-of-text token: what a model says behind that is
nobody's answer, and what it is sure of there would hide what it is not sure of before."""


@dataclass(frozen=True)
class Asked:
    """A request, and the prompt it makes: text and token ids."""

    request: Request
    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Reference:
    """What plain transformers answers: greedy token ids, the end-of-text one included, and the
    logits `[tokens, vocab]`."""

    ids: list[int]
    logits: Tensor


@dataclass(frozen=True)
class Judged:
    """An answer against the reference. given: the option chosen, or the text where it matters."""

    apart: Divergence | None
    same: bool
    given: str


@dataclass(frozen=True)
class Begun:
    """A request up to its first token. ttft: seconds from the call; parts: of it, and storing after
    it. usage: where tokens are counted; cached: tokens that a peer says it had; note: what it says
    of itself. bytes: stored now.
    """

    ttft: float
    judge: Callable[[Reference], Judged]
    parts: Mapping[str, float] = field(default_factory=dict)
    usage: Usage | None = None
    cached: int | None = None
    note: str = ""
    passes: tuple[ForwardPass, ...] = ()
    bytes: int = 0
    reference: Reference | None = None


class System(Protocol):
    """`begin` raises PeerError if the system is somebody else's and fails."""

    @property
    def name(self) -> str: ...

    def begin(self, asked: Asked) -> Begun: ...

    def clear(self) -> None:
        """Forget all that is stored."""

    def close(self) -> None: ...


class Prompts:
    """Makes prompts as a user of plain transformers does: chat template, then tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def make(self, request: Request) -> Asked:
        messages, docs = [dict(m) for m in request.messages], request.documents
        options = {}
        if docs and "documents" in str(self._tokenizer.chat_template):
            options["documents"] = [{"title": d.title, "text": d.text} for d in docs]
        else:
            messages[-1]["content"] = "".join(plain_documents(docs)) + messages[-1]["content"]
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **options
        )
        ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return Asked(request, text, tuple(ids))

    def text(self, ids: Sequence[int], ends: frozenset[int]) -> str:
        """Of an answer, up to the first token that ends it."""
        stop = next((n for n, token in enumerate(ids) if token in ends), len(ids))
        return str(self._tokenizer.decode(ids[:stop], skip_special_tokens=True))


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Plain:
    """Plain transformers, the reference: one forward pass a step, its own cache, nothing kept."""

    name = "plain"

    def __init__(self, boost: KVBoost) -> None:
        self._boost = boost
        self._prompts = Prompts(boost.tokenizer)
        known = inspect.signature(boost.model.forward).parameters
        self._cache = "cache" if "cache" in known else "past_key_values"

    @torch.inference_mode()
    def begin(self, asked: Asked) -> Begun:
        model, limit = self._boost.model, room(self._boost, asked)
        _wait()
        start = time.perf_counter()
        ids = self._prompts.make(asked.request).ids
        tokens = torch.tensor([ids], device=model.device)
        out = model(tokens, use_cache=True, logits_to_keep=1)
        answer, logits = [int(out.logits[0, -1].argmax())], [out.logits[0, -1:].float()]
        ttft = time.perf_counter() - start
        while len(answer) < limit and answer[-1] not in self._boost._eos:
            step = torch.tensor([[answer[-1]]], device=model.device)
            out = model(step, **{self._cache: out[self._cache]})
            logits.append(out.logits[0, -1:].float())
            answer.append(int(out.logits[0, -1].argmax()))
        reference = Reference(answer, torch.cat(logits))
        text = self._prompts.text(answer, self._boost._eos)
        said = given(logits[0][0], text, asked.request.options, self._boost.tokenizer)
        return Begun(
            ttft,
            lambda _: Judged(Divergence(0.0, 0.0, 1.0), same=True, given=said),
            usage=Usage(computed=len(ids)),
            passes=(ForwardPass(len(ids), self._boost._engine.runner.layers),),
            reference=reference,
        )

    def clear(self) -> None: ...

    def close(self) -> None: ...


class Ours:
    """KVBoost with a store of its own."""

    def __init__(self, name: str, boost: KVBoost, options: PromptOptions) -> None:
        self.name = name
        self.boost = boost
        self._options = options
        self._prompts = Prompts(boost.tokenizer)

    def begin(self, asked: Asked) -> Begun:
        boost, engine, request = self.boost, self.boost._engine, asked.request
        clock = boost._clock()
        options = Options.of({**self._options, "documents": request.documents}, boost._auto)
        built = boost.build(request.messages, options, clock)
        space = room(boost, asked) - 1
        prefilled = engine.prefill(built, options.reuse, options.policy, space, clock)
        int(prefilled.logits.argmax())
        ttft = clock.elapsed()
        clock.lap("sample")
        engine.harvest(prefilled, built.ids)
        clock.lap("store")
        assert built.ids == asked.ids, "KVBoost and plain transformers must see the same prompt"
        return Begun(
            ttft,
            partial(self._judge, asked, prefilled),
            parts=dict(clock.parts),
            usage=prefilled.usage,
            passes=prefilled.passes,
            bytes=engine.store.memory.stats().bytes,
        )

    def _judge(self, asked: Asked, prefilled: Prefilled, reference: Reference) -> Judged:
        logits = self.boost._engine.score(prefilled, reference.ids)
        own: list[int] = logits.argmax(-1).tolist()
        same, request = own == reference.ids, asked.request
        tokenizer = self.boost.tokenizer
        if not same and request.gold and not told_apart(request.options, tokenizer):
            own = self._answer(prefilled, own, reference.ids, room(self.boost, asked))
        text = self._prompts.text(own, self.boost._eos)
        said = given(logits[0], text, request.options, tokenizer)
        return Judged(divergence(reference.logits, logits), same, said)

    def _answer(
        self, prefilled: Prefilled, own: list[int], reference: list[int], limit: int
    ) -> list[int]:
        """The own greedy answer: the reference's up to where they part, then step by step."""
        parted = next(n for n, token in enumerate(own) if token != reference[n])
        answer = own[: parted + 1]
        while len(answer) < limit and answer[-1] not in self.boost._eos:
            logits = self.boost._engine.step(prefilled, [*prefilled.prompt.ids, *answer])
            answer.append(int(logits.argmax()))
        return answer

    def clear(self) -> None:
        self.boost.clear()

    def close(self) -> None:
        self.boost.close()


class Theirs:
    """A system of others, in a process of its own."""

    def __init__(self, name: str, make: Callable[[], Peer], boost: KVBoost, warm_up: Asked) -> None:
        """make: one that holds nothing and may yet have to start."""
        self.name = name
        self._make = make
        self._peer = make()
        self._boost = boost
        self._warm_up = warm_up
        self._prompts = Prompts(boost.tokenizer)

    def begin(self, asked: Asked) -> Begun:
        peer, request = self._peer, asked.request
        answer = peer.ask(asked.ids, asked.text, room(self._boost, asked))
        time.sleep(_SETTLE)
        said = named(answer.text, request.options) if request.options else answer.text

        def judge(reference: Reference) -> Judged:
            text = self._prompts.text(reference.ids, self._boost._eos)
            alike = answer.text.strip() == text.strip()
            if answer.ids is not None:
                alike = answer.ids[: len(reference.ids)] == reference.ids
            return Judged(None, alike, said)

        note = f"{peer.version} {peer.note}".strip()
        return Begun(answer.ttft, judge, cached=answer.cached, note=note)

    def clear(self) -> None:
        """Start anew, off the clock. If that fails, so will the next request."""
        self._peer.close()
        self._peer = self._make()
        with suppress(PeerError):
            self._peer.ask(self._warm_up.ids, self._warm_up.text, ANSWER)

    def close(self) -> None:
        self._peer.close()


_SETTLE = 0.3
"""Seconds until threads of another process, which wait for more work by spinning, are asleep."""


def room(boost: KVBoost, asked: Asked) -> int:
    """Tokens that an answer may have: ANSWER, or what the model's window leaves."""
    try:
        return boost._engine.room(len(asked.ids), ANSWER)
    except PromptError as error:
        raise PromptError(f"request {asked.request.id}: {error}") from error


_WITH_NUMBER: dict[str, Callable[[float], RecomputePolicy]] = {
    "selective": lambda head: SelectiveRecompute(int(head)),
    "cacheblend": CacheBlendRecompute,
    "drift": lambda head: DriftRecompute(int(head)),
    "query": QueryRecompute,
}


def options_of(name: str) -> PromptOptions:
    """What KVBoost is told for the system of that name: "exact", a policy, or a policy with its
    first parameter, such as "query:0.08". Raises ConfigError for anything else."""
    if name == "exact":
        return {"reuse": "exact"}
    chosen, colon, number = name.partition(":")
    try:
        if colon:
            return {"recompute": _WITH_NUMBER[chosen](float(number))}
        if name != "auto":
            policy(name)
        return {"recompute": name}
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"there is no system {name!r}: choose plain, exact, auto, none, selective, drift, "
            "cacheblend, query, full, one with a number (drift:32, cacheblend:0.15, query:0.08), "
            "or an installed peer"
        ) from error
