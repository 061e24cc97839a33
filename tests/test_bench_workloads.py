"""Workloads: deterministic, of the length they say, and with one right answer."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest

from kvboost.bench.agents import _TOOLS
from kvboost.bench.bugs import BUCKETS
from kvboost.bench.items import from_items
from kvboost.bench.material import Material, clip, read_folder, stdlib_files
from kvboost.bench.request import Request
from kvboost.bench.workloads import WORKLOADS, generate
from kvboost.errors import ConfigError
from kvboost.prompt import PromptBuilder
from kvboost.types import Document

N = 30


class Words:
    """A tokenizer that needs no model: words, spaces and signs."""

    def __init__(self) -> None:
        self._known: list[str] = []
        self._ids: dict[str, int] = {}

    def tokens(self, text: str) -> list[int]:
        found = []
        for part in re.findall(r"\w+|\n|[^\S\n]+|[^\w\s]", text):
            if part not in self._ids:
                self._ids[part] = len(self._known)
                self._known.append(part)
            found.append(self._ids[part])
        return found

    def text(self, ids: list[int]) -> str:
        return "".join(self._known[n] for n in ids)


def words_material(files: Sequence[tuple[str, str]]) -> Material:
    words = Words()
    return Material(words.tokens, words.text, files)


@cache
def library() -> Material:
    return words_material(stdlib_files()[::4])


def digest() -> str:
    """Of some requests of every workload."""
    made = [generate(name, 4, 5, library()) for name in WORKLOADS]
    return hashlib.sha256(repr(made).encode()).hexdigest()


@pytest.fixture(scope="module")
def material(default_model: tuple[Any, Any]) -> Material:
    tokenizer = default_model[1]

    def tokens(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    return Material(tokens, tokenizer.decode, stdlib_files())


@pytest.fixture(scope="module")
def made(material: Material) -> dict[str, list[Request]]:
    return {name: generate(name, N, 0, material) for name in WORKLOADS}


def system(request: Request) -> str:
    assert request.messages[0]["role"] == "system"
    return request.messages[0]["content"]


def question(request: Request) -> str:
    assert request.messages[-1]["role"] == "user"
    return request.messages[-1]["content"]


def sessions(requests: Iterable[Request]) -> list[list[Request]]:
    return [list(group) for _, group in groupby(requests, key=lambda r: r.session)]


def gold_document(request: Request) -> Document:
    """The one behind the right letter; the options are four of those shown."""
    options = dict(re.findall(r"^([A-D])\) (.+)$", question(request), re.M))
    shown = {document.title: document for document in request.documents}
    assert tuple(options) == request.options == ("A", "B", "C", "D")
    assert len(set(options.values())) == 4
    assert set(options.values()) <= set(shown)
    return shown[options[request.gold]]


@pytest.mark.parametrize("name", WORKLOADS)
def test_what_all_have_in_common(
    name: str, made: dict[str, list[Request]], default_model: tuple[Any, Any]
) -> None:
    requests, builder = made[name], PromptBuilder(default_model[1])
    assert len(requests) == len({request.id for request in requests}) == N
    for request in requests:
        roles = [message["role"] for message in request.messages]
        assert roles == ["system", *(["user", "assistant"] * len(roles))[: len(roles) - 1]]
        assert len({document.title for document in request.documents}) == len(request.documents)
        prompt = builder.build(list(request.messages), request.documents)
        assert 500 < len(prompt.ids) < 5000
        assert len(prompt.borders) >= len(request.documents)
        assert not request.donor


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_seed_decides(name: str) -> None:
    assert generate(name, 4, 1, library()) != generate(name, 4, 2, library())


def test_the_hash_seed_does_not() -> None:
    """The same requests in another process."""
    run = subprocess.run(
        [sys.executable, "-c", "from test_bench_workloads import digest; print(digest())"],
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == digest()


# -- bugs, paired


@pytest.mark.parametrize("name", ["bugs", "paired"])
def test_lengths(name: str, made: dict[str, list[Request]], material: Material) -> None:
    for request in made[name]:
        total = sum(len(material.tokens(document.text)) for document in request.documents)
        assert abs(total - request.bucket) <= 0.2 * request.bucket
    assert Counter(r.bucket for r in made[name]) == dict.fromkeys(BUCKETS, N // len(BUCKETS))


def flat_sources(material: Material) -> list[tuple[str, set[str]]]:
    return [(" ".join(text.split()), set(text.split("\n"))) for _, text in material.files]


@pytest.mark.parametrize("name", ["bugs", "paired"])
def test_one_file_is_right(name: str, made: dict[str, list[Request]], material: Material) -> None:
    sources, kinds = flat_sources(material), set()
    for request in made[name]:
        asked = question(request).partition("\n\nA)")[0]
        if error := re.search(r"error:\n\n\w+: (.+)\n\nWhich file raises it", asked):
            right = [d for d in request.documents if error[1] in d.text]
        elif defined := re.search(r"defines the (?:class|function) `(\w+)`\?", asked):
            place = re.compile(rf"\b(def|class) {defined[1]}\b")
            right = [d for d in request.documents if place.search(d.text)]
        else:
            described = asked.partition("this describes?\n\n")[2]
            assert not any(described in d.text for d in request.documents)
            from_ = [lines for text, lines in sources if described in text]
            right = [
                d for d in request.documents if any(set(d.text.split("\n")) <= f for f in from_)
            ]
        kinds.add(asked[:12])
        assert right == [gold_document(request)]
    assert len(kinds) == 3


def test_bugs_come_back_in_other_company(made: dict[str, list[Request]]) -> None:
    requests = made["bugs"]
    headers = [system(request) for request in requests]
    assert len({header[:40] for header in headers}) == N
    assert len({header.partition("\n\n")[2] for header in headers}) == 1
    for bucket in BUCKETS:
        pool = [request for request in requests if request.bucket == bucket]
        assert {request.session for request in pool} == {f"bugs-{bucket}-0"}
        assert len({request.documents for request in pool}) > 1
        assert 4 < len({document for request in pool for document in request.documents}) <= 8
    for request in requests:
        assert all(re.fullmatch(r"module_\w{3}\.py", d.title) for d in request.documents)


def test_more_requests_have_more_pools() -> None:
    many = generate("bugs", 1000, 0, library())
    assert len({request.session for request in many}) == 2 * len(BUCKETS)
    assert len({gold_document(request) for request in many}) > 7 * 2 * len(BUCKETS)


def test_pairs(made: dict[str, list[Request]]) -> None:
    pairs = sessions(made["paired"])
    assert [len(pair) for pair in pairs] == [2] * (N // 2)
    for first, second in pairs:
        assert first.documents == second.documents
        assert system(first) == system(second)
        asked = [question(r).partition("\n\nA)")[0] for r in (first, second)]
        assert asked[0] != asked[1]


# -- retrieval


def test_one_passage_has_the_sentence(made: dict[str, list[Request]], material: Material) -> None:
    texts: dict[str, str] = {}
    for request in made["retrieval"]:
        assert len(request.documents) == 8
        quoted = question(request).partition("\n\n")[2].partition("\n\nA)")[0]
        right = [d for d in request.documents if quoted in " ".join(d.text.split())]
        assert right == [gold_document(request)]
        for document in request.documents:
            assert texts.setdefault(document.title, document.text) == document.text
            assert 140 <= len(material.tokens(document.text)) <= 300
    assert 25 < len(texts) <= 40
    assert len({system(request) for request in made["retrieval"]}) == 1
    shown = Counter(d.title for request in made["retrieval"] for d in request.documents)
    assert max(shown.values()) > 4 * min(shown.values())


# -- edits


def test_edits(made: dict[str, list[Request]], material: Material) -> None:
    all_sessions = sessions(made["edits"])
    assert [len(session) for session in all_sessions] == [9, 9, 9, 3]
    for session in all_sessions:
        assert session[0].stale == ""
        for request in session:
            name, title = re.findall(r"value of (\w+) in (\S+)\?", question(request))[0]
            lines = [
                (d.title, line)
                for d in request.documents
                for line in d.text.split("\n")
                if name in line
            ]
            assert lines == [(title, f"{name} = {request.gold}")]
        for before, after in pairwise(session):
            changed = [d for d in after.documents if d not in before.documents]
            assert [d.title in question(after) for d in changed] == [True]
            assert after.stale == (before.gold if before.gold != after.gold else "")
        length = sum(len(material.tokens(d.text)) for d in session[0].documents)
        assert 1700 < length < 3200
    assert {bool(request.stale) for request in made["edits"]} == {True, False}


# -- dialogues


def test_agents(made: dict[str, list[Request]]) -> None:
    all_sessions = sessions(made["agents"])
    assert [len(session) for session in all_sessions] == [6] * 5
    orders = set()
    for session in all_sessions:
        assert len({system(request) for request in session}) == 1
        tools = re.findall(r'^\{"name": "(\w+)"', system(session[0]), re.M)
        assert sorted(tools) == sorted(_TOOLS)
        orders.add(tuple(tools))
        assert [len(request.messages) for request in session] == [4, 6, 8, 6, 8, 10]
        for before, after in pairwise(session):
            shorter = len(after.messages) < len(before.messages)
            assert (after.messages[: len(before.messages)] == before.messages) != shorter
        grown, compacted = session[2:4]
        assert compacted.messages[2:4] == grown.messages[-2:]
        assert "in short" in compacted.messages[1]["content"]
    assert len(orders) == len(all_sessions)
    results = Counter(m["content"] for s in all_sessions for m in s[-1].messages[3::2])
    assert max(results.values()) > 1


def test_chats(made: dict[str, list[Request]]) -> None:
    for session in sessions(made["chat"]):
        assert len(session) == 6
        for turn, request in enumerate(session, 1):
            answers = [m["content"] for m in request.messages if m["role"] == "assistant"]
            thoughtful = [answer.startswith("<think>") for answer in answers]
            kept = turn - 1 if turn < 4 else 1
            assert thoughtful == [False] * (turn - 1 - kept) + [True] * kept
        for before, after in pairwise(session):
            bare = [
                [{**m, "content": m["content"].rpartition("</think>")[2].strip()} for m in messages]
                for messages in (before.messages, after.messages)
            ]
            assert bare[1][: len(bare[0])] == bare[0]


# -- items


def item(name: str, docs: dict[str, str], **fields: Any) -> dict[str, Any]:
    listed = [{"name": title, "text": text} for title, text in docs.items()]
    base = {"id": name, "docs": listed, "question": f"{name}?", "answer": "yes"}
    return {**base, "answer_type": "span", **fields}


def saved(folder: Path, items: Iterable[object]) -> Path:
    path = folder / "items.jsonl"
    path.write_text("\n".join(json.dumps(one) for one in items) + "\n", encoding="utf-8")
    return path


def test_items_share_a_prompt(tmp_path: Path) -> None:
    items = [item(f"q{n}", {f"d{n}-{k}": f"text {n} {k}" for k in range(2)}) for n in range(4)]
    items.append(item("again", {"d0-0": "text 0 0", "d0-1": "text 0 1"}))
    path = saved(tmp_path, items)
    requests = from_items(path, 10, 0, 4)
    assert requests == from_items(path, 10, 0, 4)
    assert requests != from_items(path, 10, 1, 4)
    assert sorted(r.id for r in requests if not r.donor) == ["again", "q0", "q1", "q2", "q3"]
    for group in sessions(requests):
        donor, *asked = group
        assert donor.donor
        assert question(donor) == "Which document is the longest?"
        assert not any(r.donor for r in asked)
        for request in asked:
            assert question(request) == f"{request.id}?"
            assert request.gold == "yes"
            assert len(request.documents) == 4
            assert sorted(request.documents, key=str) == sorted(donor.documents, key=str)
            assert request.documents != donor.documents


def test_at_most_n_items_and_donors_only_for_them(tmp_path: Path) -> None:
    path = saved(tmp_path, [item(f"q{n}", {f"d{n}": f"text {n}"}) for n in range(9)])
    requests = from_items(path, 3, 0, 1)
    assert [r.donor for r in requests] == [True, False] * 3


@pytest.mark.parametrize(
    "other",
    [
        {"a": "another text"},
        {"z": "line 1\nline 2\nline 3"},
        {"z": "line 1\nline 2\n\n  line 3\nand more"},
    ],
    ids=["one title, two texts", "one text, two titles", "nearly one text, two titles"],
)
def test_what_clashes_is_not_in_one_prompt(tmp_path: Path, other: dict[str, str]) -> None:
    path = saved(tmp_path, [item("q0", {"a": "line 1\nline 2\nline 3"}), item("q1", other)])
    assert len(sessions(from_items(path, 2, 0, 8))) == 2


@pytest.mark.parametrize("known", [True, False], ids=["old text", "old answer only"])
def test_the_donor_has_the_text_before_the_edit(tmp_path: Path, known: bool) -> None:
    edited = item("q", {"a": "x = 5", "b": "y = 1"}, answer="5", old_answer="7")
    edited["docs"][0]["old"] = "x = 7" if known else None
    donor, asked = from_items(saved(tmp_path, [edited]), 1, 0, 8)
    assert {d.title: d.text for d in donor.documents} == {"a": "x = 7", "b": "y = 1"}
    assert {d.title: d.text for d in asked.documents} == {"a": "x = 5", "b": "y = 1"}
    assert (asked.gold, asked.stale) == ("5", "7")


def test_nothing_is_stale_if_the_old_text_is_unknown(tmp_path: Path) -> None:
    edited = item("q", {"a": "x = 5", "b": "y = 5"}, answer="5", old_answer="7")
    donor, asked = from_items(saved(tmp_path, [edited]), 1, 0, 8)
    assert set(donor.documents) == set(asked.documents)
    assert asked.stale == ""


def test_options_of_items(tmp_path: Path) -> None:
    docs = {"a.py": "one", "b.py": "two"}
    fields = {"candidates": ["A", "B"]}
    items = [item(kind, docs, answer_type=kind, **fields) for kind in ("path", "letter", "value")]
    found = {r.id: r.options for r in from_items(saved(tmp_path, items), 3, 0, 8) if not r.donor}
    assert found == {"path": ("a.py", "b.py"), "letter": ("A", "B"), "value": ()}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is no item"),
        ("[]", "line 2 is no item"),
        ('{"answer": "x"}', "line 2: an item needs 'docs'"),
        (json.dumps(item("q", {})), "documents, each with a name"),
        (json.dumps(item("q", {"a": "b"}, answer_type="poem")), "span, value, path, letter"),
        (json.dumps({"answer": "x", "docs": ["a"]}), "line 2 is no item"),
    ],
)
def test_what_is_no_item(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text(json.dumps(item("q", {"a": "text"})) + "\n" + line, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        from_items(path, 5, 0, 4)


def test_no_items(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't read"):
        from_items(tmp_path / "nowhere.jsonl", 5, 0, 4)
    with pytest.raises(ConfigError, match="has no items"):
        from_items(saved(tmp_path, []), 5, 0, 4)


# -- material


def test_the_standard_library_without_its_tests() -> None:
    names = [name for name, _ in stdlib_files()]
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert not [name for name in names if name.startswith(("test/", "site-packages/"))]


def test_a_folder(tmp_path: Path) -> None:
    for name in ("b.py", "a/z.rs", ".git/x.py", "notes.bin", "node_modules/m.js"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name, encoding="utf-8")
    (tmp_path / "latin.py").write_bytes(b"\xe9")
    (tmp_path / "node_modules" / "empty").mkdir()
    assert read_folder(tmp_path) == [("b.py", "b.py"), ("a/z.rs", "a/z.rs")]
    with pytest.raises(ConfigError, match="no source files"):
        read_folder(tmp_path / "node_modules" / "empty")
    with pytest.raises(ConfigError, match="is no folder"):
        read_folder(tmp_path / "b.py")


def test_clip_keeps_whole_lines() -> None:
    material = words_material([])
    text = "one two\nthree four\nfive"
    assert [clip(text, n, material) for n in (3, 4, 7, 8, 99)] == [
        "",
        "one two",
        "one two",
        "one two\nthree four",
        text,
    ]


@pytest.mark.parametrize("name", ["bugs", "paired", "edits", "agents"])
def test_too_few_files(name: str) -> None:
    files = [("broken.py", "def ("), ("null.py", "\0"), ("few.py", "def f():\n    return 1\n")]
    with pytest.raises(ConfigError, match="too few"):
        generate(name, 4, 0, words_material(files))


def test_wrong_arguments() -> None:
    with pytest.raises(ConfigError, match="bugs, paired, retrieval, edits, agents, chat"):
        generate("poetry", 5, 0, words_material([]))
    with pytest.raises(ConfigError, match="at least one"):
        generate("bugs", 0, 0, words_material([]))
