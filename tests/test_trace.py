"""Traces: what goes in comes out, and what is wrong is named with its line."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from kvboost.errors import ConfigError
from kvboost.keys import KeySpace, lineages
from kvboost.store.trace import Cost, Trace, TraceRecorder, read_trace, write_trace
from kvboost.store.workloads import WORKLOADS, generate
from kvboost.types import Chunk

KEYS = KeySpace("weights:0")
COST = Cost(bytes_per_token=100, seconds_per_token=0.5, seconds_per_position=0.25)
HASH = "00" * 16


def prompt(*texts: str) -> list[Chunk]:
    chunks, end = [], 0
    for text in texts:
        ids = tuple(text.encode())
        chunks.append(Chunk(end, end + len(ids), ids))
        end += len(ids)
    return chunks


def record(recorder: TraceRecorder, *texts: str, answer: int = 0) -> None:
    chunks = prompt(*texts)
    lineage = lineages(chunks, chunks[-1].end, KEYS)
    recorder.record(chunks, lineage, [KEYS.content(c.ids) for c in chunks], answer)


def test_recorded_requests_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    record(TraceRecorder(path, COST), "system", "hello", "answer", answer=1)
    record(TraceRecorder(path, COST), "system", "again")  # continued by another recorder
    trace = read_trace(path)
    assert trace.cost == COST
    first, second = trace.requests
    assert [c.tokens for c in first.chunks] == [6, 5, 6]
    assert (first.answer, second.answer) == (1, 0)
    assert first.chunks[0] == second.chunks[0]
    assert first.chunks[0].content.digest[:16] == KEYS.content(b"system").digest[:16]
    again = KEYS.prefix(KEYS.prefix(KEYS.root, b"system"), b"again")
    assert second.chunks[1].lineage.digest[:16] == again.digest[:16]
    assert second.chunks[1].lineage.kind == again.kind


def test_a_trace_holds_hashes_and_numbers_only(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    record(TraceRecorder(path, COST), "a secret", "another", answer=1)
    header, request = map(json.loads, path.read_text().splitlines())
    assert header.keys() == {
        "kvboost_trace",
        "bytes_per_token",
        "seconds_per_token",
        "seconds_per_position",
    }
    assert request.keys() == {"chunks", "answer"}
    for content, lineage, tokens in request["chunks"]:
        assert len(bytes.fromhex(content)) == len(bytes.fromhex(lineage)) == 16
        assert type(tokens) is int


@pytest.mark.parametrize("kind", WORKLOADS)
def test_generated_traces_are_read_back(kind: str, tmp_path: Path) -> None:
    trace = generate(kind, seed=3, requests=8)
    write_trace(trace, tmp_path / "trace.jsonl")
    assert read_trace(tmp_path / "trace.jsonl") == trace


def test_an_empty_trace_is_a_trace(tmp_path: Path) -> None:
    TraceRecorder(tmp_path / "trace.jsonl", COST)
    assert read_trace(tmp_path / "trace.jsonl") == Trace(COST, ())


def test_threads_write_whole_lines(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path / "trace.jsonl", COST)
    threads = [
        threading.Thread(target=lambda n=n: [record(recorder, f"{n}", "x" * 99) for _ in range(20)])
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_trace(tmp_path / "trace.jsonl").requests) == 80


def test_a_recorder_spares_other_files(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my notes\n")
    with pytest.raises(ConfigError, match="not a trace"):
        TraceRecorder(path, COST)
    assert path.read_text() == "my notes\n"
    TraceRecorder(tmp_path / "trace.jsonl", COST)
    with pytest.raises(ConfigError, match="100 bytes per token, not 23040"):
        TraceRecorder(tmp_path / "trace.jsonl", Cost())


HEADER = json.dumps(
    {
        "kvboost_trace": 1,
        "bytes_per_token": 1,
        "seconds_per_token": 1,
        "seconds_per_position": 0,
    }
)


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([], "is empty"),
        (["nonsense"], "line 1: "),
        (["{}"], "line 1: a trace begins with a header"),
        (['{"kvboost_trace": 2}'], "line 1: a trace begins with a header"),
        (['{"kvboost_trace": 1}'], "line 1: bytes_per_token"),
        ([HEADER.replace('_token": 1', '_token": 1.5')], "line 1: bytes_per_token"),
        ([HEADER.replace('position": 0', 'position": NaN')], "line 1: seconds_per_position"),
        ([HEADER.replace('position": 0', 'position": null')], "line 1: seconds_per_position"),
        ([HEADER, '{"chunks": []}', '{"chunks": ['], "line 3: "),
        ([HEADER, "[]"], 'line 2: a request must have a list of "chunks"'),
        ([HEADER, '{"chunks": 7}'], 'line 2: a request must have a list of "chunks"'),
        ([HEADER, '{"chunks": [], "answer": 1}'], 'line 2: "answer" must be'),
        ([HEADER, '{"chunks": [], "answer": true}'], 'line 2: "answer" must be'),
        ([HEADER, f'{{"chunks": [["{HASH}", "{HASH}"]]}}'], "line 2: a chunk must be"),
        ([HEADER, f'{{"chunks": [["{HASH}", "{HASH}", 0]]}}'], "line 2: a chunk must be"),
        ([HEADER, f'{{"chunks": [["{HASH}", "{HASH}", true]]}}'], "line 2: a chunk must be"),
        ([HEADER, f'{{"chunks": [["{HASH}", "{HASH[:-2]}", 1]]}}'], "line 2: a hash must have"),
        ([HEADER, f'{{"chunks": [["{HASH}", "{"xy" * 16}", 1]]}}'], "line 2: a hash must have"),
    ],
)
def test_what_is_wrong_is_named(lines: list[str], complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)
    assert complaint in str(caught.value)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="line 1"):
        read_trace(path)


def test_cost_is_the_sum_over_tokens() -> None:
    one_by_one = sum(COST.seconds_per_token + p * COST.seconds_per_position for p in range(7, 12))
    assert COST.seconds(7, 5) == pytest.approx(one_by_one)
