"""`kvboost bench` end to end on a few short requests, and its parts that read and judge."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost import ConfigError, Document, KVBoost, PromptError
from kvboost.bench import run as run_module
from kvboost.bench import systems
from kvboost.bench.answers import given, named, right, says, stale
from kvboost.bench.cost import Floor
from kvboost.bench.peers import PeerAnswer, PeerError
from kvboost.bench.record import Log, Record, read
from kvboost.bench.request import Request
from kvboost.bench.run import Bench, Setup
from kvboost.bench.systems import Plain, Prompts, options_of

DOCS = tuple(
    Document(f"{name} keeps {n + 3} red birds in a large cage. " * 5, name)
    for n, name in enumerate(("Ada", "Boris", "Cleo"))
)


def request(n: int, order: tuple[int, ...], **fields: Any) -> Request:
    asked = ({"role": "user", "content": f"Question {n}: how many birds has Ada?"},)
    return Request(f"r{n}", asked, tuple(DOCS[i] for i in order), **fields)


REQUESTS = [
    request(0, (0, 1, 2), donor=True),
    request(1, (2, 0, 1), gold="3"),
    request(2, (1, 2, 0), gold="B", options=("A", "B")),
    request(3, (1, 2, 0)),
]


class Double:
    """A peer that dies at its fourth answer, counting the one that warms it up."""

    version, note = "1.2", "a double"

    def __init__(self, name: str, home: Path, model: str, dtype: str, window: int) -> None:
        assert (name, model, dtype) == ("peer", "default", "float32") and window > 100
        self.asked = 0

    def ask(self, ids: Sequence[int], text: str, n: int) -> PeerAnswer:
        self.asked += 1
        if self.asked == 4:
            raise PeerError("its process died")
        assert len(ids) > n and text.startswith("<|im_start|>")
        return PeerAnswer(0.5, 0.9, "It is B: 3 birds", None, 7)

    def close(self) -> None: ...


@pytest.fixture
def bench(default_model: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Makes a Bench on the model that tests share."""
    monkeypatch.setattr(KVBoost, "from_pretrained", lambda model, dtype: KVBoost(*default_model))
    monkeypatch.setattr(run_module, "floor", lambda boost: Floor(1e11, 1e10, 10**8, 10**8, 10**4))

    monkeypatch.setattr(run_module, "Peer", Double)
    monkeypatch.setattr(
        run_module, "_WARM_UP", [Request("hi", ({"role": "user", "content": "Hi"},))]
    )
    monkeypatch.setattr(systems, "_SETTLE", 0)
    for module in (systems, run_module):
        monkeypatch.setattr(module, "ANSWER", 4)

    def made(*names: str, seed: int = 0, folder: str = "out") -> Bench:
        peers = {name: tmp_path for name in names if name == "peer"}
        return Bench(Setup("default", "auto", seed, ["plain", *names], peers, tmp_path / folder))

    return made


def test_every_system_answers_every_request(bench: Any) -> None:
    log = bench("exact", "auto", "none").run({"birds": REQUESTS})
    assert [(r.place, r.system) for r in log.done] == [
        (place, name) for place in range(4) for name in ("plain", "exact", "auto", "none")
    ]
    header, written = read(log.path)
    assert header["systems"] == ["plain", "exact", "auto", "none"] and header["commit"]
    assert [r.ttft for r in written] == [r.ttft for r in log.done]
    by = {(r.place, r.system): r for r in log.done}
    plain, exact, auto, none = (by[1, name] for name in header["systems"])
    for record in log.done:
        assert record.exact + record.moved + record.recomputed + record.computed == record.prompt
        assert record.ttft > 0 and record.donor == (record.place == 0) and record.peak > 0
    assert plain.passes == [(plain.prompt, 30)] and plain.kl_mean == 0 and plain.same
    assert exact.kl_max < 1e-4 and exact.moved == 0 and exact.same
    assert none.moved > 0 and none.kl_mean > 0 and none.recomputed == 0
    assert auto.bytes > 0 and auto.store > 0 and auto.parts["forward"] <= auto.ttft
    assert by[3, "exact"].exact > by[3, "exact"].prompt / 2
    assert by[1, "plain"].right is not None and by[3, "plain"].right is None
    assert by[2, "none"].given in ("A", "B")


def test_plain_is_the_reference_that_kvboost_scores(default_model: Any) -> None:
    boost = KVBoost(*default_model)
    asked = Prompts(boost.tokenizer).make(REQUESTS[1])
    reference = Plain(boost).begin(asked).reference
    assert reference is not None and 1 < len(reference.ids) < 16
    assert [n for n, t in enumerate(reference.ids, 1) if t in boost._eos] == [len(reference.ids)]
    scored = boost.score(
        REQUESTS[1].messages, reference.ids, documents=REQUESTS[1].documents, reuse="off"
    )
    assert torch.allclose(scored.logits, reference.logits, atol=1e-3)


