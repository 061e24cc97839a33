"""From logits to tokens, and from tokens to text that may be shown.

Knows nothing of models; logits processors are transformers' own and handed in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

import torch
from torch import Tensor

from kvboost.errors import ConfigError
from kvboost.types import FinishReason

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to pick tokens. temperature 0 is greedy and deterministic; top_k 0 and top_p 1 are off.

    repetition_penalty: as in transformers, above 1 divides the scores of all tokens so far.
    presence_penalty, frequency_penalty: as OpenAI's, taken off the scores of the answer's tokens so
    far, once or for each time. logit_bias: added to the scores of these token ids. processors:
    called as transformers' (ids `[1, T]`, scores `[1, vocab]`), after the above and before
    temperature. seed makes sampling repeatable; None draws from torch's global generator.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    processors: Sequence[LogitsProcessor] = ()
    stop: str | Sequence[str] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        def check(name: str, whole: bool, good: Callable[[float], bool], say: str) -> None:
            value = getattr(self, name)
            number = type(value) is int or (not whole and type(value) is float)
            if not number or not good(value):
                raise ConfigError(f"{name} must be {say}, not {value!r}")

        check("max_new_tokens", True, lambda n: n >= 1, "a whole number of at least 1")
        check("temperature", False, lambda t: 0 <= t < float("inf"), "a number of at least 0")
        check("top_p", False, lambda p: 0 < p <= 1, "above 0 and at most 1")
        check("top_k", True, lambda k: k >= 0, "a whole number, 0 for off")
        check("repetition_penalty", False, lambda p: 0 < p < float("inf"), "a number above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            check(name, False, lambda p: -2 <= p <= 2, "a number from -2 to 2")
        if not all(type(t) is int and t >= 0 and isfinite(b) for t, b in self.logit_bias.items()):
            raise ConfigError(f"logit_bias must map token ids to numbers, not {self.logit_bias!r}")
        if self.seed is not None:
            check("seed", True, lambda s: 0 <= s < 2**63, "a whole number of at least 0, or None")
        listed = isinstance(self.stop, str | list | tuple)
        if not listed or not all(isinstance(s, str) and s for s in self.stops):
            raise ConfigError(f"stop must be a text or texts, none empty, not {self.stop!r}")

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class Answer:
    """One answer in the making: picks tokens, shows text, knows when it is over."""

    def __init__(
        self,
        sampling: Sampling,
        processors: LogitsProcessor,
        decode: Callable[[list[int]], str],
        eos: frozenset[int],
        device: torch.device,
    ) -> None:
        """processors: transformers' own, for what `sampling` says."""
        self._greedy = sampling.temperature == 0
        self._sampling = sampling
        self._processors = processors
        self._eos = eos
        bias = sampling.logit_bias
        self._biased = torch.tensor(list(bias), dtype=torch.long, device=device)
        self._bias = torch.tensor(list(bias.values()), dtype=torch.float32, device=device)
        self._generator = None
        if sampling.seed is not None:
            self._generator = torch.Generator(device).manual_seed(sampling.seed)
        self._stream = TextStream(decode, sampling.stops)
        self.ids: list[int] = []
        self.finish_reason: FinishReason = "length"

    @property
    def text(self) -> str:
        return self._stream.text

    @property
    def finished(self) -> bool:
        return self.finish_reason == "stop"

    def take(self, logits_1V: Tensor, prompt: Sequence[int]) -> str:
        """Append the next token to `ids`; return the text that may be shown now."""
        context = torch.tensor([[*prompt, *self.ids]], device=logits_1V.device)
        logits = self._processors(context, self._adjusted(logits_1V, context))
        if self._greedy:
            token = int(logits.argmax(-1))
        else:
            token = int(torch.multinomial(logits.softmax(-1), 1, generator=self._generator))
        self.ids.append(token)
        piece = "" if token in self._eos else self._stream.push(token)
        if token in self._eos or self._stream.stopped:
            self.finish_reason = "stop"
        return piece

    def _adjusted(self, logits_1V: Tensor, context: Tensor) -> Tensor:
        """Less the penalties of OpenAI's API, plus the bias, then what the caller's processors
        make of it."""
        s, logits = self._sampling, logits_1V
        if s.logit_bias or ((s.presence_penalty or s.frequency_penalty) and self.ids):
            logits = logits.index_add(1, self._biased, self._bias[None])
            for token, times in Counter(self.ids).items():
                logits[0, token] -= s.presence_penalty + s.frequency_penalty * times
        for processor in s.processors:
            logits = processor(context, logits)
        return logits

    def end(self) -> str:
        """No more tokens: return the text still held back."""
        return self._stream.finish()


class TextStream:
    """Turns tokens into text piece by piece: never half a character, never part of a stop string.

    `stopped` is set once a stop string has appeared; it and what follows it are not shown.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str]) -> None:
        self._decode = decode
        self._stops = stops
        self._ids: list[int] = []
        self._context = 0  # decoding starts here, so that the tokenizer sees a few tokens before
        self._decoded = 0  # ids before this are in the text
        self._held = ""  # decoded, but perhaps the beginning of a stop string
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Take a token; return the text that may be shown now."""
        self._ids.append(token)
        return self._show(self._new_text(final=False), final=False)

    def finish(self) -> str:
        """No more tokens: return the text still held back."""
        return "" if self.stopped else self._show(self._new_text(final=True), final=True)

    def _new_text(self, *, final: bool) -> str:
        before = self._decode(self._ids[self._context : self._decoded])
        text = self._decode(self._ids[self._context :])
        if text.endswith("\ufffd") and not final:
            return ""  # the rest of the character is in tokens to come
        self._context, self._decoded = self._decoded, len(self._ids)
        return text[len(before) :]

    def _show(self, new: str, *, final: bool) -> str:
        pending = self._held + new
        found = [at for s in self._stops if (at := pending.find(s)) >= 0]
        if found:
            self.stopped = True
            shown, self._held = pending[: min(found)], ""
        else:
            keep = 0 if final else self._overlap(pending)
            shown, self._held = pending[: len(pending) - keep], pending[len(pending) - keep :]
        self.text += shown
        return shown

    def _overlap(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(s) - 1 for s in self._stops), default=0)
        sizes = range(min(longest, len(text)), 0, -1)
        return next((n for n in sizes if any(s.startswith(text[-n:]) for s in self._stops)), 0)
