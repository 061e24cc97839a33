"""Where what `kvboost calibrate` measured for a model is kept, and found again."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from dataclasses import replace
from importlib import resources
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from kvboost.hub import kvboost_home
from kvboost.recompute import LADDER, Profile, QueryRecompute, SelectiveRecompute

_log = logging.getLogger(__name__)
_SHIPPED = resources.files("kvboost") / "shipped_profiles.json"


def profile_path(fingerprint: str) -> Path:
    return kvboost_home() / "profiles" / f"{fingerprint}.json"


def load_profile(fingerprint: str, shape: str) -> Profile:
    """Of this very model, if it was calibrated here; else the one shipped for models of this shape
    (`ModelRunner.shape`); else the worst of the shipped ones, step by step."""
    path = profile_path(fingerprint)
    try:
        return replace(_parse(json.loads(path.read_bytes())), source="calibrated here")
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        _log.warning("%s is no profile (%s): run kvboost calibrate again", path, error)
    shipped = {name: _parse(p) for name, p in json.loads(_SHIPPED.read_bytes()).items()}
    if shape in shipped:
        return replace(shipped[shape], source="measured on a model of this shape")
    worst = {
        step: _pair(map(max, *(p.divergence[step] for p in shipped.values()))) for step in LADDER
    }
    source = "measured on other models: kvboost calibrate measures this one"
    return Profile(worst, shift=SelectiveRecompute(32), source=source)


def save_profile(fingerprint: str, profile: Profile) -> Path:
    """Raises OSError if it can't be written."""
    path = profile_path(fingerprint)
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(to_json(profile), file, indent=1)
    os.replace(file.name, path)
    return path


def to_json(profile: Profile) -> dict[str, Any]:
    return {
        "divergence": {
            step: [float(f"{kl:.3g}") for kl in kls] for step, kls in profile.divergence.items()
        },
        "band": list(profile.band),
        "shift": profile.shift.head,
    }


def _parse(given: dict[str, Any]) -> Profile:
    first, last = map(float, given["band"])
    QueryRecompute(first=first, last=last)  # refuses what is no band
    divergence = {step: _pair(map(float, given["divergence"][step])) for step in LADDER}
    return Profile(divergence, (first, last), SelectiveRecompute(given["shift"]))


def _pair(given: Iterable[float]) -> tuple[float, float]:
    first, second = given
    return first, second
