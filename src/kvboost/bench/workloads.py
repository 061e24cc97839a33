"""The workloads of `kvboost bench`, by name. Deterministic by seed.

Knows nothing of models or of the systems that are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from random import Random

from kvboost.bench.agents import agents
from kvboost.bench.bugs import bugs, paired
from kvboost.bench.chat import chat
from kvboost.bench.edits import edits
from kvboost.bench.material import Material
from kvboost.bench.passages import retrieval
from kvboost.bench.request import Request
from kvboost.errors import ConfigError

Generator = Callable[[int, Random, Material], Iterator[Request]]

WORKLOADS: dict[str, Generator] = {
    "bugs": bugs,
    "paired": paired,
    "retrieval": retrieval,
    "edits": edits,
    "agents": agents,
    "chat": chat,
}


def generate(name: str, n: int, seed: int, material: Material) -> list[Request]:
    """`n` requests of a workload. Raises ConfigError for an unknown one, and if the files of the
    material are too few for it."""
    if name not in WORKLOADS:
        raise ConfigError(f"there is no workload {name!r}; known are {', '.join(WORKLOADS)}")
    if n < 1:
        raise ConfigError(f"a workload has at least one request, not {n}")
    return list(islice(WORKLOADS[name](n, Random(f"{name} {seed}"), material), n))
