"""A backend that can't be used stops the routes that name it, and no other."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fake_site import FakeSite, good_plugin
from scripted_plugin import Script
from scripted_site import ScriptedSite

from iaop_core import LLMGateway
from iaop_core.cli import main
from iaop_core.errors import (
    BackendUnavailableError,
    DuplicateBackendError,
    PluginLoadError,
    UnknownBackendError,
    ValuesError,
)

UNUSABLE = {
    "absent": UnknownBackendError,
    "broken": PluginLoadError,
    "twice": DuplicateBackendError,
}


@pytest.fixture
def plugins(fake_site: FakeSite) -> FakeSite:
    fake_site.install("iaop-broken", "import no_such_sdk", name="broken")
    fake_site.install("iaop-twice-a", good_plugin("twice"), name="twice")
    fake_site.install("iaop-twice-b", good_plugin("twice"), name="twice")
    return fake_site


def values_with(plugin: str) -> dict[str, Any]:
    return {
        "backends": {"good": {"plugin": "echo"}, "bad": {"plugin": plugin}},
        "routes": {
            "good": {"targets": [{"backend": "good"}]},
            "bad": {"targets": [{"backend": "good"}], "fallback": ["bad"]},
            "worse": {"targets": [{"backend": "bad"}]},
        },
        "gateway": {"route": "good"},
    }


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize("plugin", UNUSABLE)
def test_route_without_the_unusable_backend_works(plugin: str) -> None:
    gateway = LLMGateway.from_values(values_with(plugin))
    try:
        gateway.load(route="good")
        assert gateway.ask("hi").text == "hi"
    finally:
        gateway.close()


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize("route", ["bad", "worse", None])
@pytest.mark.parametrize("plugin", UNUSABLE)
def test_route_with_the_unusable_backend_can_not_be_loaded(plugin: str, route: str | None) -> None:
    gateway = LLMGateway.from_values(values_with(plugin))
    try:
        with pytest.raises(UNUSABLE[plugin], match=r"^backends\.bad\.plugin: ") as caught:
            gateway.load(route=route)
        assert type(caught.value) is UNUSABLE[plugin]
        health = gateway.health()
        assert not health
        assert health.backends["bad"].detail.startswith(f"load_error: {caught.value.kind}: ")
    finally:
        gateway.close()


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize("plugin", UNUSABLE)
def test_call_of_the_unusable_backend_tells_the_reason(plugin: str) -> None:
    gateway = LLMGateway.from_values(values_with(plugin))
    try:
        with pytest.raises(UNUSABLE[plugin], match=r"^backends\.bad\.plugin: "):
            gateway.ask("hi", route="worse")
        (row,) = gateway.usage()
        assert (row.backend, row.calls, row.ok) == ("bad", 1, 0)
    finally:
        gateway.close()


def test_wrong_settings_of_any_route_are_told_when_the_gateway_is_made() -> None:
    values = values_with("echo")
    values["backends"]["bad"]["settings"] = {"delay_ms": -1}
    with pytest.raises(ValuesError, match=r"backends\.bad\.settings\.delay_ms"):
        LLMGateway.from_values(values)


@pytest.mark.usefixtures("plugins")
def test_command_asks_the_route_that_works_and_tells_health_of_all(tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text(
        "gateway: {route: bad}\n"
        "backends: {good: {plugin: echo}, bad: {plugin: absent}}\n"
        "routes:\n"
        "  good: {targets: [{backend: good}]}\n"
        "  bad: {targets: [{backend: good}], fallback: [bad]}\n"
    )
    runner = CliRunner()
    good = runner.invoke(main, ["ask", "-r", "good", "hi"])
    assert (good.exit_code, good.stdout) == (0, "hi\n")
    bad = runner.invoke(main, ["ask", "hi"])
    assert (bad.exit_code, bad.stdout) == (3, "")
    assert "values.yaml:2: " not in bad.stderr
    assert "no installed distribution offers a backend 'absent'" in bad.stderr
    health = runner.invoke(main, ["health"])
    assert [line.split()[:2] for line in health.stdout.splitlines()] == [
        ["BACKEND", "HEALTH"],
        ["good", "healthy"],
        ["bad", "UNHEALTHY"],
    ]
    assert health.stderr.count("no installed distribution") == 1


# -- what the log tells -------------------------------------------------------------------------


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage().partition(": ")[2]
        for record in caplog.records
        if record.levelno >= logging.WARNING
    ]


def test_backend_that_stays_down_is_warned_of_once(
    site: ScriptedSite, caplog: pytest.LogCaptureFixture
) -> None:
    is_up = False

    def answer(prompt: Any) -> Iterator[Any]:
        yield "up" if is_up else BackendUnavailableError("refused")

    caplog.set_level("INFO")
    gateway = site.gateway(Script("first", answer), Script("second"))
    for _ in range(5):
        gateway.ask("hi")
    told = ["backend first could not take it: backend_unavailable"]
    assert warnings_of(caplog) == told
    assert caplog.text.count("backend first could not take it") == 5
    is_up = True
    assert gateway.ask("hi").text == "up"
    assert "backend first answers calls again" in caplog.text
    is_up = False
    gateway.ask("hi")
    assert warnings_of(caplog) == told * 2


def test_fallback_that_is_not_allowed_is_warned_of_once(
    site: ScriptedSite, caplog: pytest.LogCaptureFixture
) -> None:
    down = Script("down", lambda prompt: iter([BackendUnavailableError("refused")]))
    gateway = site.gateway(down, Script("cloud", on_premises=False), load=False)
    for _ in range(3):
        with pytest.raises(BackendUnavailableError):
            gateway.ask("hi")
    _, refused = warnings_of(caplog)
    assert refused.startswith("backend cloud is no failover for it: route 'r' may not use")
