"""Clients that leave, send nonsense or dawdle: nothing leaks, nobody else notices."""

from __future__ import annotations

import json
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
from server_real import (
    Real,
    chat,
    connected,
    folder_of_tiny,
    request,
    serving,
    soon,
    streamed,
    tiny,
    until,
    words,
)
from servers import Server, free_port

BODY_BYTES = 100_000


@pytest.fixture(scope="module")
def real() -> Iterator[Real]:
    with serving(tiny(), slots=4, body_bytes=BODY_BYTES) as made:
        yield made


@pytest.fixture
def one_slot() -> Iterator[Real]:
    with serving(tiny(), slots=1) as made:
        yield made


def right(real: Real, seed: int) -> None:
    """A request is answered, and as a model without cache answers it."""
    want = tiny().generate(chat(words(40, seed))["messages"], max_new_tokens=8)
    said = real.ask(words(40, seed))
    assert said["choices"][0]["message"]["content"] == want.text


def test_a_hundred_clients_that_leave_leave_nothing(real: Real) -> None:
    real.ask("w9")
    threads, tasks = threading.active_count(), real.tasks()
    for n in range(100):
        with connected(real, streamed(words(30, n % 7), max_tokens=700)) as link:
            until(link, b'"content": "w' if n % 3 else b"data:")
            if n % 2:  # a reset instead of a farewell
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert soon(real.idle) and soon(lambda: real.tasks() <= tasks)
    assert threading.active_count() <= threads
    left = [one for one in real.over if one.outcome == "cancelled"]
    assert len(left) >= 95 and all(one.usage.generated < 700 for one in left)
    right(real, 1)
    right(real, 99)


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_the_queue_is_forgotten(one_slot: Real, stream: bool) -> None:
    with connected(one_slot, streamed(words(9, 1), max_tokens=900)) as busy, ExitStack() as stack:
        until(busy, b'"content": "w')
        body = json.dumps(chat(words(9, 2), stream=stream)).encode()
        for _ in range(5):
            stack.enter_context(connected(one_slot, request(body)))
        assert soon(lambda: one_slot.scheduler.load().waiting == 5)
        stack.close()
        assert soon(lambda: one_slot.scheduler.load().waiting == 0, 2)
        assert one_slot.scheduler.load().running == 1
    assert soon(one_slot.idle)
    right(one_slot, 2)


def test_who_leaves_while_the_prompt_is_read_ends_that(
    one_slot: Real, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly() -> int:
        time.sleep(0.02)
        return 16

    monkeypatch.setattr(one_slot.scheduler._turns, "rows", slowly)
    with connected(one_slot, streamed(words(900, 3))):
        assert soon(lambda: one_slot.scheduler._starting)
    assert soon(one_slot.idle, 0.5)
    (left,) = one_slot.over
    assert (left.outcome, left.ttft, left.prompt) == ("cancelled", None, 902)
    right(one_slot, 3)


@pytest.mark.parametrize(
    "body",
    [b"{", b"", b"null", b"[1", b"\xff\xfe", b'{"model": "tiny", "messages": NaN}', b"[" * 90_000],
)
def test_malformed_json_is_refused(real: Real, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    answer = httpx2.post(f"{real.url}/v1/chat/completions", content=body, headers=headers)
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # somebody tries TLS
        b"GET\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n"
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 200_000,
    ],
)
def test_what_is_no_http_ends_the_connection(real: Real, sent: bytes) -> None:
    with suppress(OSError), connected(real) as link:  # closed while we still send
        link.sendall(sent)
        link.shutdown(socket.SHUT_WR)
        assert link.recv(100)[:12] in (b"", b"HTTP/1.1 400")
    assert real.idle() and httpx2.get(f"{real.url}/health").status_code == 200


