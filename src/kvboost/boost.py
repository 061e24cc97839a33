"""KVBoost: a causal language model that does not compute twice what it has read before.

The public face: text in, text out, and what it cost. The order of things is in `engine.py`.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self, Unpack

from rich.progress import track
from torch import Tensor

from kvboost import hub
from kvboost.chunking import Chunker, ChunkingConfig
from kvboost.config import Config, KVFormat
from kvboost.engine import Engine, Prefilled
from kvboost.errors import ConfigError, PromptError
from kvboost.explain import Explanation, explain
from kvboost.fingerprint import fingerprint, weights_version
from kvboost.formats import STORAGE_SHARE, choose_format
from kvboost.generation import ROOM, Generation
from kvboost.metrics import Stopwatch
from kvboost.model import Cache, PreTrainedModel, logits_processors, plain_cache
from kvboost.numerics import choose_device, choose_dtype
from kvboost.options import GenerateOptions, Options, PromptOptions, checked
from kvboost.profiles import load_profile
from kvboost.prompt import DocumentLike, Prompt, PromptBuilder, PromptLike, as_list
from kvboost.recompute import AutoRecompute, NoRecompute
from kvboost.runner import ModelRunner
from kvboost.sampling import Answer
from kvboost.store import StoreStats, TierStats
from kvboost.store.opening import open_seal, open_store
from kvboost.store.trace import Cost, TraceRecorder
from kvboost.types import Completion, Usage
from kvboost.upgrade import Upgrades


@dataclass(frozen=True, slots=True)
class Stats:
    """What a KVBoost runs and has done. `reuse`: where KV is reused, and if not everywhere, why.
    repairs: where it is known from what moved KV does to this model.
    store: what memory holds. tiers: disk and server, if there are any. upgraded, waiting: tokens
    computed exactly while idle, and those that wait for it."""

    dtype: str
    device: str
    fingerprint: str
    reuse: str
    repairs: str
    requests: int
    kv_format: str
    tokens: Usage
    store: StoreStats
    tiers: tuple[TierStats, ...]
    upgraded: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Score:
    """logits: float32 `[answer tokens, vocab]`. usage: of the prompt. ttft: seconds of wall clock
    from the call to the first token's logits."""

    logits: Tensor
    usage: Usage
    ttft: float


class Stream(Iterator[str]):
    """The text of an answer as it comes. `completion` is there once the text has ended."""

    def __init__(self, steps: Generator[str, None, Completion]) -> None:
        self._steps = steps
        self.completion: Completion | None = None

    def __next__(self) -> str:
        try:
            return next(self._steps)
        except StopIteration as end:
            if self.completion is None:
                self.completion = end.value
            raise StopIteration from None

    def close(self) -> None:
        """Stop generating; what was computed so far is stored."""
        self._steps.close()


