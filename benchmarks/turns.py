"""`python -m benchmarks.turns`: does the error of moved KV grow over a conversation, and does the
idle-time upgrade keep it small? Writes docs/turns.md between its marks."""

from __future__ import annotations

import random
import statistics
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track

from benchmarks.material import reference_questions
from benchmarks.report import between_marks, head
from kvboost import KVBoost
from kvboost.bench.request import Request
from kvboost.bench.systems import Plain, Prompts
from kvboost.metrics import divergence
from kvboost.prompt import plain_documents

_TURNS = 10
_ASKS = (
    "In one sentence: what is the first document about?",
    "And the last one?",
    "Which of them is the shortest?",
    "Give a short example for one of them.",
    "What do two of them have in common?",
)


def main(
    model: Annotated[str, typer.Option(help="As for KVBoost.from_pretrained.")] = "default",
    n: Annotated[int, typer.Option(help="Conversations.")] = 4,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("docs"),
) -> None:
    """Ten turns on four passages that were stored in another order. Minutes on two cores."""
    off = KVBoost.from_pretrained(model)
    on = KVBoost(off.model, off.tokenizer, upgrade=600.0)
    systems = {"off": off, "on": on}
    kl: dict[str, list[list[float]]] = {name: [[] for _ in range(_TURNS)] for name in systems}
    exact: dict[str, list[list[float]]] = {name: [[] for _ in range(_TURNS)] for name in systems}
    plain, prompts, rng = Plain(off), Prompts(off.tokenizer), random.Random(5)
    for talk in track(reference_questions(n, (4, 4), (150, 250), off.tokenizer, 5), "Talking"):
        blocks = plain_documents(talk.documents)
        other = rng.sample(blocks, len(blocks))
        for boost in systems.values():
            boost.clear()
            boost.generate(_user("".join(other) + "Hello."), segments=other, max_new_tokens=1)
        chat = _user("".join(blocks) + _ASKS[0])
        for turn in range(_TURNS):
            full = plain.begin(prompts.make(Request("turn", tuple(chat)))).reference
            assert full is not None
            for name, boost in systems.items():
                got = boost.score(chat, full.ids, segments=blocks)
                kl[name][turn].append(divergence(full.logits, got.logits).kl_mean)
                exact[name][turn].append(got.usage.exact / got.usage.prompt)
                boost.generate(chat, segments=blocks, max_new_tokens=1)
                boost.upgrade()
            said = off.tokenizer.decode(full.ids, skip_special_tokens=True)
            asked = _user(_ASKS[(turn + 1) % len(_ASKS)])
            chat = [*chat, {"role": "assistant", "content": said}, *asked]
    lines = head(
        "turn", *(f"upgrade {name}: {what}" for name in systems for what in ("KL", "exact"))
    )
    for turn in range(_TURNS):
        cells = [
            f"{statistics.mean(kl[name][turn]):.4f} | {statistics.mean(exact[name][turn]):.0%}"
            for name in systems
        ]
        lines.append(f"| {turn + 1} | {' | '.join(cells)} |")
    lines += ["", f"{model} in {off.stats().dtype}, {n} conversations."]
    between_marks(out / "turns.md", "\n".join([*lines, ""]))


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


if __name__ == "__main__":
    typer.run(main)
