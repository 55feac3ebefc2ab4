"""Places at a backend: never more holders than there are, never one lost, none forgotten."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from scripted_plugin import Script
from scripted_site import ScriptedSite, eventually, slots_in_use

from iaop_core import bridge
from iaop_core.errors import BackendTimeoutError, BackendUnavailableError, IaopError
from iaop_core.slots import Slots


def take(slots: Slots, timeout_s: float = 0.01) -> None:
    bridge.drive(slots.acquire(bridge.block, timeout_s))


def test_slots_are_taken_up_to_the_limit_and_given_back() -> None:
    slots = Slots(2)
    take(slots)
    take(slots)
    assert slots.in_use == 2
    with pytest.raises(TimeoutError):
        take(slots)
    slots.release()
    take(slots)
    slots.release()
    slots.release()
    assert slots.in_use == 0


def test_waiting_callers_are_served_in_order_whatever_their_kind() -> None:
    slots = Slots(1)
    take(slots)
    served: list[int] = []

    def wait_in_thread(number: int) -> None:
        take(slots, 30)
        served.append(number)
        slots.release()

    async def wait_in_loop(number: int) -> None:
        await slots.acquire(bridge.suspend, 30)
        served.append(number)
        slots.release()

    threads = []
    for number in range(8):
        if number % 2:
            target = lambda number=number: asyncio.run(wait_in_loop(number))  # noqa: E731
        else:
            target = lambda number=number: wait_in_thread(number)  # noqa: E731
        threads.append(threading.Thread(target=target))
        threads[-1].start()
        assert eventually(lambda number=number: len(slots._waiting) == number + 1)
    slots.release()
    for thread in threads:
        thread.join(30)
    assert served == list(range(8))
    assert slots.in_use == 0


def test_callers_who_gave_up_are_not_kept() -> None:
    slots = Slots(1)
    take(slots)

    async def give_up() -> None:
        tasks = [asyncio.ensure_future(slots.acquire(bridge.suspend, 60)) for _ in range(100)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(give_up())
    for _ in range(100):
        with pytest.raises(TimeoutError):
            take(slots, 0)
    assert not slots._waiting
    slots.release()
    assert slots.in_use == 0


def test_no_slot_is_lost_when_holders_and_waiters_leave_at_random() -> None:
    slots, chance = Slots(3), random.Random(4711)
    holders = most = 0
    lock = threading.Lock()

    def count(change: int) -> None:
        nonlocal holders, most
        with lock:
            holders += change
            most = max(most, holders)

    async def hold(pause_s: float) -> None:
        await slots.acquire(bridge.suspend, 30)
        count(1)
        try:
            await asyncio.sleep(pause_s)
        finally:
            count(-1)
            slots.release()

    async def many(seed: int) -> None:
        pauses = random.Random(seed)
        for _ in range(5):
            tasks = [asyncio.ensure_future(hold(pauses.random() / 500)) for _ in range(20)]
            for task in tasks:
                if pauses.random() < 0.5:
                    asyncio.get_running_loop().call_later(pauses.random() / 50, task.cancel)
            await asyncio.gather(*tasks, return_exceptions=True)

    loops = [bridge.in_thread(lambda: asyncio.run(many(chance.randrange(10**6)))) for _ in range(4)]
    for loop in loops:
        loop.result(60)
    assert slots.in_use == 0
    assert not slots._waiting
    assert 1 <= most <= 3


# -- through the gateway ------------------------------------------------------------------------


def _slow(prompt: Any) -> Iterator[str]:
    for number in range(5):
        time.sleep(0.002)
        yield f"{number} "


async def _aslow(prompt: Any) -> AsyncIterator[str]:
    for number in range(5):
        await asyncio.sleep(0.002)
        yield f"{number} "


FACES = pytest.mark.parametrize("face", ["stream", "astream", "infer", "ainfer"])


@FACES
def test_calls_that_leave_at_random_leak_no_slot(face: str, site: ScriptedSite) -> None:
    script = Script("only", _aslow if face[0] == "a" else _slow, face=face, max_concurrency=2)
    gateway = site.gateway(script, gateway={"slot_wait_ms": 60_000})
    chance = random.Random(4711)

    async def leave() -> None:
        async def stream() -> None:
            async for _ in gateway.astream("hi"):
                pass

        for _ in range(5):
            tasks = [
                asyncio.ensure_future(stream() if chance.random() < 0.5 else gateway.aask("hi"))
                for _ in range(50)
            ]
            for task in tasks:
                await asyncio.sleep(chance.random() / 1000)
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(leave())
    assert eventually(lambda: slots_in_use(gateway, "only") == 0)
    assert eventually(lambda: script.running == 0)
    assert script.most_running <= 2
    assert gateway.ask("hi").text == "0 1 2 3 4 "
    gateway.close()
    assert len(site.rows()) == 251
    assert {row["outcome"] for row in site.rows()} <= {"ok", "abandoned"}


@pytest.mark.parametrize("face", ["stream", "infer"])
def test_slot_is_held_until_the_backend_has_really_ended(face: str, site: ScriptedSite) -> None:
    """A caller who leaves does not make room on an engine that still works for him."""
    go_on = threading.Event()

    def stuck(prompt: Any) -> Iterator[str]:
        yield "begun "
        if prompt == "stuck":
            go_on.wait(30)
        yield "done"

    script = Script("only", stuck, face=face, max_concurrency=1)
    gateway = site.gateway(script, gateway={"slot_wait_ms": 100})
    with pytest.raises(BackendTimeoutError):
        gateway.ask("stuck", timeout_ms=100)
    assert slots_in_use(gateway, "only") == 1
    with pytest.raises(BackendUnavailableError, match="no free slot") as caught:
        gateway.ask("next")
    assert caught.value.busy
    go_on.set()
    assert eventually(lambda: slots_in_use(gateway, "only") == 0)
    assert gateway.ask("next").text == "begun done"
    assert script.most_running == 1


def test_wait_for_a_slot_ends_with_the_calls_own_time(site: ScriptedSite) -> None:
    release = threading.Event()

    def held(prompt: Any) -> Iterator[str]:
        release.wait(30)
        yield "a"

    gateway = site.gateway(Script("only", held, max_concurrency=1))
    holder = bridge.in_thread(lambda: gateway.ask("hold"))
    assert eventually(lambda: slots_in_use(gateway, "only") == 1)
    with pytest.raises(BackendTimeoutError):
        gateway.ask("hi", timeout_ms=100)
    release.set()
    holder.result(30)


def test_full_backend_is_failed_over(site: ScriptedSite) -> None:
    release = threading.Event()

    def held(prompt: Any) -> Iterator[str]:
        release.wait(30)
        yield "a"

    gateway = site.gateway(
        Script("full", held, max_concurrency=1), Script("spare"), gateway={"slot_wait_ms": 0}
    )
    holder = bridge.in_thread(lambda: gateway.ask("hold"))
    assert eventually(lambda: slots_in_use(gateway, "full") == 1)
    assert gateway.ask("hi").text == "a hi"
    release.set()
    holder.result(30)


def test_values_lower_the_limit_of_a_backend_but_never_raise_it(site: ScriptedSite) -> None:
    scripts = [Script("low", max_concurrency=4), Script("high", max_concurrency=4)]
    backends = {"low": {"max_concurrency": 2}, "high": {"max_concurrency": 99}}
    gateway = site.gateway(*scripts, backends=backends)
    limits = [gateway._site.backends[name].slots.limit for name in ("low", "high")]
    assert limits == [2, 4]


def test_limit_holds_for_threads_and_loops_together(site: ScriptedSite) -> None:
    script = Script("only", _slow, max_concurrency=3)
    gateway = site.gateway(script, gateway={"slot_wait_ms": 60_000})

    async def many() -> list[str]:
        answers = await asyncio.gather(*(gateway.aask("hi") for _ in range(20)))
        return [answer.text for answer in answers]

    loops = [bridge.in_thread(lambda: asyncio.run(many())) for _ in range(2)]
    threads = [
        bridge.in_thread(lambda: [gateway.ask("hi").text for _ in range(10)]) for _ in range(4)
    ]
    texts = [text for work in [*loops, *threads] for text in work.result(60)]
    assert texts == ["0 1 2 3 4 "] * 80
    assert script.most_running == 3
    assert len(site.rows()) == 80


@FACES
def test_failing_calls_leak_no_slot(face: str, site: ScriptedSite) -> None:
    def fail(prompt: Any) -> Iterator[Any]:
        yield "a"
        yield ValueError("x")

    async def afail(prompt: Any) -> AsyncIterator[Any]:
        yield "a"
        yield ValueError("x")

    script = Script("only", afail if face[0] == "a" else fail, face=face, max_concurrency=1)
    gateway = site.gateway(script)
    for _ in range(5):
        with pytest.raises(IaopError):
            list(gateway.stream("hi"))
    assert eventually(lambda: slots_in_use(gateway, "only") == 0)