def test_a_body_that_is_too_large_is_refused_before_it_has_come(real: Real) -> None:
    with connected(real, request(b"{" * 1000, length=50 << 20)) as link:
        assert until(link, b"}}").startswith(b"HTTP/1.1 413")
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    chunk = b"4000\r\n" + b"x" * 0x4000 + b"\r\n"
    with connected(real, head) as link:  # it doesn't say how large it is
        for _ in range(2 + BODY_BYTES // 0x4000):
            link.sendall(chunk)
        assert until(link, b"}}").startswith(b"HTTP/1.1 413")
    right(real, 4)


def test_bodies_that_never_end_hold_their_connections_only(real: Real) -> None:
    whole = streamed(words(20, 5))
    with ExitStack() as stack:
        links = [stack.enter_context(connected(real, whole[:150])) for _ in range(30)]
        for byte in whole[150:160]:
            for link in links:
                link.sendall(bytes([byte]))
        assert real.idle()
        right(real, 5)
        links[0].sendall(whole[160:])
        until(links[0], b"[DONE]")
    assert soon(real.idle)


def test_a_client_that_reads_nothing_slows_nobody(real: Real) -> None:
    def seconds() -> float:
        start = time.perf_counter()
        real.ask(words(20, 6), max_tokens=60, reuse="off")
        return time.perf_counter() - start

    tasks, alone = real.tasks(), min(seconds() for _ in range(3))
    with socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect(("127.0.0.1", real.port))
        lazy.sendall(streamed(words(20, 7), max_tokens=500, logprobs=True, top_logprobs=20))
        assert soon(lambda: real.scheduler.load().running == 1)
        while real.scheduler.load().running:  # answered, although nobody takes it
            assert seconds() < 10 * alone + 1
        right(real, 6)
    assert soon(lambda: real.idle() and real.tasks() <= tasks)


def test_more_clients_than_the_queue_holds_are_told_to_come_back() -> None:
    with serving(tiny(), slots=1, queue=2) as real:

        def ask(n: int) -> httpx2.Response:
            return real.post("chat/completions", chat(words(9, n), max_tokens=100))

        with ThreadPoolExecutor(20) as pool:
            answers = list(pool.map(ask, range(20)))
        refused = [answer for answer in answers if answer.status_code == 429]
        assert refused and len(refused) + sum(a.status_code == 200 for a in answers) == 20
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        assert soon(real.idle)


def test_a_full_server_does_everything_at_once(real: Real) -> None:
    """Streams, several answers, texts in one request, clearing and watching: all is answered."""
    failed: list[Any] = []

    def attempt(n: int) -> None:
        kind = n % 5
        if kind == 0:
            answer = real.post("chat/completions", chat(words(30, n), n=4, max_tokens=20))
        elif kind == 1:
            answer = real.post("completions", {"model": "tiny", "prompt": [words(9, n)] * 3})
        elif kind == 2:
            answer = real.post("cache/clear", {})
        elif kind == 3:
            answer = httpx2.get(f"{real.url}/status.json")
        else:
            answer = real.post("chat/completions", chat(words(300, n % 3), stream=True))
        if answer.status_code != 200 or b"error" in answer.content:
            failed.append(answer.text)

    with ThreadPoolExecutor(10) as pool:
        list(pool.map(attempt, range(50)))
    assert not failed and soon(real.idle)
    right(real, 8)


def test_a_valkey_that_dies_fails_nobody(tmp_path: Path) -> None:
    asked = [chat(words(120, n % 6), reuse="exact") for n in range(60)]
    with Server(tmp_path) as valkey, tiny(remote=valkey.url()) as boost, serving(boost) as real:
        answers: list[httpx2.Response] = []

        def ask(body: Any) -> None:
            answers.append(real.post("chat/completions", body))
            if len(answers) == 20:
                valkey.kill()
            elif len(answers) == 40:
                valkey.start()

        for body in asked[:6]:
            ask(body)
        assert boost.flush() and valkey.ask("DBSIZE") > 0
        boost.clear()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(ask, asked[6:]))
        assert [answer.status_code for answer in answers] == [200] * 60
        assert boost.stats().tiers[0].hits
    by_prompt = {answer.json()["choices"][0]["message"]["content"] for answer in answers}
    plain = tiny()
    want = {plain.generate(b["messages"], max_new_tokens=8, reuse="off").text for b in asked[:6]}
    assert by_prompt == want


def test_sigterm_under_load_answers_or_refuses_everything(tmp_path: Path) -> None:
    port, drain = free_port(), 2
    serve = ["serve", "--model", str(folder_of_tiny(tmp_path)), "--port", str(port)]
    options = ["--slots", "2", "--queue", "6", "--drain", str(drain), "--dtype", "float32"]
    command = [sys.executable, "-c", "from kvboost.cli import main; main()", *serve, *options]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            assert "serves" in process.stdout.readline()
            real = Real(f"http://127.0.0.1:{port}", None, [])  # type: ignore[arg-type]
            lazy = connected(real, streamed("w1")[:150])
            with ThreadPoolExecutor(12) as pool, lazy:
                asked = [pool.submit(outcome, real, n) for n in range(12)]
                assert soon(lambda: running(real) == 2)
                process.send_signal(signal.SIGTERM)
                start = time.monotonic()
                outcomes = [each.result() for each in asked]
            code = process.wait(30)
            assert time.monotonic() - start < drain + 8
        finally:
            process.kill()
            said = process.communicate()[1]
    assert code == 0 and "Traceback" not in said, said
    assert "lost" not in outcomes, outcomes


def running(real: Real) -> int:
    return int(httpx2.get(f"{real.url}/health").json()["running"])


def outcome(real: Real, n: int) -> str:
    """Of a request to a server that is stopped meanwhile."""
    body = chat(words(100, n), max_tokens=900, stream=n % 2 == 0)
    try:
        answer = real.post("chat/completions", body)
    except httpx2.ConnectError:
        return "not taken"
    except httpx2.HTTPError:
        return "lost"
    if answer.status_code in (429, 503):
        return "refused" if "retry-after" in answer.headers else "lost"
    whole = answer.text.endswith("[DONE]\n\n") or answer.json()["usage"]
    return "answered" if answer.status_code == 200 and whole else "lost"
