"""Profiles: kept and found again, and what decides where there is none."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from families import PROFILE, boost, tokens

from kvboost import SelectiveRecompute, profiles
from kvboost.plan import FRESH
from kvboost.profiles import load_profile, profile_path, save_profile, to_json
from kvboost.recompute import LADDER, Profile

Table = Mapping[str, tuple[float, float]]
SHIPPED = json.loads(profiles._SHIPPED.read_bytes())
SHAPE = next(iter(SHIPPED))
MINE = Profile(
    {step: (0.123 * n, 0.9 / (n + 1)) for n, step in enumerate(LADDER)},
    (0.3, 0.6),
    SelectiveRecompute(32),
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(profiles, "kvboost_home", lambda: tmp_path)
    return tmp_path


def worst(*found: Profile) -> Table:
    pairs = {step: [p.divergence[step] for p in found] for step in LADDER}
    return {step: (max(a for a, _ in two), max(b for _, b in two)) for step, two in pairs.items()}


def same(found: Table, expected: Table) -> bool:
    """Up to the digits that are written."""
    return list(found) == list(expected) and all(
        kls == pytest.approx(expected[step], rel=5e-3) for step, kls in found.items()
    )


def test_what_was_measured_here_is_found_for_this_very_model(home: Path) -> None:
    path = save_profile("mine", MINE)
    assert path == profile_path("mine") and path.is_relative_to(home)
    found = load_profile("mine", SHAPE)
    assert same(found.divergence, MINE.divergence)
    assert (found.band, found.shift) == (MINE.band, MINE.shift)
    assert load_profile("another", SHAPE) != found
    assert found.source == "calibrated here" and "this shape" in load_profile("no", SHAPE).source
    save_profile("mine", PROFILE)
    assert same(load_profile("mine", SHAPE).divergence, PROFILE.divergence)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("shape", SHIPPED)
def test_what_is_shipped_has_every_step(shape: str) -> None:
    found = load_profile("unknown", shape)
    assert list(found.divergence) == list(LADDER)
    assert all(math.isfinite(kl) and kl > 0 for kls in found.divergence.values() for kl in kls)
    none, most = found.divergence["none"], found.divergence["query-30"]
    assert none[0] > most[0] and none[1] > most[1]
    assert set(to_json(found)) == set(SHIPPED[shape])


def test_models_of_an_unknown_shape_are_taken_to_be_as_the_worst(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = load_profile("unknown", "gpt9-1x1")
    assert unknown.divergence == worst(*(load_profile("unknown", shape) for shape in SHIPPED))
    shipped = home / "shipped.json"
    shipped.write_text(json.dumps({"a-1x1": to_json(MINE), "b-2x2": to_json(PROFILE)}))
    monkeypatch.setattr(profiles, "_SHIPPED", shipped)
    unknown = load_profile("unknown", SHAPE)
    assert same(unknown.divergence, worst(MINE, PROFILE))
    assert unknown.shift == SelectiveRecompute(32) and "kvboost calibrate" in unknown.source


GOOD = to_json(MINE)


@pytest.mark.parametrize(
    "torn",
    [
        *("", "{", "[]", "null", "7", "\xff", "{}", json.dumps(GOOD)[:-9]),
        *(json.dumps({k: v for k, v in GOOD.items() if k != key}) for key in GOOD),
        json.dumps(GOOD | {"divergence": {"none": 1.0}}),
        json.dumps(GOOD | {"divergence": dict.fromkeys(LADDER, ("much", "more"))}),
        json.dumps(GOOD | {"divergence": dict.fromkeys(LADDER, (1.0,))}),
        json.dumps(GOOD | {"divergence": dict.fromkeys(LADDER, 1.0)}),
        json.dumps(GOOD | {"band": [0.8]}),
        json.dumps(GOOD | {"band": [0.8, 0.5]}),
        json.dumps(GOOD | {"band": 0.5}),
        json.dumps(GOOD | {"shift": -1}),
        json.dumps(GOOD | {"shift": "16"}),
    ],
)
def test_a_torn_profile_is_told_of_and_not_used(
    torn: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = profile_path("mine")
    path.parent.mkdir()
    path.write_text(torn, encoding="latin-1")
    with caplog.at_level(logging.WARNING):
        assert load_profile("mine", SHAPE) == load_profile("unknown", SHAPE)
    (record,) = caplog.records
    assert str(path) in record.message and "run kvboost calibrate again" in record.message


def test_a_home_that_is_no_folder_stops_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (home / "file").touch()
    monkeypatch.setattr(profiles, "kvboost_home", lambda: home / "file")
    assert load_profile("mine", SHAPE) == load_profile("unknown", SHAPE)
    assert not caplog.records


@pytest.mark.parametrize(("divergence", "repaired"), [(0.0, 0), (1e9, 220)])
def test_a_model_goes_by_its_profile(divergence: float, repaired: int) -> None:
    model = boost("llama").stats().fingerprint
    save_profile(model, replace(PROFILE, divergence=dict.fromkeys(LADDER, (divergence,) * 2)))
    made, head, one, two = boost("llama"), tokens(40, 1), tokens(110, 2), tokens(110, 3)
    made.prefill([*head, *one, *two], segments=[40, 150])
    asked: dict[str, Any] = {"segments": [40, 150, 260], "max_new_tokens": 1}
    completion = made.generate([*head, *two, *one, *tokens(FRESH, 4)], **asked)
    assert completion.usage.recomputed == repaired
    assert completion.usage.moved == 220 - repaired