class KVBoost:
    """Generates with a Hugging Face causal LM, reusing KV anywhere in the prompt.

    May be used from several threads; their requests take turns step by step.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, **config: Any) -> None:
        """Wrap a loaded model, which is not changed. `config`: the fields of `Config`.

        Probes in a few short passes what the model's KV allows; warns if it can't be moved.
        Raises UnsupportedModelError, ConfigError.
        """
        self.config = checked(Config, config)
        self.model = model
        self.tokenizer = tokenizer
        self._prompts = PromptBuilder(tokenizer)
        runner = ModelRunner(model)
        mean = self.config.chunk_tokens
        sizes = ChunkingConfig(min(32, mean // 2), mean, max(256, 3 * mean))
        chunker = Chunker(sizes, frozenset(tokenizer.all_special_ids))
        store = open_store(self.config)
        self._closing = weakref.finalize(self, store.close)
        self._engine = Engine(runner, store, chunker, self.config.namespace, self._format(runner))
        self._engine.seal = open_seal()
        if self.config.trace is not None:
            cost = Cost(bytes_per_token=runner.layout.bytes_per_token)
            self._engine.trace = TraceRecorder(Path(self.config.trace), cost)
        self._upgrades = Upgrades(model, self.config.upgrade)
        self._stopping = weakref.finalize(self, self._upgrades.close)
        self._weights: int | None = None
        self._whole: KVBoost | None = None
        self._check_weights()
        self._totals: Counter[str] = Counter()
        self._eos = _eos(model, tokenizer)
        if runner.support.reason:
            warnings.warn(
                f"KV of this model can't be moved ({runner.support.reason}): only exact prefixes "
                "are reused",
                stacklevel=2,
            )

    @classmethod
    def from_pretrained(
        cls, model: str = "default", *, dtype: str = "auto", device: str = "auto", **config: Any
    ) -> Self:
        """Load a model and wrap it.

        model: "default" (the embedded SmolLM2-135M-Instruct), a Hugging Face id, a local folder or
        a GGUF file. dtype: "auto" measures which of bfloat16 and float32 this machine runs faster.
        device: "auto" takes a GPU if there is one. `attn_implementation` may stand in `config`.
        """
        attention = config.pop("attn_implementation", None)
        where = choose_device(device)
        loaded, tokenizer = hub.load(model, choose_dtype(dtype, where), where, attention)
        return cls(loaded, tokenizer, **config)

    def generate(self, prompt: PromptLike, **options: Unpack[GenerateOptions]) -> Completion:
        """Answer a prompt: raw text, chat messages, or token ids. Options: see GenerateOptions.

        Raises PromptError (empty, too long, ill-typed) and ConfigError (unknown or bad option).
        """
        stream = self.stream(prompt, **options)
        for _ in stream:
            pass
        assert stream.completion is not None
        return stream.completion

    def stream(self, prompt: PromptLike, **options: Unpack[GenerateOptions]) -> Stream:
        """Like `generate`, piece by piece: iterate for text; `completion` is there at the end."""
        clock = self._clock()
        steps = self._run(prompt, self.parse(options), clock)
        return Stream(self._upgrades.traffic.during(steps))

    def prefill(self, prompt: PromptLike, **options: Unpack[PromptOptions]) -> Cache:
        """transformers' own cache of all but the prompt's last token, made with reuse.

        Hand it to `model.generate(input_ids, past_key_values=cache)` (`cache=cache` since
        transformers 5.24) with the same ids: processors, streamers and beam search (after
        `cache.batch_repeat_interleave(num_beams)`) then work on reused KV. Assisted decoding of
        transformers 5 goes wrong on any cache that is not empty. The cache is the caller's.
        """
        made = self._prefill(prompt, self.parse(options))
        keep = len(made.prompt.ids) - 1
        layers = [made.buffer.layer(n) for n in range(self._engine.runner.layers)]
        return plain_cache(
            self.model, [(k[None, :, :keep].clone(), v[None, :, :keep].clone()) for k, v in layers]
        )

    def score(
        self, prompt: PromptLike, answer: Sequence[int], **options: Unpack[PromptOptions]
    ) -> Score:
        """The logits that predict each token of a given answer, and what they cost.

        For measuring: with reuse="off" they are the reference that `metrics.divergence` compares
        others with. Nothing computed is stored or counted.
        """
        if not answer:
            raise PromptError("the answer is empty: give at least one token id")
        parsed, clock = self.parse(options), self._clock()
        built = self.build(prompt, parsed, clock)
        room = self._engine.room(len(built.ids), len(answer))
        if room < len(answer):
            raise PromptError(f"the answer is {len(answer) - room} tokens over the model's window")
        with self._upgrades.traffic.request():
            prefilled = self._engine.prefill(built, parsed.reuse, parsed.policy, room - 1, clock)
            ttft = clock.elapsed()
            return Score(self._engine.score(prefilled, answer), prefilled.usage, ttft)

    def warm(
        self, texts: Iterable[DocumentLike], *, pin: float | None = None, progress: bool = True
    ) -> int:
        """Compute and store pieces ahead of their first question; returns the tokens stored.

        Each is computed behind the opening of the chat template (or BOS), never alone: KV of a
        piece encoded alone has a false attention sink at its head. pin: seconds for which they are
        not evicted from memory; half of it can be pinned at most. `progress` shows a bar.
        """
        pieces = [self._prompts.warm(piece) for piece in as_list("texts", texts)]
        for prompt in track(pieces, "Warming", disable=not progress or len(pieces) < 2):
            self._prefill(
                prompt.ids, Options(NoRecompute(), reuse="exact", segments=prompt.borders)
            )
            if pin is not None and not self._engine.pin(prompt, pin):
                raise ConfigError(
                    f"max_bytes={self.config.max_bytes} is too small to pin this: at most half of "
                    "it can be pinned. Raise it, or pin less"
                )
        return sum(len(p.ids) - sum(p.borders) for p in pieces)

    def explain(self, prompt: PromptLike, **options: Unpack[PromptOptions]) -> Explanation:
        """What would be reused of a prompt, chunk by chunk, and what differs at the first miss.
        Computes nothing and stores nothing."""
        parsed = self.parse(options)
        built = self.build(prompt, parsed, self._clock())
        return explain(self._engine, built, parsed.reuse, self._prompts.decode)

    def clear(self) -> None:
        """Forget everything stored in memory. What is on disk or on a server stays, for it may be
        others' too: `kvboost cache clear` empties a folder."""
        self._upgrades.clear()
        self._engine.store.memory.clear()

    def flush(self, seconds: float = 60.0) -> bool:
        """Wait until everything stored so far is on disk and on the server (they are written to in
        the background); False if that takes longer. What a queue had no room for is not written:
        `stats().tiers` counts it as dropped."""
        return self._engine.store.flush(seconds)

    def upgrade(self, seconds: float = 60.0) -> bool:
        """Wait until all that waits has been computed exactly (see `Config.upgrade`; it is done in
        the background, when no request runs); False if that takes longer."""
        return self._upgrades.wait(seconds)

    def close(self) -> None:
        """Stop upgrading, write what still waits to be written and let go of disk and server.
        Happens by itself when the process ends."""
        self._stopping()
        self._closing()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def stats(self) -> Stats:
        """What runs and what has been done so far."""
        self._check_weights()
        layout, support = self._engine.runner.layout, self._engine.runner.support
        return Stats(
            dtype=str(layout.dtype).removeprefix("torch."),
            device=str(layout.device),
            fingerprint=self._engine.fingerprint,
            reuse=f"exact prefixes only: {support.reason}" if support.reason else "anywhere",
            repairs=self._auto.profile.source,
            requests=self._totals["requests"],
            tokens=Usage(**{f.name: self._totals[f.name] for f in fields(Usage)}),
            kv_format=self._engine.kv_format,
            store=self._engine.store.memory.stats(),
            tiers=self._engine.store.tiers(),
            upgraded=self._upgrades.tokens,
            waiting=self._upgrades.waiting,
        )

    def _format(self, runner: ModelRunner) -> KVFormat:
        if self.config.kv_format != "auto":
            return self.config.kv_format
        limit = STORAGE_SHARE * self.config.max_divergence
        digest = fingerprint(self.model, self.tokenizer)
        return choose_format(runner, lambda text: self.tokenizer(text).input_ids, digest, limit)

    def _clock(self) -> Stopwatch:
        return Stopwatch(self._engine.runner.layout.device)

    def _check_weights(self) -> None:
        """Weights and adapters may be swapped under us: their KV must not be found then, and what
        moved KV does to them may be another."""
        version = weights_version(self.model)
        if version != self._weights:
            digest = fingerprint(self.model, self.tokenizer)
            profile = load_profile(digest, self._engine.runner.shape)
            self._auto = AutoRecompute(profile, self.config.max_divergence)
            self._engine.fingerprint = digest
            self._weights = version

    def _prefill(self, prompt: PromptLike, options: Options) -> Prefilled:
        """Prefill and store, without an answer."""
        clock = self._clock()
        built, weights = self.build(prompt, options, clock), self._weights
        with self._upgrades.traffic.request():
            prefilled = self._engine.prefill(built, options.reuse, options.policy, 0, clock)
            self._harvest(prefilled, built.ids, options, weights)
        self.account(prefilled.usage)
        return prefilled

    def _harvest(
        self, prefilled: Prefilled, ids: Sequence[int], options: Options, weights: int | None
    ) -> None:
        """Store what a request computed, unless the weights were swapped since it began."""
        if options.reuse != "off" and weights_version(self.model) == weights:
            self._engine.harvest(prefilled, ids)
            self._upgrades.add(self._engine, prefilled, ids, weights)

    def _run(
        self, prompt: PromptLike, options: Options, clock: Stopwatch
    ) -> Generator[str, None, Completion]:
        made, sound = self.begin(self.build(prompt, options, clock), options, clock), False
        try:
            yield from made.steps(self._engine)
            sound = True
        except GeneratorExit:
            sound = True
            raise
        finally:
            if sound:  # a step that failed half-way may have left anything in the buffer
                self.store(made)
            clock.lap("store")
            self.account(made.usage)
        return made.completion()

    # -- for whoever computes the steps of several requests together

    def parse(self, options: PromptOptions | GenerateOptions) -> Options:
        """Options, checked. Raises ConfigError."""
        parsed, known = Options.of(options, self._auto), self._engine.runner.vocabulary
        if any(token >= known for token in parsed.sampling.logit_bias):
            raise ConfigError(f"logit_bias names a token that is not among the model's {known}")
        return parsed

    def build(self, prompt: PromptLike, options: Options, clock: Stopwatch) -> Prompt:
        """Token ids and borders. Raises PromptError."""
        self._check_weights()
        built = self._prompts.build(prompt, options.documents, options.segments, options.tools)
        known, most = self._engine.runner.vocabulary, max(built.ids)
        if most >= known:
            raise PromptError(f"token id {most} is not in the model's {known} tokens")
        clock.lap("tokenize")
        return built

    def begin(self, built: Prompt, options: Options, clock: Stopwatch) -> Generation:
        """Prefill: what comes of it has its first logits, and no token yet."""
        limit = self._engine.room(len(built.ids), options.sampling.max_new_tokens)
        weights = self._weights
        room = min(limit - 1, ROOM)
        prefilled = self._engine.prefill(built, options.reuse, options.policy, room, clock)
        return Generation(prefilled, self._answer(options), limit, options, weights, clock)

    def fork(self, made: Generation, options: Options, clock: Stopwatch) -> Generation:
        """Another answer to the same prompt, which is not computed again."""
        tokens = len(made.prefilled.prompt.ids)
        limit = self._engine.room(tokens, options.sampling.max_new_tokens)
        prefilled = made.prefilled.copy(min(limit - 1, ROOM))
        return Generation(prefilled, self._answer(options), limit, options, made.weights, clock)

    def store(self, made: Generation) -> None:
        """Keep the KV that it has computed so far."""
        self._harvest(made.prefilled, made.stored, made.options, made.weights)

    def account(self, usage: Usage) -> None:
        """Count a request that is over."""
        self._totals.update(asdict(usage))
        self._totals["requests"] += 1

    def scoped(self, namespace: str, shared: str | None = None) -> Self:
        """The same model and store, seen from another namespace. What is stored under `shared` is
        found too, and nothing is stored there."""
        other, engine = copy(self), copy(self._engine)
        other._whole = self  # closes the store when it is collected
        other.config = replace(self.config, namespace=namespace)
        engine.namespace, engine.shared, other._engine = namespace, shared, engine
        return other

    def _answer(self, options: Options) -> Answer:
        s, device = options.sampling, self._engine.runner.layout.device
        processors = logits_processors(s.temperature, s.top_k, s.top_p, s.repetition_penalty)
        return Answer(s, processors, self._prompts.decode, self._eos, device)


def _eos(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer: the model's own list, and the tokenizer's."""
    listed = getattr(model.generation_config, "eos_token_id", None)
    ids = listed if isinstance(listed, list) else [listed]
    return frozenset(i for i in [*ids, tokenizer.eos_token_id] if i is not None)
