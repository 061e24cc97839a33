"""Many requests at once on one model: nobody's answer, tokens or time are somebody else's."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest
import torch
from families import boost, tokens

from kvboost import ConfigError, KVBoost, PromptError, PromptTooLongError
from kvboost.server.job import Ticket
from kvboost.server.limits import Limits
from kvboost.server.queue import FairQueue
from kvboost.server.scheduler import Scheduler
from kvboost.server.work import (
    BusyError,
    DeadlineError,
    Done,
    Ended,
    Event,
    Piece,
    Served,
    Started,
    Tenant,
    Work,
)

ME, YOU = Tenant("me", "mine"), Tenant("you", "yours")
Make = Callable[..., Scheduler]


@pytest.fixture
def served() -> list[Served]:
    return []


@pytest.fixture
def make(served: list[Served]) -> Iterator[Make]:
    made: list[Scheduler] = []

    def make(on: KVBoost | None = None, **limits: Any) -> Scheduler:
        made.append(Scheduler(on or boost("llama"), Limits(**limits), served.append))
        return made[-1]

    yield make
    for each in made:
        each.close(0.0)
        assert not each._thread.is_alive()


def run(what: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(what, 60))


def work(prompt: Any, tenant: Tenant = ME, n: int = 1, **options: Any) -> Work:
    top, pin = options.pop("top", None), options.pop("pin", None)
    given = {"max_new_tokens": 8, **options}
    return Work(f"r{random.random()}", tenant, prompt, given, n, top, pin)


async def events(ticket: Ticket) -> list[Event]:
    return [event async for event in ticket]


async def ask(on: Scheduler, *args: Any, **options: Any) -> list[Event]:
    return await events(await on.submit(work(*args, **options)))


def ids(found: list[Event], choice: int = 0) -> list[int]:
    return [e.token for e in found if isinstance(e, Piece) and e.choice == choice]


def text(found: list[Event], choice: int = 0) -> str:
    return "".join(e.text for e in found if isinstance(e, Piece | Ended) and e.choice == choice)


class Slow:
    """A logits processor that takes its time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, _: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return scores


def test_one_answer_is_what_the_library_gives(make: Make, served: list[Served]) -> None:
    on, prompt = make(), tokens(50, 1)
    found = run(ask(on, prompt))
    want = boost("llama").generate(prompt, max_new_tokens=8)
    assert [type(e) for e in found] == [Started, *[Piece] * 8, Ended, Done]
    assert (ids(found), text(found)) == (list(want.token_ids), want.text)
    assert found[0].usage == want.usage.__class__(computed=50) and found[0].exact
    assert found[-1].usage == want.usage
    assert 0 <= found[0].queued < found[0].ttft
    (one,) = served
    assert (one.outcome, one.prompt, one.usage) == ("done", 50, want.usage)
    assert one.misses == {"new": 50} and len(one.gaps) == 7 and one.ttft == found[0].ttft
    assert run(ask(on, prompt))[0].usage.exact == 49


@pytest.mark.parametrize("seed", range(3))
def test_answers_in_a_batch_are_what_each_is_alone(make: Make, seed: int) -> None:
    chance = random.Random(seed)
    asked = [
        {
            "prompt": tokens(chance.randrange(1, 300), 100 * seed + n),
            "max_new_tokens": chance.randrange(1, 30),
            "temperature": chance.choice([0.0, 1.0]),
            "seed": n,
            "reuse": "off",
        }
        for n in range(12)
    ]
    on = make(slots=5)

    async def all_at_once() -> list[list[Event]]:
        return await asyncio.gather(*(ask(on, a["prompt"], **_rest(a)) for a in asked))

    for given, found in zip(asked, run(all_at_once()), strict=True):
        want = boost("llama").generate(given["prompt"], **_rest(given))
        assert ids(found) == list(want.token_ids)
    assert on.load().running == on.load().waiting == 0


def _rest(asked: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in asked.items() if name != "prompt"}


def test_several_answers_share_one_prefill(make: Make, served: list[Served]) -> None:
    on, prompt = make(), tokens(60, 2)
    found = run(ask(on, prompt, n=3, temperature=1.0, seed=7))
    each = [ids(found, n) for n in range(3)]
    assert len({tuple(e) for e in each}) == 3
    alone = [
        boost("llama").generate(prompt, temperature=1.0, seed=7 + n, max_new_tokens=8)
        for n in range(3)
    ]
    assert each == [list(one.token_ids) for one in alone]
    assert found[-1].usage.computed == 60 and found[-1].usage.generated == 24
    assert on.boost.stats().tokens.computed == 60 and on.boost.stats().requests == 1