def test_a_peer_that_fails_is_noted_and_left_out(bench: Any) -> None:
    """Also when the run goes on later; and it starts anew for each workload."""
    names = ("exact", "peer")
    log = bench(*names).run({"birds": REQUESTS[1:], "more": REQUESTS[:1]})
    theirs = [r for r in log.done if r.system == "peer"]
    assert [(r.workload, r.place, r.failed) for r in theirs] == [
        ("birds", 0, ""),
        ("birds", 1, ""),
        ("birds", 2, "its process died"),
    ]
    answered = theirs[0]
    assert (answered.ttft, answered.cached, answered.note) == (0.5, 7, "1.2 a double")
    assert answered.right and theirs[1].given == "B" and theirs[1].right
    assert answered.kl_mean is None and answered.same is False
    assert [r.system for r in log.done[-5:]] == ["peer", "plain", "exact", "plain", "exact"]
    assert len(bench(*names).run({"birds": REQUESTS[1:], "more": REQUESTS[:1]}).done) == 11


def test_a_stopped_run_goes_on(bench: Any) -> None:
    """Whole requests are kept; stores are as if it had never stopped."""
    whole = bench("none", folder="whole").run({"birds": REQUESTS}).done
    path = bench("none").run({"birds": REQUESTS}).path
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:6]) + lines[6][:40])
    again = bench("none").run({"birds": REQUESTS}).done
    assert [(r.place, r.system, r.moved, r.exact) for r in again] == [
        (r.place, r.system, r.moved, r.exact) for r in whole
    ]
    assert [asdict(r) for r in again[:4]] == [json.loads(line) for line in lines[1:5]]
    assert len(read(path)[1]) == 8
    finished = path.read_text()
    bench("none").run({"birds": REQUESTS})
    assert path.read_text() == finished


def test_another_run_is_not_gone_on_with(bench: Any) -> None:
    bench("none").run({"birds": REQUESTS[:1]})
    with pytest.raises(ConfigError, match=r"seed 0, not 1.*--out"):
        bench("none", seed=1).run({"birds": REQUESTS[:1]})
    with pytest.raises(ConfigError, match="systems"):
        bench("auto").run({"birds": REQUESTS[:1]})
    with pytest.raises(ConfigError, match="prompts"):
        bench("none").run({"birds": REQUESTS[1:2]})


def test_a_prompt_over_the_window_is_named_before_anything_runs(bench: Any) -> None:
    long = Request("endless", ({"role": "user", "content": "word " * 9000},))
    made = bench("exact")
    with pytest.raises(PromptError, match=r"endless.*window"):
        made.run({"birds": [*REQUESTS, long]})
    assert not made.setup.file.exists()


def test_a_torn_line_a_half_request_and_a_lost_peer(tmp_path: Path) -> None:
    header = {"systems": ["plain", "peer"]}
    path = tmp_path / "run.jsonl"
    log = Log(path, header)
    both = [Record("w", 0, "r0", name, 10, passes=[]) for name in header["systems"]]
    log.add(both)
    log.add([Record("w", 1, "r1", "plain", 10, passes=[])])
    assert read(path)[1] == both
    lost = [
        Record("w", 1, "r1", "peer", 10, passes=[], failed="gone"),
        Record("w", 1, "r1", "plain", 10, passes=[]),
    ]
    log = Log(path, header)
    log.add(lost)
    log.add([Record("w", 2, "r2", "plain", 10, passes=[])])
    with path.open("a") as file:
        file.write('{"workload": "w", "pla')
    assert read(path)[1] == [*both, *lost, Record("w", 2, "r2", "plain", 10, passes=[])]
    assert Log(path, header).done == read(path)[1] and not path.read_text().endswith("pla")
    kept = tmp_path / "run.jsonl.gz"
    kept.write_bytes(gzip.compress(path.read_bytes()))
    assert read(kept) == read(path)


@pytest.mark.parametrize("text", ["", "prose", '{"model": "x"}', '{"systems": []}\n{"a": 1}'])
def test_a_foreign_file_is_left_alone(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--out"):
        Log(path, {"systems": []})
    assert path.read_text() == text


@pytest.mark.parametrize("name", ["plainer", "query:x", "query:2", "none:3", "selective:-1", ""])
def test_a_system_nobody_knows_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match="choose plain, exact"):
        options_of(name)


def test_systems_are_policies_with_their_first_number() -> None:
    assert options_of("exact") == {"reuse": "exact"}
    assert options_of("none") == {"recompute": "none"}
    chosen: Any = options_of("query:0.08")["recompute"], options_of("selective:24")["recompute"]
    assert (chosen[0].ratio, chosen[1].head) == (0.08, 24)


def test_an_option_is_chosen_by_its_first_token(default_model: Any) -> None:
    tokenizer = default_model[1]
    logits = torch.zeros(len(tokenizer))
    logits[tokenizer(" B")["input_ids"][0]] = 5.0
    logits[tokenizer("C")["input_ids"][0]] = 4.0
    assert given(logits, "", ("A", "B", "C"), tokenizer) == "B"
    paths = ("module_ab.py", "module_cd.py")
    assert given(logits, "It is module_cd.py.", paths, tokenizer) == "module_cd.py"
    assert given(logits, "words", (), tokenizer) == "words"


def test_what_a_text_says() -> None:
    assert named("The answer is B) because A is not", ("A", "B")) == "B"
    assert named("Both and Able", ("A", "B")) == ""
    assert says("It's  RETRY_LIMIT = 30.", "retry_limit: 30") and not says("130", "30")
    asked = replace(REQUESTS[1], stale="four")
    assert right(asked, "He has 3 birds.") and stale(asked, "Four!") and not stale(asked, "3")
    assert right(REQUESTS[3], "3") is None and stale(REQUESTS[1], "3") is None
