"""Why tokens of a prompt were computed."""

from __future__ import annotations

from collections import Counter

from kvboost.engine import Engine, Prefilled
from kvboost.types import Reuse


def misses(engine: Engine, made: Prefilled, reuse: Reuse) -> dict[str, int]:
    """Tokens that no stored KV was used for, by reason:

    off: the request forbids reuse. unmovable: this model's KV is not moved, and the prefix was new.
    new: nothing like it is stored. sink: a prompt's first piece, on which all others lean, is never
    taken from elsewhere. little: so little was known that using it would have cost more. short: too
    small a piece to be moved. To be asked before the prompt itself is stored.
    """
    plan, ids = made.plan, made.prompt.ids
    covered = {row for s in plan.splices for row in range(s.start, s.end)}
    if reuse == "off":
        return {"off": len(ids)}
    keys, memory = engine.keys(len(ids)), engine.store.memory
    found: Counter[str] = Counter()
    for chunk in engine.chunker.split(ids, made.prompt.borders):
        missed = sum(row not in covered for row in range(chunk.start, chunk.end))
        if missed == 0:
            continue
        if not any(memory.variants(keys.content(chunk.ids))):
            reason = "new"
        elif reuse == "exact" or not engine.runner.support.movable(len(ids)):
            reason = "unmovable"
        elif not plan.splices:
            reason = "little"
        else:
            reason = "sink" if chunk.start == 0 else "short"
        found[reason] += missed
    return dict(found)
