"""What may leave the site: only what the values allow, whatever fails."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from scripted_plugin import Script
from scripted_site import ScriptedSite

from iaop_core import LLMGateway
from iaop_core.errors import BackendUnavailableError, CapabilityNotSupportedError, IaopError

SAYS: list[dict[str, Any]] = [{}, {"on_premises": True}, {"on_premises": False}]


def _down(prompt: Any) -> Iterator[Any]:
    yield BackendUnavailableError("refused")


def _ask(gateway: LLMGateway, asynchronously: bool) -> str:
    if asynchronously:
        return asyncio.run(gateway.aask("hi")).text
    return gateway.ask("hi").text


@pytest.mark.parametrize("asynchronously", [False, True], ids=["sync", "aio"])
@pytest.mark.parametrize("fallback_on_site", [True, False], ids=["to-site", "to-cloud"])
@pytest.mark.parametrize("target_on_site", [True, False], ids=["site", "cloud"])
@pytest.mark.parametrize("require", SAYS, ids=str)
def test_failover_never_leaves_the_site_unless_allowed(
    require: dict[str, Any],
    target_on_site: bool,
    fallback_on_site: bool,
    asynchronously: bool,
    site: ScriptedSite,
) -> None:
    target = Script("target", _down, on_premises=target_on_site)
    fallback = Script("fallback", on_premises=fallback_on_site)
    gateway = site.gateway(target, fallback, require=require, load=False)
    says = require.get("on_premises")
    target_allowed = target_on_site or says is not True
    # Unasked, a fallback off site is never taken, not even after a target off site.
    fallback_allowed = fallback_on_site or says is False
    if target_allowed and fallback_allowed:
        assert _ask(gateway, asynchronously) == "a hi"
    else:
        with pytest.raises(IaopError) as caught:
            _ask(gateway, asynchronously)
        if not target_allowed:
            assert isinstance(caught.value, CapabilityNotSupportedError)
            assert caught.value.capability == "on_premises"
            assert "never leave the site" in str(caught.value)
    assert bool(target.calls) == target_allowed
    assert bool(fallback.calls) == (target_allowed and fallback_allowed)
    went_out = (bool(target.calls) and not target_on_site) or (
        bool(fallback.calls) and not fallback_on_site
    )
    went_anywhere = bool(target.calls or fallback.calls)
    assert site.row()["on_premises"] == (not went_out if went_anywhere else None)


def test_prompt_that_has_left_stays_marked_after_a_failover_to_the_site(
    site: ScriptedSite,
) -> None:
    cloud = Script("cloud", _down, on_premises=False)
    site.gateway(cloud, Script("local")).ask("hi")
    row = site.row()
    assert (row["backend"], row["on_premises"]) == ("local", False)


@pytest.mark.parametrize("require", [{}, {"on_premises": True}])
def test_forbidden_backend_is_told_at_start(require: dict[str, Any], site: ScriptedSite) -> None:
    gateway = site.gateway(
        Script("local"), Script("cloud", on_premises=False), require=require, load=False
    )
    with pytest.raises(CapabilityNotSupportedError, match=r"routes\.r\.require\.on_premises"):
        gateway.load()


def test_route_that_requires_streaming_refuses_a_backend_without_it(site: ScriptedSite) -> None:
    lump = Script("lump", streaming=False)
    gateway = site.gateway(lump, require={"streaming": True}, load=False)
    with pytest.raises(CapabilityNotSupportedError, match="requires streaming"):
        gateway.ask("hi")
    assert lump.calls == []
    assert site.row()["outcome"] == "refused"


@pytest.mark.parametrize("allowed", [False, True])
def test_offline_backend_is_served_only_when_allowed(allowed: bool, site: ScriptedSite) -> None:
    offline = Script("only", offline=True)
    gateway = site.gateway(offline, gateway={"allow_offline": allowed}, load=False)
    if allowed:
        gateway.load()
        assert gateway.ask("hi").offline
        assert site.row()["offline"] == 1
        return
    for call in (gateway.load, lambda: gateway.ask("hi"), lambda: list(gateway.stream("hi"))):
        with pytest.raises(IaopError, match="allow_offline: true"):
            call()
    assert offline.calls == []


def test_offline_backend_is_no_silent_fallback(site: ScriptedSite) -> None:
    offline = Script("stand-in", offline=True)
    gateway = site.gateway(Script("real", _down), offline, load=False)
    with pytest.raises(IaopError):
        gateway.ask("hi")
    assert offline.calls == []
