"""`kvboost calibrate`: how a model bears moved KV, measured on text, and the profile to go by.

Everything is compared with full recompute over its own greedy answer: KL in nats per token.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import cast

import torch
from rich.progress import Progress

from kvboost.bench.bugs import BUCKETS
from kvboost.bench.material import Material
from kvboost.bench.request import Request
from kvboost.bench.systems import Plain, Prompts, Reference
from kvboost.bench.workloads import generate
from kvboost.boost import KVBoost
from kvboost.config import KVFormat
from kvboost.errors import ConfigError
from kvboost.formats import measure_formats
from kvboost.metrics import Divergence, divergence
from kvboost.recompute import (
    MEASURED_AT,
    NoRecompute,
    Profile,
    QueryRecompute,
    RecomputePolicy,
    SelectiveRecompute,
    damage,
    ladder,
)

_BANDS = ((0.3, 0.6), (0.5, 0.8), (0.5, 0.95), (0.65, 0.95))
_USUAL, _CLEARLY = 1, 1.5
"""The band that is taken unless another has a divergence so many times smaller."""
_HEADS = (0, 8, 16, 32)
_FILES, _QUOTED = 2048, 10
"""Tokens of the four files of a prompt; words that are quoted."""
_WITHIN = 1.1
"""A cheaper choice is as good as the best if its divergence is at most so many times as large, and
a quarter of what the number format costs."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One repair: KL mean and largest of a prompt, top-1 agreement, time to the first token over
    full recompute's (median), and the divergence left over the plan's damage."""

    what: str
    kl: float
    worst: float
    top1: float
    time: float
    per_damage: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured. floor: KL of this number format against float32. formats: KL that storing
    in each format adds. files, passages: text among new neighbours."""

    profile: Profile
    floor: float
    shift: list[Measured]
    bands: list[Measured]
    files: list[Measured]
    passages: list[Measured]
    formats: Mapping[KVFormat, float]


