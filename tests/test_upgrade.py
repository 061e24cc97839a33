"""Idle-time upgrades: what was answered approximately is exact the next time, and nobody waits."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from families import boost, counted, tokenizer, tokens

from kvboost import ConfigError, KVBoost
from kvboost.metrics import divergence
from kvboost.plan import FRESH
from kvboost.prompt import Prompt
from kvboost.store.trace import read_trace

HEAD, ONE, TWO = tokens(40, 1), tokens(200, 2), tokens(150, 3)
KNOWN = [*HEAD, *ONE, *TWO]
MOVED = [*HEAD, *TWO, *ONE, *tokens(20, 4)]
OTHER = [*tokens(40, 11), *MOVED[40:]]
BORDERS = [40, 190]
TEXTS = [
    "Read these notes.\n\n",
    " ".join(
        f"On day {n} Ada from Oslo saw {n + 3} boats and paid {n + 40} coins." for n in range(4)
    ),
    " ".join(
        f"On day {n} Ivan from Lima met {n + 5} cats and gave {n + 9} fish." for n in range(4)
    ),
    "\n\nWho paid coins, and for what?\n",
    "\nAnd who is from Lima?\n",
]


@pytest.fixture
def make() -> Iterator[Callable[..., KVBoost]]:
    """Makes KVBoosts with a minute for upgrades, around a tiny model, and closes them."""
    made: list[KVBoost] = []

    def make(family: str = "llama", **config: Any) -> KVBoost:
        made.append(boost(family, **{"upgrade": 60.0, **config}))
        return made[-1]

    yield make
    for each in made:
        each.close()


def moved(made: KVBoost, prompt: list[int] = MOVED, count: int = 4) -> list[int]:
    """The prompt and its answer, made of moved pieces."""
    made.prefill(KNOWN, segments=[40, 240])
    completion = made.generate(prompt, segments=BORDERS, recompute="none", max_new_tokens=count)
    assert completion.usage.moved >= 300
    return [*prompt, *completion.token_ids]


def exact_tokens(made: KVBoost, ids: list[int], borders: list[int] = BORDERS) -> int:
    """How long a prefix of these tokens is stored."""
    engine = made._engine
    return engine.lookup(Prompt(tuple(ids), tuple(borders)), "exact").plan().exact_tokens


class Hook:
    """Calls back before and after every pass of the upgrading thread."""

    def __init__(self, made: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
        self.blocks: list[int] = []
        self.before: Callable[[], None] = lambda: None
        self.after: Callable[[], None] = lambda: None
        runner = made._engine.runner
        forward = runner.forward

        def hooked(buffer: Any, ids: Any, rows: Any, *rest: Any, **more: Any) -> torch.Tensor:
            if not threading.current_thread().name.startswith("kvboost-upgrade"):
                return forward(buffer, ids, rows, *rest, **more)
            self.blocks.append(len(rows))
            self.before()
            logits = forward(buffer, ids, rows, *rest, **more)
            self.after()
            return logits

        monkeypatch.setattr(runner, "forward", hooked)


def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvboost.upgrade._MOST", 16)


# -- what it is for


def test_the_next_turn_is_exact_and_answers_as_full_recompute(default_model: Any) -> None:
    with KVBoost(*default_model, upgrade=600.0) as made:
        opening, one, two, question, reply = (made.tokenizer(text).input_ids for text in TEXTS)
        made.prefill([*opening, *one, *two], segments=[len(opening), len(opening + one)])
        ids = [*opening, *two, *one, *question]
        borders = [len(opening), len(opening + two), len(opening + two + one)]
        asked = {"segments": borders, "recompute": "none"}
        first = made.generate(ids, max_new_tokens=5, **asked)
        assert first.usage.moved > 100 and not first.exact
        assert 100 < made.stats().waiting <= len(ids) + 4 - first.usage.exact
        assert made.upgrade(120)
        assert made.stats().waiting == 0 and made.stats().upgraded > 100
        turn = [*ids, *first.token_ids, *reply]
        second = made.generate(turn, max_new_tokens=6, **asked)
        assert second.exact and second.usage.moved == second.usage.recomputed == 0
        assert second.usage.exact == len(ids) + 4
        off = made.generate(turn, max_new_tokens=6, reuse="off")
        assert second.token_ids == off.token_ids
        assert made.upgrade(0)  # exact answers leave nothing to do


@pytest.mark.parametrize("family", ["llama", "qwen2-yarn", "mistral-sliding", "gemma3", "phi3"])
def test_what_is_filed_is_what_one_plain_pass_computes(
    family: str, make: Callable[..., KVBoost], monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch)
    made = make(family)
    ids, answer = moved(made), tokens(8, 9)
    assert made.upgrade(30)
    score = made.score([*ids, 5], answer, reuse="exact")
    assert score.usage.exact == len(ids) - 1
    wanted = families.logits(family, "sdpa", [*ids, 5], answer)
    torch.testing.assert_close(score.logits, wanted, atol=1e-4, rtol=0)


def test_errors_do_not_add_up_over_a_conversation(make: Callable[..., KVBoost]) -> None:
    """Ten turns, each with a document that was read elsewhere."""
    documents = [tokens(60, 20 + n) for n in range(10)]
    kl: dict[float, list[float]] = {}
    for upgrade in (0.0, 60.0):
        made, ids, borders, kl[upgrade] = make(upgrade=upgrade), list(HEAD), [40], []
        for n, document in enumerate(documents):  # behind other text
            made.prefill([*HEAD, *tokens(50, 50 + n), *document], segments=[40, 90])
        for n, document in enumerate(documents):
            before = len(ids) - 1
            ids += document
            borders += [len(ids) - 60, len(ids)]
            ids += tokens(10, 70 + n)
            asked = {"segments": borders[1:], "recompute": "none"}
            answer = made.generate(ids, max_new_tokens=6, reuse="off").token_ids
            true = made.score(ids, answer, reuse="off").logits
            close = made.score(ids, answer, **asked)
            kl[upgrade].append(divergence(true, close.logits).kl_mean)
            if upgrade and n:
                assert close.usage.exact >= before and close.usage.moved <= 60
            ids += made.generate(ids, max_new_tokens=6, **asked).token_ids
            assert made.upgrade(30)
    assert sum(kl[60.0][5:]) < 2 * sum(kl[60.0][:5])
    assert sum(kl[60.0][1:]) < 0.5 * sum(kl[0.0][1:])


# -- requests come first


def test_a_request_in_between_stops_it_and_keeps_whole_chunks(
    make: Callable[..., KVBoost], monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch)
    made = make()
    hook, request, held = Hook(made, monkeypatch), made._upgrades.traffic.request(), []

    def come() -> None:
        if len(hook.blocks) == 10:
            request.__enter__()
            held.append(True)

    hook.after = come
    ids = moved(made)
    start = exact_tokens(made, ids)
    while not held:
        time.sleep(0.01)
    time.sleep(0.3)
    assert len(hook.blocks) == 10
    stats = made.stats()
    assert stats.upgraded == 160 and stats.waiting > 0
    chunks = made._engine.chunker.split(ids[:-1], BORDERS)
    whole = max(c.end for c in chunks if c.end <= start + 160)
    kept = exact_tokens(made, ids)
    assert start < whole == kept
    request.__exit__(None, None, None)
    assert made.upgrade(30)
    assert exact_tokens(made, ids) == len(ids) - 1
    assert made.stats().upgraded == 160 + len(ids) - 1 - kept  # nothing whole was computed twice


def test_a_request_waits_for_one_block_at_most(
    make: Callable[..., KVBoost], monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch)
    made, other = make(), make(upgrade=0.0)  # two tenants of one model
    hook, begun, open_, quiet = Hook(made, monkeypatch), threading.Event(), [], []
    traffic = made._upgrades.traffic

    def slowly() -> None:
        open_.append(len(traffic.open))
        quiet.append(time.monotonic() - traffic._last)
        begun.set()
        time.sleep(0.3)

    hook.before = slowly
    moved(made)
    for one in (made, other):
        begun.clear()
        assert begun.wait(10)
        blocks = len(hook.blocks)
        start = time.perf_counter()
        one.generate(tokens(30, 8), max_new_tokens=3)
        assert time.perf_counter() - start < 5.0  # all of it takes longer
        assert len(hook.blocks) <= blocks + 3
        assert made.stats().waiting > 0
    hook.before = lambda: None
    assert made.upgrade(30)
    assert len(hook.blocks) > 10 and not any(open_) and min(quiet) > 0.2


def test_an_open_stream_is_a_request(make: Callable[..., KVBoost]) -> None:
    made = make()
    moved(made)
    stream = made.stream(tokens(30, 8), max_new_tokens=50)
    next(stream)
    assert not made.upgrade(0.6) and made.stats().waiting > 0
    stream.close()
    assert made.upgrade(30)
    stream = made.stream(tokens(30, 8))  # one that never began is none
    moved(made, OTHER)
    assert made.upgrade(30)


def test_exact_requests_between_upgrades_are_exact(
    make: Callable[..., KVBoost], monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch)
    monkeypatch.setattr("kvboost.upgrade._QUIET", 0.004)
    made, wrong = make(max_bytes=3_000_000), []

    def work(seed: int) -> None:
        source = random.Random(seed)
        for _ in range(12):
            pieces = source.sample([tokens(60, 80 + n) for n in range(4)], 3)
            ids = [*HEAD, *(t for piece in pieces for t in piece), seed]
            made.generate(ids, segments=[40, 100, 160], recompute="none", max_new_tokens=2)
            time.sleep(source.random() / 10)
            asked = (*ids, 7)
            exact = made.generate(asked, reuse="exact", max_new_tokens=4).token_ids
            if exact != families.generated("llama", "sdpa", asked, 4):
                wrong.append(ids)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and made.stats().upgraded > 0


# -- the queue


def queued(made: KVBoost) -> list[tuple[int, ...]]:
    return [job.prompt.ids for job in made._upgrades._jobs]


def test_the_newest_comes_first_and_replaces_what_it_goes_on_from(
    make: Callable[..., KVBoost],
) -> None:
    made = make()
    with made._upgrades.traffic.request():  # so that all of it waits
        one = moved(made)
        other = moved(made, [*MOVED[:-5], 1, 2, 3])
        assert queued(made) == [tuple(other[:-1]), tuple(one[:-1])]
        turn = moved(made, [*one, *tokens(30, 6)])
        assert queued(made) == [tuple(turn[:-1]), tuple(other[:-1])]
        again = moved(made, [*one[: len(MOVED)], 7, 8])  # a branch
        assert queued(made) == [tuple(again[:-1]), tuple(turn[:-1]), tuple(other[:-1])]
        made.clear()
        assert queued(made) == [] and made.stats().waiting == 0


def test_the_queue_holds_so_many_seconds(make: Callable[..., KVBoost]) -> None:
    made = make(upgrade=10.0)
    with made._upgrades.traffic.request():
        made.prefill(KNOWN, segments=[40, 240])
        for n in range(6):
            made._engine._pace = 0.01
            moved(made, [*MOVED, n, n])  # 3.6 to 3.7 seconds each
            made._engine._pace = 0.01
        assert [ids[len(MOVED)] for ids in queued(made)] == [5, 4]
        made._engine._pace = 1.0
        moved(made, [*MOVED, 9])
        assert queued(made) == []


def test_off_there_is_no_thread_and_no_queue() -> None:
    made, threads = boost("llama"), threading.active_count()
    moved(made)
    stats = made.stats()
    assert (stats.waiting, stats.upgraded) == (0, 0)
    assert made.upgrade(0)
    assert threading.active_count() == threads
    assert not any(t.name == "kvboost-upgrade" for t in threading.enumerate())


def test_exact_and_off_and_long_prompts_are_not_queued(make: Callable[..., KVBoost]) -> None:
    made = make("phi3-longrope")  # another rotation from 128 tokens on
    with made._upgrades.traffic.request():
        a, b = tokens(20, 1), tokens(90, 2)
        made.prefill([*a, *b], segments=[20])
        asked = [*a, *tokens(5, 4), *b]
        options = {"segments": [25], "recompute": "none"}
        assert made.generate(asked, max_new_tokens=40, **options).usage.moved == 90 - FRESH
        assert queued(made) == []
        short = made.generate(asked, max_new_tokens=2, **options)
        assert short.usage.moved == 90 - FRESH and len(queued(made)) == 1
        made.clear()
        for more in ({"reuse": "off"}, {"reuse": "exact"}, {"recompute": "full"}):
            made.generate(asked, max_new_tokens=1, **options | more)
        assert queued(made) == []


# -- what may go wrong


@pytest.mark.parametrize("when", ["waiting", "computing"])
def test_new_weights_drop_what_the_old_ones_answered(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = deepcopy(families.model("llama"))
    with KVBoost(model, tokenizer(), chunk_tokens=32, upgrade=60.0) as made:
        hook = Hook(made, monkeypatch)

        def swap() -> None:
            if len(hook.blocks) <= 1:
                with torch.no_grad():
                    model.model.layers[1].self_attn.k_proj.weight.mul_(1.3)

        hook.after = swap if when == "computing" else lambda: None
        with made._upgrades.traffic.request():
            ids = moved(made)
            start, entries = exact_tokens(made, ids), made.stats().store.entries
            if when == "waiting":
                swap()
        assert made.upgrade(30)
        assert len(hook.blocks) == 1
        assert made._engine.store.memory.stats().entries == entries
        assert exact_tokens(made, ids) == start and made.stats().upgraded == 0


def test_a_failing_pass_is_said_and_the_next_prompt_is_done(
    make: Callable[..., KVBoost], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = make()
    hook = Hook(made, monkeypatch)

    def fail() -> None:
        if len(hook.blocks) == 2:
            raise RuntimeError("out of memory")

    hook.after = fail
    moved(made)
    assert made.upgrade(30)
    assert [r.message for r in caplog.records] == [
        "a prompt could not be computed while idle: out of memory"
    ]
    ids = moved(made, OTHER)
    assert made.upgrade(30)
    assert exact_tokens(made, ids) == len(ids) - 1


def test_closing_stops_it(make: Callable[..., KVBoost], monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    made = make()
    hook, begun = Hook(made, monkeypatch), threading.Event()

    def slowly() -> None:
        begun.set()
        time.sleep(0.2)

    hook.before = slowly
    moved(made)
    assert begun.wait(10)
    made.close()
    assert len(hook.blocks) <= 2 and not made._upgrades._thread.is_alive()
    moved(made, OTHER)
    assert made.upgrade(0)


def test_the_collector_stops_it() -> None:
    made = boost("llama", upgrade=60.0)
    moved(made)
    thread = made._upgrades._thread
    del made
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def test_the_process_ends_while_it_computes() -> None:
    script = (
        "import test_upgrade as t, threading\n"
        "made = t.boost('llama', upgrade=60.0)\n"
        "begun = threading.Event()\n"
        "hook = t.Hook(made, t.pytest.MonkeyPatch())\n"
        "hook.before = begun.set\n"
        "t.moved(made)\n"
        "assert begun.wait(60)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_it_is_no_request(make: Callable[..., KVBoost], tmp_path: Path) -> None:
    """Neither counted, nor traced, nor a hit."""
    made = make(trace=tmp_path / "trace.jsonl")
    moved(made)
    before = made.stats()
    assert made.upgrade(30)
    after = made.stats()
    assert after.upgraded > 300
    assert (after.requests, after.tokens) == (before.requests, before.tokens)
    assert len(read_trace(tmp_path / "trace.jsonl").requests) == 2


def test_the_budget_in_memory_holds(make: Callable[..., KVBoost]) -> None:
    made = make(max_bytes=400_000)
    for n in range(4):
        made.generate([*HEAD, *TWO, *ONE, n], segments=BORDERS, max_new_tokens=2)
        made.generate([*HEAD, *ONE, *TWO, n], segments=[40, 240], max_new_tokens=2)
        assert made.upgrade(30)
        assert made.stats().store.bytes <= 400_000


@pytest.mark.parametrize("value", [-1, float("inf"), "10", None, True])
def test_seconds_are_seconds(value: Any) -> None:
    with pytest.raises(ConfigError, match="upgrade must be a number above 0"):
        boost("llama", upgrade=value)


def test_a_failed_construction_leaves_no_thread() -> None:
    threads = threading.active_count()
    with pytest.raises(ConfigError):
        boost("llama", upgrade=60.0, kv_format="nonsense")
    assert threading.active_count() == threads


def test_rows_that_are_computed_are_the_rows_reported(make: Callable[..., KVBoost]) -> None:
    made = make()
    moved(made)
    with counted(made.model) as rows:
        assert made.upgrade(30)
    assert sum(rows) == made.stats().upgraded
    assert all(n % 16 == 0 for n in rows[:-1]) and max(rows) <= 512
