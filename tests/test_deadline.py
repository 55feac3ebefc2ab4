"""One total time for a call, whatever it waits for, and however deaf its backend is."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from scripted_plugin import Script
from scripted_site import ScriptedSite, eventually

from iaop_core import LLMGateway
from iaop_core.errors import BackendTimeoutError, InvalidRequestError

LIMIT_MS = 300
GENEROUS_S = 5.0

released = threading.Event()


@pytest.fixture(autouse=True)
def _release() -> Iterator[None]:
    released.clear()
    yield
    released.set()


def _hang(prompt: Any) -> Iterator[str]:
    released.wait(30)
    yield "late"


def _hang_later(prompt: Any) -> Iterator[str]:
    yield "early "
    released.wait(30)
    yield "late"


def _trickle(prompt: Any) -> Iterator[str]:
    while not released.is_set():
        time.sleep(0.02)
        yield "."


async def _ahang(prompt: Any) -> AsyncIterator[str]:
    await asyncio.sleep(30)
    yield "late"


async def _atrickle(prompt: Any) -> AsyncIterator[str]:
    while True:
        await asyncio.sleep(0.02)
        yield "."


DEAF = [
    ("stream", _hang),
    ("stream", _hang_later),
    ("stream", _trickle),
    ("infer", _hang),
    ("astream", _ahang),
    ("astream", _atrickle),
    ("ainfer", _ahang),
]


async def _drain(gateway: LLMGateway, **options: Any) -> None:
    async for _ in gateway.astream("hi", **options):
        pass


CALLS: dict[str, Callable[..., Any]] = {
    "ask": lambda gateway, **options: gateway.ask("hi", **options),
    "stream": lambda gateway, **options: list(gateway.stream("hi", **options)),
    "aask": lambda gateway, **options: asyncio.run(gateway.aask("hi", **options)),
    "astream": lambda gateway, **options: asyncio.run(_drain(gateway, **options)),
}


@pytest.mark.parametrize("mode", CALLS)
@pytest.mark.parametrize(("face", "answer"), DEAF, ids=lambda x: getattr(x, "__name__", x))
def test_total_time_holds_for_every_kind_of_backend(
    face: str, answer: Any, mode: str, site: ScriptedSite
) -> None:
    gateway = site.gateway(Script("only", answer, face=face), gateway={"retries": 3})
    started = time.monotonic()
    with pytest.raises(BackendTimeoutError, match="300 ms") as caught:
        CALLS[mode](gateway, timeout_ms=LIMIT_MS)
    assert LIMIT_MS / 1000 <= time.monotonic() - started < GENEROUS_S
    assert caught.value.timeout_ms == LIMIT_MS
    row = site.row()
    assert (row["outcome"], row["error_kind"], row["attempts"]) == (
        "timed_out",
        "backend_timeout",
        1,
    )
    assert row["prompt_tokens"] > 0, "the engine has worked: the prompt is charged"


@pytest.mark.parametrize("face", ["astream", "ainfer"])
def test_asynchronous_work_is_cancelled_when_its_time_is_up(face: str, site: ScriptedSite) -> None:
    script = Script("only", _ahang, face=face)
    with pytest.raises(BackendTimeoutError):
        site.gateway(script).ask("hi", timeout_ms=100)
    assert eventually(lambda: script.running == 0, 5)


def test_route_may_have_a_time_of_its_own(site: ScriptedSite) -> None:
    routes = {"r": {"targets": [{"backend": "only"}], "timeout_ms": 150}}
    gateway = site.gateway(Script("only", _hang), routes=routes)
    with pytest.raises(BackendTimeoutError, match="150 ms"):
        gateway.ask("hi")


def test_gateways_time_is_the_default(site: ScriptedSite) -> None:
    gateway = site.gateway(Script("only", _hang), gateway={"timeout_ms": 150})
    with pytest.raises(BackendTimeoutError, match="150 ms"):
        gateway.ask("hi")


def test_making_a_backend_counts_and_does_not_block_the_loop(site: ScriptedSite) -> None:
    gateway = site.gateway(Script("only", make=lambda: released.wait(30)), load=False)

    async def ask() -> int:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.ensure_future(tick())
        with pytest.raises(BackendTimeoutError):
            await gateway.aask("hi", timeout_ms=LIMIT_MS)
        ticking.cancel()
        return ticks

    assert asyncio.run(ask()) > 3
    released.set()


@pytest.mark.parametrize("timeout_ms", [1e300, float("inf"), 10**400], ids=["1e300", "inf", "huge"])
def test_endless_time_is_taken(timeout_ms: float, site: ScriptedSite) -> None:
    gateway = site.gateway(Script("only"))
    assert gateway.ask("hi", timeout_ms=timeout_ms).text == "a hi"
    assert asyncio.run(gateway.aask("hi", timeout_ms=timeout_ms)).text == "a hi"


@pytest.mark.parametrize("timeout_ms", [0, -1, float("nan"), "soon", True, [1]], ids=repr)
def test_time_that_is_none_is_the_callers_error(timeout_ms: Any, site: ScriptedSite) -> None:
    script = Script("only")
    gateway = site.gateway(script)
    with pytest.raises(InvalidRequestError) as caught:
        gateway.ask("hi", timeout_ms=timeout_ms)
    assert caught.value.param == "timeout_ms"
    assert script.calls == []
    assert site.row()["outcome"] == "refused"