def calibrate(boost: KVBoost, material: Material, prompts: int, progress: Progress) -> Calibration:
    """Measure on so many prompts of each kind (8 of 40 passages; 4 of 8 source files of 512 tokens;
    an edited file). Empties the store. Raises ConfigError if the model's KV can't be moved."""
    if reason := boost._engine.runner.support.reason:
        raise ConfigError(
            f"there is nothing to calibrate: this model's KV can't be moved ({reason})"
        )
    bench = _Bench(boost, progress)
    edited = generate("edits", prompts + prompts // 8 + 1, 1, material)
    shift = bench.run(
        "text that shifted",
        list(_edited(edited))[:prompts],
        {f"heads {k}": SelectiveRecompute(k) if k else NoRecompute() for k in _HEADS},
    )
    sources = generate("bugs", len(BUCKETS) * prompts, 1, material)
    files, passages = (
        [(_other_order(r), r) for r in _asked(requests)]
        for requests in (
            [r for r in sources if r.bucket == _FILES],
            generate("retrieval", prompts, 1, material),
        )
    )
    bands = bench.run(
        "where the question looks",
        passages,
        {f"layers {a:.0%} to {z:.0%}": QueryRecompute(0.08, a, z) for a, z in _BANDS},
    )
    best = min(range(len(bands)), key=lambda n: bands[n].kl)
    band = _BANDS[best] if bands[best].kl * _CLEARLY < bands[_USUAL].kl else _BANDS[_USUAL]
    files_left, passages_left = (
        bench.run(f"{what} among new neighbours", cases, ladder(band))
        for what, cases in (("files", files), ("passages", passages))
    )
    floor = _floor(boost, [r for _, r in passages[:4]])
    enough = _WITHIN * min(m.kl for m in shift) + max(1e-4, floor / 4)
    head = next(k for k, m in zip(_HEADS, shift, strict=True) if m.kl <= enough)
    little, much = MEASURED_AT
    left = {
        file.what: (file.per_damage * little, passage.per_damage * much)
        for file, passage in zip(files_left, passages_left, strict=True)
    }
    profile = Profile(left, band, SelectiveRecompute(head or 8))
    source = max((text for _, text in material.files[:100]), key=len)
    formats = measure_formats(boost._engine.runner, material.tokens(source[:8000]))
    return Calibration(profile, floor, shift, bands, files_left, passages_left, formats)


Cases = Sequence[tuple[Request, Request]]
"""Requests, and before each the one that its text is stored from."""


@dataclass(frozen=True)
class _Bench:
    boost: KVBoost
    progress: Progress

    def run(
        self, what: str, cases: Cases, repairs: Mapping[str, RecomputePolicy]
    ) -> list[Measured]:
        """Every repair on every case; all from the same stored KV."""
        boost, plain, prompts = self.boost, Plain(self.boost), Prompts(self.boost.tokenizer)
        found: dict[str, list[tuple[Divergence, float]]] = {name: [] for name in repairs}
        damages = []
        for donor, request in self.progress.track(cases, description=what):
            boost.clear()
            boost.generate(donor.messages, documents=donor.documents, max_new_tokens=1)
            full = plain.begin(prompts.make(request))
            wanted = cast(Reference, full.reference)
            built = boost._prompts.build(request.messages, request.documents)
            damages.append(damage(boost._engine.lookup(built, "auto").plan()))
            for name, policy in repairs.items():
                got = boost.score(
                    request.messages, wanted.ids, documents=request.documents, recompute=policy
                )
                found[name].append((divergence(wanted.logits, got.logits), got.ttft / full.ttft))
        return [_measured(name, pairs, damages) for name, pairs in found.items()]


def _measured(
    what: str, pairs: Sequence[tuple[Divergence, float]], damages: Sequence[float]
) -> Measured:
    kls = [apart.kl_mean for apart, _ in pairs]
    return Measured(
        what,
        kl=statistics.mean(kls),
        worst=max(kls),
        top1=statistics.mean(apart.top1 for apart, _ in pairs),
        time=statistics.median(time for _, time in pairs),
        per_damage=sum(kls) / max(sum(damages), 1e-9),
    )


def _floor(boost: KVBoost, requests: Sequence[Request]) -> float:
    """KL of the model as it is loaded against the same weights in float32."""
    if boost.model.dtype == torch.float32:
        return 0.0
    exact = KVBoost(deepcopy(boost.model).float(), boost.tokenizer)
    prompts, apart = Prompts(boost.tokenizer), []
    for request in requests:
        wanted = cast(Reference, Plain(exact).begin(prompts.make(request)).reference)
        got = boost.score(request.messages, wanted.ids, documents=request.documents, reuse="off")
        apart.append(divergence(wanted.logits, got.logits).kl_mean)
    return statistics.mean(apart)


def _edited(requests: Sequence[Request]) -> Iterator[tuple[Request, Request]]:
    """Each version of a file after the one before it."""
    for before, after in pairwise(requests):
        if before.session == after.session:
            yield before, after


def _asked(requests: Sequence[Request]) -> Iterator[Request]:
    """The same documents, and in turn a question that is answered in sentences and one that is
    answered in a word. After a letter of four, most models are sure of what comes next, whatever
    their KV."""
    for number, request in enumerate(requests):
        draw = random.Random(request.id)
        wanted = draw.choice(request.documents)
        if number % 2:
            words = wanted.text.split()
            start = draw.randrange(max(1, len(words) - _QUOTED))
            quoted = " ".join(words[start : start + _QUOTED])
            ask = f"Which document has these words in it: {quoted}\nAnswer with its title only."
        else:
            ask = f"In two sentences: what is in {wanted.title!r}?"
        yield replace(request, messages=({"role": "user", "content": ask},))


def _other_order(request: Request) -> Request:
    docs = list(request.documents)
    random.Random(request.id).shuffle(docs)
    if docs == list(request.documents):
        docs.reverse()
    asks = {"role": "user", "content": "Which document is the longest?"}
    return replace(request, messages=(*request.messages[:-1], asks), documents=tuple(docs))
