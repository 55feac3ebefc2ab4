"""Leaving a call: the endpoint sees it, the slot is free again, and nothing piles up."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from typing import Any

import pytest
from faulty_upstream import (
    DONE,
    SILENCE,
    FaultyUpstream,
    Reply,
    chunk,
    completion,
    events,
    head,
    json_reply,
)

from iaop_cloud_api import CloudApiBackend
from iaop_core.errors import BackendUnavailableError, ServiceError

OK = json_reply(completion("Hello"))


async def leave(call: Any, after_s: float) -> None:
    task = asyncio.ensure_future(call)
    await asyncio.sleep(after_s)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def read(backend: CloudApiBackend) -> str:
    return "".join([piece.delta async for piece in backend.astream("Hi")])


WAITS: dict[str, Reply] = {
    "before the head": Reply([SILENCE]),
    "before the first event": events(SILENCE),
    "after the first event": events(chunk("Hi"), SILENCE),
    "within an answer": Reply([head(length=900), b"{", SILENCE]),
}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("name", WAITS)
def test_endpoint_sees_a_cancelled_call_within_a_second(
    upstream: FaultyUpstream, backend: CloudApiBackend, name: str, streamed: bool
) -> None:
    upstream.answer(WAITS[name])
    asyncio.run(leave(read(backend) if streamed else backend.ainfer("Hi"), 0.2))
    left_at = time.monotonic()
    assert upstream.calls[0].left.wait(1)
    assert upstream.calls[0].left_at is not None
    assert upstream.calls[0].left_at - left_at < 1


def test_call_cancelled_while_it_waits_for_a_slot_sends_nothing(
    upstream: FaultyUpstream, make: Any
) -> None:
    upstream.answer(Reply([SILENCE]))
    backend = make(max_concurrency=1)

    async def scenario() -> None:
        first = asyncio.ensure_future(backend.ainfer("one"))
        await asyncio.sleep(0.2)
        await leave(backend.ainfer("two"), 0.2)
        first.cancel()
        upstream.answer(OK)
        assert (await asyncio.wait_for(backend.ainfer("three"), 1)).text == "Hello"

    asyncio.run(scenario())
    assert [call.body["messages"][0]["content"] for call in upstream.posts] == ["one", "three"]


def test_call_that_gets_no_slot_in_time_says_that_nothing_was_sent(
    upstream: FaultyUpstream, make: Any
) -> None:
    upstream.answer(events(chunk("Hi"), SILENCE))
    backend = make(max_concurrency=1, timeout_ms=300)
    stream = backend.stream("Hi")
    next(stream)
    with pytest.raises(BackendUnavailableError, match="max_concurrency=1") as caught:
        backend.infer("Hi")
    assert caught.value.may_fail_over
    stream.close()


def test_no_more_calls_than_the_limit_are_under_way(upstream: FaultyUpstream, make: Any) -> None:
    upstream.answer(Reply([0.1, *OK.steps], keep_open=True))
    backend = make(max_concurrency=3)

    async def ask_nine() -> None:
        await asyncio.gather(*(backend.ainfer("Hi") for _ in range(9)))

    started = time.monotonic()
    asyncio.run(ask_nine())
    assert time.monotonic() - started > 0.28
    assert len({call.connection for call in upstream.posts}) <= 3


def test_hundreds_of_cancelled_calls_leave_the_backend_free(
    upstream: FaultyUpstream, make: Any
) -> None:
    slow = [step for letter in "abcdefgh" for step in (0.01, chunk(letter))]
    upstream.answer(events(*slow, DONE))
    backend = make(max_concurrency=10)
    chance = random.Random(4711)

    async def call_and_leave(number: int) -> None:
        call = read(backend) if number % 2 else backend.ainfer("Hi")
        task = asyncio.ensure_future(call)
        await asyncio.sleep(chance.uniform(0, 0.1))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def storm() -> None:
        for round_ in range(5):
            await asyncio.gather(*(call_and_leave(round_ * 100 + n) for n in range(100)))

    asyncio.run(storm())
    upstream.answer(OK)
    started = time.monotonic()
    assert backend.infer("Hi").text == "Hello"
    assert time.monotonic() - started < 1
    assert all(call.left.wait(1) for call in upstream.posts[:-1] if call.left_at is not None)


def test_one_backend_serves_many_loops_and_threads(
    upstream: FaultyUpstream, backend: CloudApiBackend
) -> None:
    upstream.answer(OK)

    async def ask() -> str:
        return (await backend.ainfer("Hi")).text

    assert [asyncio.run(ask()) for _ in range(3)] == ["Hello"] * 3
    texts: list[str] = []
    threads = [
        threading.Thread(target=lambda: texts.append(backend.infer("Hi").text)) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == ["Hello"] * 2


def test_unload_ends_the_calls_under_way(
    upstream: FaultyUpstream, backend: CloudApiBackend
) -> None:
    upstream.answer(events(chunk("Hi"), SILENCE))
    stream = backend.stream("Hi")
    assert next(stream).delta == "Hi"
    backend.unload()
    with pytest.raises(ServiceError):
        next(stream)
    assert upstream.calls[0].left.wait(1)


def test_unload_ends_the_calls_that_wait(upstream: FaultyUpstream, make: Any) -> None:
    upstream.answer(Reply([SILENCE]))
    backend = make(max_concurrency=1)

    async def scenario() -> list[BaseException | object]:
        calls = [asyncio.ensure_future(backend.ainfer("Hi")) for _ in range(3)]
        await asyncio.sleep(0.2)
        backend.unload()
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 2)

    assert [type(end) for end in asyncio.run(scenario())] == [BackendUnavailableError] * 3
    assert len(upstream.posts) == 1


def test_backend_works_again_after_unload_and_load(
    upstream: FaultyUpstream, backend: CloudApiBackend
) -> None:
    upstream.answer(OK)
    backend.infer("Hi")
    backend.unload()
    backend.load_model()
    assert backend.infer("Hi").text == "Hello"
