"""A process that uses a disk tier, for tests that need a second one or kill it: without torch.

python disk_child.py KVBOOST FOLDER MAX_BYTES SEED SECONDS
"""

from __future__ import annotations

import random
import sys
import time
import types
from importlib import import_module
from pathlib import Path


def without_init(package: Path) -> None:
    """Make kvboost's modules importable without what its __init__ files import."""
    for name, path in (("kvboost", package), ("kvboost.store", package / "store")):
        module = types.ModuleType(name)
        module.__path__ = [str(path)]
        sys.modules[name] = module


def use(folder: str, max_bytes: int, seed: int, seconds: float) -> None:
    """Write, read, use and discard records; whatever can be read is whole."""
    records = import_module("tier_contract")
    rng = random.Random(seed)
    pool = [records.numbered(number) for number in rng.sample(range(300), 20)]
    tier = import_module("kvboost.store.disk").DiskTier(Path(folder), max_bytes)
    if "torch" in sys.modules:
        raise SystemExit("a disk tier must not need torch")
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        record, other = rng.sample(pool, 2)
        if not tier.write(record):
            tier.discard(record.key, rng.choice(["checksum", None, None]))
        for there, data in zip((record, other), tier.read([record.key, other.key]), strict=True):
            if data is not None and data != records.whole(there):
                raise SystemExit("a record is not whole")
        tier.used([other.key])
    tier.close()


if __name__ == "__main__":
    without_init(Path(sys.argv[1]))
    use(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