def test_the_same_prompt_in_flight_is_computed_once(make: Make, served: list[Served]) -> None:
    on, prompt = make(), tokens(200, 3)

    async def both() -> list[list[Event]]:
        first = await on.submit(work(prompt, max_new_tokens=60))
        second = await on.submit(work(prompt))
        other = await on.submit(work(prompt, YOU))
        return await asyncio.gather(*map(events, (first, second, other)))

    first, second, other = run(both())
    assert first[-1].usage.computed == 200
    assert (second[-1].usage.exact, second[-1].usage.computed) in ((200, 0), (199, 1))
    assert other[-1].usage.computed == 200
    assert ids(second) == ids(first)[:8] == ids(other)


def test_an_answer_goes_on_while_a_long_prompt_is_read(make: Make) -> None:
    on = make()

    async def both() -> tuple[list[float], float, float]:
        short = await on.submit(work(tokens(5, 1), max_new_tokens=400))
        times, began = [], 0.0
        reading = None
        async for _ in short:
            times.append(time.perf_counter())
            if len(times) == 20:
                began = times[-1]
                reading = asyncio.ensure_future(ask(on, tokens(900, 2), max_new_tokens=1))
        assert reading is not None
        started = next(e for e in await reading if isinstance(e, Started))
        return times, began, began + started.ttft

    times, began, ended = run(both())
    assert sum(began < t < ended for t in times) >= 5


def test_log_probabilities_are_the_models_own(make: Make) -> None:
    on, prompt = make(), tokens(20, 5)
    found = run(ask(on, prompt, top=3, logit_bias={7: 100.0}, max_new_tokens=3))
    assert ids(found) == [7, 7, 7]
    want = boost("llama").score(prompt, [7, 7, 7]).logits.log_softmax(-1)
    for n, piece in enumerate(e for e in found if isinstance(e, Piece)):
        assert piece.logprob is not None
        assert piece.logprob.logprob == pytest.approx(float(want[n, 7]), abs=1e-3)
        top = want[n].topk(3)
        assert [t for t, _ in piece.logprob.top] == top.indices.tolist()


def test_nothing_is_answered_but_stored_for_n_0(make: Make) -> None:
    on, prompt = make(), tokens(100, 6)
    found = run(ask(on, prompt, n=0, pin=60.0))
    assert [type(e) for e in found] == [Started, Done]
    assert run(ask(on, prompt))[0].usage.exact == 99
    assert on.boost.stats().tokens.generated == 8


def test_bad_requests_are_refused_before_they_wait(make: Make) -> None:
    on = make(slots=2, prompt_tokens=50)
    for bad, error in (
        (work([]), PromptError),
        (work(tokens(51, 1)), PromptError),
        (work([10**6]), PromptError),
        (work([1], temperature=-1), ConfigError),
        (work([1], n=3), ConfigError),
    ):
        with pytest.raises(error):
            run(on.submit(bad))
    assert len(on._waiting) == 0 and run(ask(on, [1, 2]))


