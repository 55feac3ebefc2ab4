"""What add-ons are told of a call, and what their refusal does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from scripted_plugin import Script
from scripted_site import ScriptedSite, eventually, slots_in_use

from iaop_core import InferCall, InferResult, LLMGateway, hookimpl
from iaop_core.errors import (
    BackendUnavailableError,
    IaopError,
    QuotaExceededError,
    RequestVetoedError,
)
from iaop_core.plugins import PluginRegistry


class Watcher:
    """Records what it is told; raises `answer` when an attempt is about to begin."""

    def __init__(self, answer: Callable[[InferCall], Exception | None] = lambda call: None) -> None:
        self.answer = answer
        self.started: list[InferCall] = []
        self.finished: list[tuple[InferCall, InferResult | None, BaseException | None]] = []

    @hookimpl
    def iaop_infer_started(self, call: InferCall) -> None:
        self.started.append(call)
        if (error := self.answer(call)) is not None:
            raise error

    @hookimpl
    def iaop_infer_finished(
        self, call: InferCall, result: InferResult | None, error: BaseException | None
    ) -> None:
        self.finished.append((call, result, error))


def watched(site: ScriptedSite, watcher: object, *scripts: Script, **values: Any) -> LLMGateway:
    registry = PluginRegistry()
    registry.register(watcher)
    return site.gateway(*scripts, registry=registry, **values)


async def _drain(gateway: LLMGateway, **options: Any) -> None:
    async for _ in gateway.astream("hi", **options):
        pass


CALLS: dict[str, Callable[..., Any]] = {
    "ask": lambda gateway, **options: gateway.ask("hi", **options),
    "stream": lambda gateway, **options: list(gateway.stream("hi", **options)),
    "aask": lambda gateway, **options: asyncio.run(gateway.aask("hi", **options)),
    "astream": lambda gateway, **options: asyncio.run(_drain(gateway, **options)),
}

TENANT = {"line-3": {"tokens_per_day": 300}}
"""Room for one call of 256 tokens at a time."""


def reserved(gateway: LLMGateway, tenant: str) -> int:
    return gateway._site.quotas._accounts[tenant].reserved


@pytest.mark.parametrize("mode", CALLS)
def test_vetoed_call_sends_nothing_and_gives_slot_and_quota_back(
    mode: str, site: ScriptedSite
) -> None:
    watcher = Watcher(lambda call: RequestVetoedError("line-3 may not ask today"))
    script, spare = Script("only", max_concurrency=1), Script("spare")
    gateway = watched(site, watcher, script, spare, tenants=TENANT)
    for _ in range(3):
        with pytest.raises(RequestVetoedError, match="line-3 may not ask today"):
            CALLS[mode](gateway, tenant="line-3")
    assert (script.calls, spare.calls) == ([], []), "a veto is no reason to ask another backend"
    assert slots_in_use(gateway, "only") == 0
    assert reserved(gateway, "line-3") == 0
    for row in site.rows():
        assert (row["outcome"], row["error_kind"]) == ("refused", "request_vetoed")
        assert (row["prompt_tokens"], row["completion_tokens"]) == (0, 0)
        assert row["on_premises"] is None
    watcher.answer = lambda call: None
    CALLS[mode](gateway, tenant="line-3")
    assert script.calls == ["hi"]


def test_attempt_that_is_vetoed_after_a_failover_sends_nothing_either(site: ScriptedSite) -> None:
    def veto(call: InferCall) -> Exception | None:
        return RequestVetoedError("not there") if call.backend == "cloud" else None

    local = Script("local", lambda prompt: iter([BackendUnavailableError("refused")]))
    cloud = Script("cloud", on_premises=False)
    gateway = watched(site, Watcher(veto), local, cloud, require={"on_premises": False})
    with pytest.raises(RequestVetoedError, match="not there"):
        gateway.ask("hi")
    assert (len(local.calls), cloud.calls) == (1, [])
    row = site.row()
    assert (row["backend"], row["attempts"], row["on_premises"]) == ("cloud", 2, 1)


def test_hook_that_fails_is_logged_and_stops_no_call(
    site: ScriptedSite, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = watched(site, Watcher(lambda call: ValueError("secret-4711")), Script("only"))
    assert gateway.ask("hi").text == "a hi"
    assert "hook iaop_infer_started" in caplog.text
    assert "ValueError" in caplog.text
    assert "secret-4711" not in caplog.text


def test_every_watcher_is_told_though_one_vetoes(site: ScriptedSite) -> None:
    registry = PluginRegistry()
    watchers = [Watcher(), Watcher(lambda call: RequestVetoedError("no")), Watcher()]
    for watcher in watchers:
        registry.register(watcher)
    with pytest.raises(RequestVetoedError):
        site.gateway(Script("only"), registry=registry).ask("hi")
    assert [len(watcher.started) for watcher in watchers] == [1, 1, 1]


def test_watcher_is_told_of_each_attempt_and_its_end(site: ScriptedSite) -> None:
    down = BackendUnavailableError("refused")
    watcher = Watcher()
    scripts = [Script("a", lambda prompt: iter([down])), Script("b")]
    gateway = watched(site, watcher, *scripts, tenants={"line-3": {}})
    list(gateway.stream("hi", tenant="line-3"))
    told = [(call.backend, call.attempt, call.tenant, call.streamed) for call in watcher.started]
    assert told == [("a", 1, "line-3", True), ("b", 2, "line-3", True)]
    (first, no_result, error), (second, result, no_error) = watcher.finished
    assert [first, second] == watcher.started
    assert (no_result, error, no_error) == (None, down, None)
    assert result is not None
    assert result.text == "a hi"
    assert {call.request_id for call in watcher.started} == {site.row()["request_id"]}


def test_watcher_is_told_of_neither_when_the_caller_left(site: ScriptedSite) -> None:
    watcher = Watcher()
    stream: Any = watched(site, watcher, Script("only")).stream("hi")
    next(stream)
    stream.close()
    assert eventually(lambda: len(watcher.finished) == 1)
    assert watcher.finished[0][1:] == (None, None)


# -- before any hook ----------------------------------------------------------------------------


def test_quota_is_asked_before_a_hook_is_told(site: ScriptedSite) -> None:
    watcher = Watcher()
    gateway = watched(site, watcher, Script("only"), tenants={"line-3": {"tokens_per_day": 1}})
    with pytest.raises(QuotaExceededError):
        gateway.ask("hi", tenant="line-3")
    assert watcher.started == []


@pytest.mark.parametrize("refused_for", ["policy", "parameter", "prompt"])
def test_call_that_no_backend_may_take_costs_no_quota(refused_for: str, site: ScriptedSite) -> None:
    routes = {
        "away": {"targets": [{"backend": "cloud"}], "require": {"on_premises": True}},
        "here": {"targets": [{"backend": "local"}]},
    }
    gateway = site.gateway(
        Script("cloud", on_premises=False),
        Script("local"),
        routes=routes,
        tenants={"line-3": {"requests_per_minute": 1}},
        load=False,
    )
    wrong: dict[str, dict[str, Any]] = {
        "policy": {"route": "away"},
        "parameter": {"route": "here", "params": {"top_k": 1}},
        "prompt": {"route": "here", "prompt": ""},
    }
    for _ in range(3):
        options = {"prompt": "hi", **wrong[refused_for]}
        with pytest.raises(IaopError) as caught:
            gateway.ask(options.pop("prompt"), tenant="line-3", **options)
        assert not isinstance(caught.value, QuotaExceededError)
    assert gateway.ask("hi", tenant="line-3", route="here").text == "a hi"
    with pytest.raises(QuotaExceededError):
        gateway.ask("hi", tenant="line-3", route="here")


def test_failover_reserves_once(site: ScriptedSite) -> None:
    down = Script("down", lambda prompt: iter([BackendUnavailableError("refused")]))
    limit = {"line-3": {"tokens_per_day": 300, "requests_per_minute": 1}}
    gateway = site.gateway(down, Script("spare"), tenants=limit)
    assert gateway.ask("hi", tenant="line-3").text == "a hi"
    assert reserved(gateway, "line-3") == 0
