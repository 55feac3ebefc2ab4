"""Failing over by the kind of error, and never off the site unasked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from iaop_core import LLMGateway
from iaop_core.echo import EchoBackend
from iaop_core.errors import (
    BackendUnavailableError,
    CapabilityNotSupportedError,
    IaopError,
    InvalidRequestError,
    RateLimitedError,
    StreamInterruptedError,
)
from iaop_core.messages import InferChunk


class Failing(EchoBackend):
    """echo that fails, after `deltas` of text, and counts its calls in a shared list."""

    def __init__(self, label: str, calls: list[str], error: IaopError | None, deltas: int = 0):
        super().__init__()
        self._label, self._calls, self._error, self._deltas = label, calls, error, deltas

    def stream(self, prompt: Any, context: Any = None, *, params: Any = None) -> Any:
        self._calls.append(self._label)
        if self._error is None:
            yield from super().stream(prompt, context, params=params)
            return
        for _ in range(self._deltas):
            yield InferChunk("x ")
        raise self._error


class OffSite(Failing):
    @property
    def capabilities(self) -> Any:
        return evolve(super().capabilities, on_premises=False)


Make = Callable[..., LLMGateway]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def build(a: EchoBackend, b: EchoBackend, *, retries: int = 0, **require: Any) -> LLMGateway:
        route = {"targets": [{"backend": "a"}], "fallback": ["b"], "require": require}
        gateway = LLMGateway.from_values(
            {
                "gateway": {"retries": retries},
                "backends": {"a": {"plugin": "echo"}, "b": {"plugin": "echo"}},
                "routes": {"r": route},
                "audit": {"url": f"sqlite:///{tmp_path / 'audit.db'}"},
            }
        )
        gateway._site.backends["a"]._instance = a
        gateway._site.backends["b"]._instance = b
        return gateway

    return build


def test_failure_before_any_work_goes_to_the_fallback(make: Make) -> None:
    calls: list[str] = []
    gateway = make(
        Failing("a", calls, BackendUnavailableError("refused")), Failing("b", calls, None)
    )
    assert gateway.ask("hello").text == "hello"
    assert calls == ["a", "b"]
    gateway.close()


def test_retries_go_round_and_not_to_one_backend_alone(make: Make) -> None:
    calls: list[str] = []
    down = BackendUnavailableError("refused")
    gateway = make(Failing("a", calls, down), Failing("b", calls, RateLimitedError()), retries=1)
    with pytest.raises(BackendUnavailableError):
        gateway.ask("hello")
    assert calls == ["a", "b", "a", "b"]
    gateway.close()


@pytest.mark.parametrize(
    "error",
    [BackendUnavailableError(may_have_run=True), InvalidRequestError(), StreamInterruptedError()],
)
def test_failure_that_may_bill_twice_or_is_the_callers_stays(make: Make, error: IaopError) -> None:
    calls: list[str] = []
    gateway = make(Failing("a", calls, error), Failing("b", calls, None), retries=2)
    with pytest.raises(type(error)):
        gateway.ask("hello")
    assert calls == ["a"]
    gateway.close()


def test_nothing_is_tried_again_after_the_first_delta(make: Make) -> None:
    calls: list[str] = []
    failing = Failing("a", calls, BackendUnavailableError("cut"), deltas=2)
    gateway = make(failing, Failing("b", calls, None), retries=2)
    chunks = gateway.stream("hello")
    assert [next(chunks).delta, next(chunks).delta] == ["x ", "x "]
    with pytest.raises(BackendUnavailableError):
        next(chunks)
    assert calls == ["a"]
    gateway.close()


def test_fallback_off_site_is_not_used_unasked(make: Make) -> None:
    calls: list[str] = []
    down = BackendUnavailableError("refused")
    gateway = make(Failing("a", calls, down), OffSite("b", calls, None))
    with pytest.raises(BackendUnavailableError):
        gateway.ask("hello")
    assert calls == ["a"]
    gateway.close()
    allowed = make(Failing("a", calls, down), OffSite("b", calls, None), on_premises=False)
    assert allowed.ask("hello").text == "hello"
    allowed.close()


def test_target_off_site_is_refused_where_the_route_stays_on_site(make: Make) -> None:
    calls: list[str] = []
    gateway = make(OffSite("a", calls, None), Failing("b", calls, None), on_premises=True)
    with pytest.raises(CapabilityNotSupportedError):
        gateway.ask("hello")
    assert calls == []
    gateway.close()