def test_what_can_only_be_too_long_is_not_even_tokenised(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    on = make()
    monkeypatch.setattr("kvboost.prompt.PromptBuilder.build", lambda *_: pytest.fail("tokenised"))
    for prompt in ("w5 " * 100_000, [{"role": "user", "content": "w5 " * 100_000}]):
        with pytest.raises(PromptTooLongError):
            run(on.submit(work(prompt)))


def test_whether_it_is_pinned_is_said(make: Make) -> None:
    on = make(boost("llama", max_bytes=1 << 20))
    assert run(ask(on, tokens(100, 1), n=0, pin=9.0))[-1].pinned is True
    assert run(ask(on, tokens(900, 2), n=0, pin=9.0))[-1].pinned is False
    assert run(ask(on, tokens(30, 3)))[-1].pinned is None


def test_a_full_queue_says_when_to_come_back(make: Make) -> None:
    on = make(slots=1, queue=2)

    async def many() -> list[Any]:
        slow = {"processors": [Slow(0.05)], "max_new_tokens": 20}
        first = await on.submit(work([1, 2], **slow))
        while not on.load().running:
            await asyncio.sleep(0.01)
        waiting = [await on.submit(work([3, n])) for n in range(2)]
        with pytest.raises(BusyError) as refused:
            await on.submit(work([4]))
        assert refused.value.retry_after >= 1
        assert len(on.boost._upgrades.traffic.open) == 3
        return await asyncio.gather(*map(events, (first, *waiting)))

    assert all(isinstance(found[-1], Done) for found in run(many()))


def test_who_leaves_frees_the_slot_at_the_next_step(make: Make, served: list[Served]) -> None:
    on = make(slots=1)

    async def leave() -> None:
        ticket = await on.submit(work([1, 2, 3], max_new_tokens=900))
        seen = aiter_of(ticket)
        for _ in range(4):
            await anext(seen)
        ticket.cancel()
        assert isinstance((await ask(on, [5, 6]))[-1], Done)

    run(leave())
    assert [one.outcome for one in served] == ["cancelled", "done"]
    assert served[0].usage.generated < 100


def aiter_of(ticket: Ticket) -> AsyncIterator[Event]:
    return ticket.__aiter__()


def test_who_leaves_while_waiting_or_being_read_is_forgotten(
    make: Make, served: list[Served]
) -> None:
    on = make(slots=1)

    async def leave() -> None:
        busy = await on.submit(work([1], processors=[Slow(0.02)], max_new_tokens=10))
        gone = await on.submit(work(tokens(900, 1)))
        gone.cancel()
        read = await on.submit(work(tokens(900, 2)))
        await events(busy)
        read.cancel()
        assert isinstance((await ask(on, [7]))[-1], Done)

    run(leave())
    assert sorted(one.outcome for one in served) == ["cancelled", "cancelled", "done", "done"]


def test_a_request_may_take_so_long_and_no_longer(make: Make, served: list[Served]) -> None:
    on = make(seconds=0.3)
    with pytest.raises(DeadlineError):
        run(ask(on, [1], processors=[Slow(0.05)], max_new_tokens=900))
    assert served[0].outcome == "deadline"
    assert isinstance(run(ask(on, [1]))[-1], Done)


def test_one_that_fails_takes_nobody_with_it(make: Make, served: list[Served]) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("not a good processor")

    on = make()

    async def three() -> list[Any]:
        return await asyncio.gather(
            ask(on, tokens(30, 1), max_new_tokens=20),
            ask(on, tokens(30, 2), processors=[broken]),
            ask(on, tokens(30, 3), max_new_tokens=20),
            return_exceptions=True,
        )

    one, bad, two = run(three())
    assert isinstance(bad, RuntimeError)
    for found, seed in ((one, 1), (two, 3)):
        want = boost("llama").generate(tokens(30, seed), max_new_tokens=20)
        assert ids(found) == list(want.token_ids)
    assert sorted(s.outcome for s in served) == ["done", "done", "failed"]


def test_a_step_that_fails_as_a_batch_is_taken_one_by_one(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    on = make()

    def steps(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(on.boost._engine, "steps", steps)
    found = run(ask(on, tokens(30, 1)))
    want = boost("llama").generate(tokens(30, 1), max_new_tokens=8)
    assert ids(found) == list(want.token_ids)


def test_stopping_answers_what_it_can_and_refuses_the_rest(make: Make) -> None:
    on = make(slots=1)

    async def stop() -> list[Any]:
        first = await on.submit(work([1], processors=[Slow(0.01)], max_new_tokens=20))
        long = await on.submit(work([2], processors=[Slow(0.05)], max_new_tokens=500))
        closing = threading.Thread(target=on.close, args=(1.5,))
        closing.start()
        while on.alive:
            await asyncio.sleep(0.01)
        with pytest.raises(BusyError):
            await on.submit(work([3]))
        found = await asyncio.gather(events(first), events(long), return_exceptions=True)
        await asyncio.to_thread(closing.join)
        return found

    first, long = run(stop())
    assert isinstance(first[-1], Done) and isinstance(long, BusyError)


def test_tenants_take_turns() -> None:
    queue: FairQueue[str] = FairQueue()
    for owner, item in (("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1")):
        queue.put(owner, item)
    queue.discard("c1")
    assert len(queue) == 4 and list(queue) == ["a1", "a2", "a3", "b1"]
    assert queue.take(lambda _: False) is None
    assert [queue.take(lambda _: True) for _ in range(5)] == ["a1", "b1", "a2", "a3", None]


def test_requests_leave_no_trace_in_memory(make: Make) -> None:
    """After 300 short requests, no job is held by the scheduler."""
    on = make()

    async def many() -> None:
        for n in range(30):
            await asyncio.gather(*(ask(on, [n, m], max_new_tokens=2) for m in range(10)))

    run(many())
    assert not on._running and len(on._waiting) == 0
    assert len(on.boost._upgrades.traffic.open) == 0
