"""Retries and failover: by the class of the error, never twice for one call that may have run."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from scripted_plugin import NO_END, Script
from scripted_site import ScriptedSite

from iaop_core.errors import (
    BackendProtocolError,
    BackendTimeoutError,
    BackendUnavailableError,
    ContextLengthExceededError,
    CredentialsRefusedError,
    IaopError,
    InvalidRequestError,
    ModelLoadError,
    ModelNotLoadedError,
    RateLimitedError,
    StreamInterruptedError,
)

Answer = Callable[[Any], Iterator[Any]]


def failing(error: BaseException, *before: str) -> Answer:
    def answer(prompt: Any) -> Iterator[Any]:
        yield from before
        yield error

    return answer


def failing_first(times: int, error: BaseException) -> Answer:
    """Fails that often, and answers from then on."""
    calls = iter(range(10**6))

    def answer(prompt: Any) -> Iterator[Any]:
        yield error if next(calls) < times else "late"

    return answer


# kind of error, whether another backend is tried, how often the same one is with `retries: 2`
CLASSES: list[tuple[IaopError | Exception, bool, int]] = [
    (BackendUnavailableError("refused"), True, 3),
    (BackendUnavailableError("reset after it was sent", may_have_run=True), False, 1),
    (BackendUnavailableError("no slot", busy=True), True, 1),
    (RateLimitedError("429"), True, 3),
    (ModelNotLoadedError("not loaded"), True, 1),
    (CredentialsRefusedError("401"), True, 1),
    (BackendTimeoutError("read timed out"), False, 1),
    (StreamInterruptedError("cut"), False, 1),
    (BackendProtocolError("garbage"), False, 1),
    (ModelLoadError("404: no such model"), True, 1),
    (InvalidRequestError("bad"), False, 1),
    (ContextLengthExceededError("too long"), False, 1),
    (ValueError("outside of the contract"), False, 1),
]


@pytest.mark.parametrize("mode", ["ask", "stream", "aask", "astream"])
@pytest.mark.parametrize(("error", "fails_over", "tries"), CLASSES, ids=lambda x: repr(x)[:40])
def test_error_class_decides_on_failover(
    error: Exception, fails_over: bool, tries: int, mode: str, site: ScriptedSite
) -> None:
    first, second = Script("first", failing(error)), Script("second")
    gateway = site.gateway(first, second)

    async def all_of_it() -> None:
        async for _ in gateway.astream("hi"):
            pass

    calls: dict[str, Callable[[], Any]] = {
        "ask": lambda: gateway.ask("hi"),
        "stream": lambda: list(gateway.stream("hi")),
        "aask": lambda: asyncio.run(gateway.aask("hi")),
        "astream": lambda: asyncio.run(all_of_it()),
    }
    if fails_over:
        calls[mode]()
        assert site.row()["outcome"] == "ok"
        assert site.row()["backend"] == "second"
        assert site.row()["attempts"] == 2
    else:
        with pytest.raises(IaopError) as caught:
            calls[mode]()
        if isinstance(error, IaopError):
            assert caught.value is error
        else:
            assert isinstance(caught.value, BackendProtocolError)
        assert second.calls == []
        assert site.row()["attempts"] == 1
    assert len(first.calls) == 1


@pytest.mark.parametrize(("error", "fails_over", "tries"), CLASSES, ids=lambda x: repr(x)[:40])
def test_error_class_decides_on_retries(
    error: Exception, fails_over: bool, tries: int, site: ScriptedSite
) -> None:
    only = Script("only", failing(error))
    gateway = site.gateway(only, gateway={"retries": 2})
    with pytest.raises(IaopError):
        gateway.ask("hi")
    assert len(only.calls) == tries
    assert site.row()["attempts"] == tries


def test_retries_go_round_all_backends_not_to_one_of_them(site: ScriptedSite) -> None:
    order: list[str] = []

    def failing_as(name: str) -> Answer:
        def answer(prompt: Any) -> Iterator[Any]:
            order.append(name)
            yield BackendUnavailableError("refused")

        return answer

    gateway = site.gateway(
        Script("a", failing_as("a")), Script("b", failing_as("b")), gateway={"retries": 1}
    )
    with pytest.raises(BackendUnavailableError):
        gateway.ask("hi")
    assert order == ["a", "b", "a", "b"]


def test_retry_that_works_is_an_answer(site: ScriptedSite) -> None:
    only = Script("only", failing_first(2, BackendUnavailableError("refused")))
    assert str(site.gateway(only, gateway={"retries": 2}).ask("hi")) == "late"
    assert (site.row()["outcome"], site.row()["attempts"]) == ("ok", 3)


def test_error_of_the_first_backend_is_told_when_all_fail(site: ScriptedSite) -> None:
    told = BackendUnavailableError("the first one's reason")
    gateway = site.gateway(
        Script("a", failing(told)), Script("b", failing(ModelNotLoadedError("other")))
    )
    with pytest.raises(BackendUnavailableError, match="the first one's reason"):
        gateway.ask("hi")


@pytest.mark.parametrize("error", [BackendUnavailableError("x"), RateLimitedError("x")], ids=repr)
def test_nothing_is_tried_again_after_the_first_delta(error: Exception, site: ScriptedSite) -> None:
    first, second = Script("first", failing(error, "one ", "two")), Script("second")
    gateway = site.gateway(first, second, gateway={"retries": 2})
    seen = []
    with pytest.raises(type(error)):
        seen.extend(chunk.delta for chunk in gateway.stream("hi"))
    assert seen == ["one ", "two"]
    assert (len(first.calls), second.calls) == (1, [])
    row = site.row()
    assert row["outcome"] == "failed"
    assert row["completion_tokens"] > 0, "what was delivered is charged"
    assert row["usage_estimated"]


def test_whole_answer_may_fail_over_after_text_that_no_one_saw(site: ScriptedSite) -> None:
    first = Script("first", failing(BackendUnavailableError("x"), "one ", "two"))
    assert str(site.gateway(first, Script("second")).ask("hi")) == "a hi"


def test_wait_that_the_service_asks_for_is_kept_when_there_is_time(site: ScriptedSite) -> None:
    only = Script("only", failing_first(1, RateLimitedError("429", retry_after_s=0.7)))
    gateway = site.gateway(only, gateway={"retries": 1})
    started = time.monotonic()
    gateway.ask("hi")
    assert time.monotonic() - started >= 0.7


def test_wait_beyond_the_deadline_fails_at_once(site: ScriptedSite) -> None:
    only = Script("only", failing(RateLimitedError("429", retry_after_s=86400)))
    gateway = site.gateway(only, gateway={"retries": 1, "timeout_ms": 5000})
    started = time.monotonic()
    with pytest.raises(RateLimitedError):
        gateway.ask("hi")
    assert time.monotonic() - started < 4
    assert len(only.calls) == 1


def test_missing_capability_of_the_first_backend_is_told(site: ScriptedSite) -> None:
    first, second = Script("first", params=frozenset({"max_tokens"})), Script("second")
    with pytest.raises(IaopError, match="'temperature'"):
        site.gateway(first, second).ask("hi", params={"temperature": 0.5})
    assert second.calls == []


def test_backend_that_lacks_a_capability_is_no_failover_target(site: ScriptedSite) -> None:
    first = Script("first", failing(BackendUnavailableError("refused")))
    second = Script("second", params=frozenset({"max_tokens"}))
    third = Script("third")
    answer = site.gateway(first, second, third).ask("hi", params={"temperature": 0.5})
    assert answer.text == "a hi"
    assert (second.calls, len(third.calls)) == ([], 1)


def test_backend_that_can_not_be_made_is_failed_over(site: ScriptedSite) -> None:
    def fail() -> None:
        raise OSError("no SDK")

    gateway = site.gateway(Script("first", make=fail), Script("second"))
    assert gateway.ask("hi").text == "a hi"


# -- breaches of the contract -------------------------------------------------------------------

BREACHES: list[tuple[str, Answer, type[IaopError], str]] = [
    ("no-end", lambda prompt: iter(["a", NO_END]), StreamInterruptedError, "without a result"),
    ("no-chunk", lambda prompt: iter([42]), BackendProtocolError, "a int for an InferChunk"),
    ("none", lambda prompt: iter([None]), StreamInterruptedError, "without a result"),
    ("exit", failing(SystemExit(3)), BackendProtocolError, "raised SystemExit"),
    ("bare-timeout", failing(TimeoutError()), BackendProtocolError, "raised TimeoutError"),
    ("cancelled", failing(asyncio.CancelledError()), StreamInterruptedError, "from within"),
    ("index", failing(IndexError("zebra-4711")), BackendProtocolError, "raised IndexError"),
]


@pytest.mark.parametrize("mode", ["ask", "stream", "aask"])
@pytest.mark.parametrize("face", ["stream", "astream"])
@pytest.mark.parametrize(
    ("name", "answer", "seen", "says"), BREACHES, ids=lambda x: x if isinstance(x, str) else ""
)
def test_breach_of_the_contract_is_a_typed_error_and_never_an_answer(
    name: str,
    answer: Answer,
    seen: type[IaopError],
    says: str,
    face: str,
    mode: str,
    site: ScriptedSite,
) -> None:
    async def aanswer(prompt: Any) -> AsyncIterator[Any]:
        for item in answer(prompt):
            await asyncio.sleep(0)
            yield item

    script = Script("only", aanswer if face == "astream" else answer, face=face)
    gateway = site.gateway(script, gateway={"retries": 2})
    calls: dict[str, Callable[[], Any]] = {
        "ask": lambda: gateway.ask("hi"),
        "stream": lambda: list(gateway.stream("hi")),
        "aask": lambda: asyncio.run(gateway.aask("hi")),
    }
    with pytest.raises(seen, match=says) as caught:
        calls[mode]()
    assert "zebra" not in str(caught.value)
    row = site.row()
    assert (row["outcome"], row["error_kind"]) == ("failed", seen.kind)
    assert row["attempts"] == 1


# -- weights ------------------------------------------------------------------------------------


def test_targets_get_their_share_of_the_calls(site: ScriptedSite) -> None:
    scripts = [Script("big"), Script("small"), Script("off")]
    targets = [
        {"backend": "big", "weight": 90},
        {"backend": "small", "weight": 10},
        {"backend": "off", "weight": 0},
    ]
    gateway = site.gateway(*scripts, routes={"r": {"targets": targets}})
    for _ in range(300):
        gateway.ask("hi")
    share = Counter({script.name: len(script.calls) for script in scripts})
    assert share["off"] == 0
    assert 5 <= share["small"] <= 80
    assert share.total() == 300


def test_other_targets_come_before_the_fallbacks(site: ScriptedSite) -> None:
    down = failing(BackendUnavailableError("refused"))
    scripts = [Script("a", down), Script("b", down), Script("spare")]
    targets = [{"backend": "a"}, {"backend": "b"}]
    routes = {"r": {"targets": targets, "fallback": ["spare", "a"]}}
    gateway = site.gateway(*scripts, routes=routes)
    for _ in range(5):
        assert gateway.ask("hi").text == "a hi"
    assert [len(script.calls) for script in scripts] == [5, 5, 5]
