"""`kvboost calibrate` on a tiny model, whose prompts are words."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import families
import pytest
from rich.progress import Progress
from typer.testing import CliRunner

from kvboost import ConfigError, Document, KVBoost, SelectiveRecompute, cli, profiles
from kvboost import calibrate as module
from kvboost.bench.material import Material
from kvboost.bench.request import Request
from kvboost.calibrate import (
    Calibration,
    Measured,
    _asked,
    _edited,
    _measured,
    _other_order,
    calibrate,
)
from kvboost.metrics import Divergence
from kvboost.profiles import load_profile
from kvboost.recompute import LADDER, MEASURED_AT, QueryRecompute

RUNNER = CliRunner()


def words(count: int, source: Random) -> str:
    return " ".join(f"w{source.randrange(1, families.VOCABULARY)}" for _ in range(count))


def requests(name: str, n: int, seed: int, material: Material) -> list[Request]:
    """Three of six documents in any order; edited ones keep both their ends."""
    known, source = Random(name), Random(f"{name} {seed}")
    texts = [words(70, known) for _ in range(6)]
    made = []
    for number in range(n):
        shown = source.sample(texts, 3)
        if name == "edits":
            middle = words(number + 1, source)
            shown = [f"{texts[0]} {middle} {texts[1]} {texts[2]}"]
        asks = ({"role": "user", "content": words(9, source)},)
        docs = tuple(Document(text, "w7") for text in shown)
        made.append(Request(f"{name}-{number}", asks, docs, session=name, bucket=2048))
    return made


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "generate", requests)
    monkeypatch.setattr(profiles, "kvboost_home", lambda: tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    chat = deepcopy(families.tokenizer())
    chat.chat_template = "w1 {% for m in messages %}w2 {{ m['content'] }} {% endfor %}w3"
    return chat


@pytest.fixture
def boost(tokenizer: Any) -> KVBoost:
    return KVBoost(families.model("llama"), tokenizer, chunk_tokens=32)


def stdlib() -> list[tuple[str, str]]:
    return [("short", "w1"), ("long", words(900, Random(5)))]


def measured(boost: KVBoost) -> Calibration:
    tokenizer = boost.tokenizer
    material = Material(lambda text: tokenizer(text).input_ids, tokenizer.decode, stdlib())
    with Progress(disable=True) as progress:
        return calibrate(boost, material, 3, progress)


def test_every_repair_is_measured(boost: KVBoost) -> None:
    found = measured(boost)
    for kind, (measured_on, damage) in enumerate(
        zip((found.files, found.passages), MEASURED_AT, strict=True)
    ):
        assert [m.what for m in measured_on] == list(LADDER) == list(found.profile.divergence)
        none = measured_on[0]
        assert none.kl > 0 and none.worst >= none.kl and none.top1 <= 1 and none.time > 0
        for m in measured_on:
            assert found.profile.divergence[m.what][kind] == m.per_damage * damage
            assert m.per_damage / none.per_damage == pytest.approx(m.kl / none.kl)
    assert found.floor == 0 and found.formats["raw"] == 0 < found.formats["k4v4"]
    assert len(found.shift) == len(found.bands) == 4 and found.shift[0].kl > 0


def test_what_the_number_format_costs_is_measured_too(tokenizer: Any) -> None:
    half = deepcopy(families.model("llama")).bfloat16()
    assert measured(KVBoost(half, tokenizer, chunk_tokens=32)).floor > 0


def test_what_is_left_is_per_damage() -> None:
    found = [
        (Divergence(kl, 2 * kl, top1), kl) for kl, top1 in ((0.1, 1.0), (0.3, 0.5), (0.2, 0.9))
    ]
    m = _measured("drift", found, [0.5, 1.5, 1.0])
    assert m == Measured("drift", m.kl, 0.3, m.top1, 0.2, m.per_damage)
    assert (m.kl, m.top1, m.per_damage) == pytest.approx((0.2, 0.8, 0.2))


@pytest.mark.parametrize(
    ("kls", "head", "bands", "band"),
    [
        ((0.1, 0.1, 0.1, 0.1), 8, (9, 3, 1, 2), 2),
        ((0.5, 0.1, 0.1, 0.1), 8, (2.9, 3, 2.9, 3), 1),
        ((0.5, 0.2, 0.105, 0.1), 16, (3, 3, 3, 1), 3),
    ],
)
def test_the_profile_is_the_cheapest_of_the_best(
    kls: Any, head: int, bands: Any, band: int, boost: KVBoost, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = iter([kls, bands, range(len(LADDER)), range(5, 5 + len(LADDER))])
    asked: list[dict[str, Any]] = []

    def run(bench: Any, what: str, cases: Any, repairs: dict[str, Any]) -> list[Measured]:
        asked.append(repairs)
        found = zip(repairs, next(given), strict=True)
        return [Measured(name, kl, kl, 1.0, 1.0, 3 * kl) for name, kl in found]

    monkeypatch.setattr(module._Bench, "run", run)
    profile = measured(boost).profile
    little, much = MEASURED_AT
    assert profile.divergence == {
        step: (3 * n * little, 3 * (n + 5) * much) for n, step in enumerate(LADDER)
    }
    assert (profile.band, profile.shift) == (module._BANDS[band], SelectiveRecompute(head))
    queries = [p for kind in asked[2:] for p in kind.values() if isinstance(p, QueryRecompute)]
    assert {(p.first, p.last) for p in queries} == {profile.band}


def test_requests_come_after_one_that_stored_their_text() -> None:
    edited = [
        Request(str(n), ({"role": "user", "content": "?"},), session=s)
        for n, s in enumerate("aabbb")
    ]
    assert [(a.id, b.id) for a, b in _edited(edited)] == [("0", "1"), ("2", "3"), ("3", "4")]
    for count in range(2, 6):
        docs = tuple(Document(f"text {n}") for n in range(count))
        request = Request("r", ({"role": "system", "content": "s"}, *edited[0].messages), docs)
        other = _other_order(request)
        assert other.documents != docs and sorted(map(str, other.documents)) == sorted(
            map(str, docs)
        )
        assert other.messages[0] == request.messages[0] and other.messages[1] != request.messages[1]


def test_questions_are_answered_in_sentences_and_in_a_word() -> None:
    docs = tuple(Document(words(60, Random(n)), f"title {n}") for n in range(3))
    asked = Request("r", ({"role": "user", "content": "?"},), docs)
    few = replace(asked, documents=(Document("two words", "short"),))
    open_, word, short = (r.messages[0]["content"] for r in _asked([asked, asked, few]))
    assert open_.startswith("In two sentences: what is in 'title ")
    quoted = word.removeprefix("Which document has these words in it: ").split("\n")[0]
    assert len(quoted.split()) == 10 and any(quoted in doc.text for doc in docs)
    assert "'short'" in short
    assert "in it: two words\n" in list(_asked([asked, few]))[1].messages[0]["content"]


def test_a_model_whose_kv_cannot_be_moved_is_not_calibrated(tokenizer: Any) -> None:
    with pytest.warns(UserWarning, match="only exact prefixes"):
        fixed = KVBoost(families.model("gpt2"), tokenizer)
    with pytest.raises(ConfigError, match="nothing to calibrate: this model's KV can't be moved"):
        measured(fixed)


@pytest.mark.parametrize(
    ("limit", "says"),
    [
        ("1e9", "files of 512 tokens are repaired by none, passages of 200 by none"),
        ("0", "passages of 200 by no repair that there is. Prompts that none repairs"),
    ],
)
def test_the_command_shows_and_keeps_what_was_measured(
    small: Path, boost: KVBoost, limit: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KVBoost, "from_pretrained", lambda model, dtype: boost)
    monkeypatch.setattr("kvboost.bench.material.stdlib_files", stdlib)
    monkeypatch.setenv("COLUMNS", "200")
    shown = RUNNER.invoke(
        cli.app, ["calibrate", "-n", "2", "--limit", limit], catch_exceptions=False
    )
    assert shown.exit_code == 0
    for word in ("KL 0.0000 against float32", "heads 16", "layers 50% to 80%", *LADDER, "k8v4"):
        assert word in shown.output
    assert says in " ".join(shown.output.split())
    (path,) = (small / "profiles").iterdir()
    assert path.name in shown.output.replace("\n", "")
    assert json.loads(path.read_text())["divergence"].keys() == LADDER.keys()
    digest = boost.stats().fingerprint
    assert path.stem == digest
    assert KVBoost(boost.model, boost.tokenizer)._auto.profile == load_profile(digest, "")
    assert load_profile(digest, "") != load_profile("another", "")


def test_the_command_needs_files_and_prompts(tmp_path: Path, monkeypatch: Any) -> None:
    assert RUNNER.invoke(cli.app, ["calibrate", "-n", "1"]).exit_code == 2
    monkeypatch.setattr(KVBoost, "from_pretrained", lambda model, dtype: families.boost("llama"))
    with pytest.raises(ConfigError, match="no source files"):
        RUNNER.invoke(cli.app, ["calibrate", "--files", str(tmp_path)], catch_exceptions=False)
