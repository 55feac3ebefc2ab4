"""Health: a free question, soon answered, about the model that is loaded."""

from __future__ import annotations

import time
from typing import Any

import pytest
from faulty_upstream import (
    CUT,
    SILENCE,
    FaultyUpstream,
    Reply,
    chunk,
    error,
    events,
    head,
    json_reply,
)

from iaop_cloud_api import CloudApiBackend
from iaop_core import Secret
from iaop_core.errors import CredentialsRefusedError, ModelLoadError

LISTED = json_reply({"object": "list", "data": [{"id": "x"}, {"id": "m"}]})
ALIASED = json_reply({"data": [{"id": "x", "aliases": ["m"]}]})
UNLISTED = json_reply({"data": [{"id": "x"}]})
ABSENT = json_reply(error(), 404)

# Answer, setting model_list, healthy, what the detail says.
ANSWERS: list[tuple[Reply, str, bool, str]] = [
    (LISTED, "required", True, "server_live=True, model_ready=True, loaded=True"),
    (ALIASED, "required", True, "model_ready=True"),
    (UNLISTED, "required", False, "server_live=True, model_ready=False, loaded=True"),
    (UNLISTED, "absent", True, "model_ready=True"),
    (ABSENT, "required", False, "404 and no list; model_list=absent"),
    (ABSENT, "absent", True, "server_live=True, model_ready=True, loaded=True"),
    (json_reply(b"<html>"), "required", False, "200 and no list"),
    (json_reply(b"[" * 100_000), "required", False, "200 and no list"),
    (json_reply({"data": [None]}), "required", False, "200 and no list"),
    (json_reply({"data": [{"id": ["m"]}]}), "required", False, "200 and no list"),
    (json_reply(error(), 401), "absent", False, "credentials are refused with 401"),
    (json_reply(error(), 403), "required", False, "credentials are refused with 403"),
    (json_reply(error(), 429), "required", True, "429"),
    (json_reply(error(), 500), "absent", False, "server_live=False"),
    (json_reply(error(), 302, Location="/"), "required", False, "302"),
    (Reply([CUT]), "absent", False, "probe_error: "),
    (Reply([head(length=100) + b"{"]), "required", False, "probe_error: "),
]


@pytest.mark.parametrize(("answer", "model_list", "healthy", "detail"), ANSWERS)
def test_health_is_what_the_list_of_models_says(
    upstream: FaultyUpstream,
    make: Any,
    answer: Reply,
    model_list: str,
    healthy: bool,
    detail: str,
) -> None:
    upstream.answer(answer, path="/v1/models")
    health = make(model_list=model_list).health_check()
    assert health.healthy is healthy
    assert detail in health.detail


def test_health_costs_nothing_and_shows_the_key(upstream: FaultyUpstream, make: Any) -> None:
    upstream.answer(LISTED, path="/v1/models")
    make(api_key=Secret("sk-1", literal=True)).health_check()
    (call,) = upstream.calls
    assert (call.method, call.path, call.raw_body) == ("GET", "/v1/models", b"")
    assert call.headers["authorization"] == "Bearer sk-1"


def test_health_without_a_model_is_not_good(upstream: FaultyUpstream) -> None:
    upstream.answer(LISTED, path="/v1/models")
    health = CloudApiBackend(base_url=upstream.base_url, model="m").health_check()
    assert not health
    assert health.detail == "server_live=True, model_ready=False, loaded=False"


@pytest.mark.parametrize("start", [(), (head(length=9), b"{")])
def test_health_answers_within_its_limit(
    upstream: FaultyUpstream, backend: CloudApiBackend, start: tuple[bytes, ...]
) -> None:
    upstream.answer(Reply([*start, SILENCE]), path="/v1/models")
    started = time.monotonic()
    health = backend.health_check()
    assert time.monotonic() - started < 2.5
    assert not health
    assert health.detail.startswith("probe_error: ")
    assert upstream.calls[0].left.wait(1)


def test_health_of_an_endpoint_that_is_gone_never_raises(make: Any) -> None:
    health = make(base_url="http://127.0.0.1:9/v1").health_check()
    assert not health
    assert health.detail.startswith("probe_error: ")


def test_health_does_not_wait_for_a_free_slot(upstream: FaultyUpstream, make: Any) -> None:
    upstream.answer(LISTED, path="/v1/models")
    upstream.answer(events(chunk("Hi"), SILENCE))
    backend = make(max_concurrency=1)
    stream = backend.stream("Hi")
    next(stream)
    assert backend.health_check()
    stream.close()


def test_health_reads_the_key_anew(
    upstream: FaultyUpstream, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY", "sk-1")
    backend = make(api_key="${env:KEY}")
    monkeypatch.delenv("KEY")
    assert backend.health_check().detail.startswith("probe_error: ${env:KEY}")


# -- verify_model --------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [UNLISTED, ABSENT, json_reply(b"{}")])
def test_load_fails_when_the_model_must_be_listed_and_is_not(
    upstream: FaultyUpstream, answer: Reply
) -> None:
    upstream.answer(answer, path="/v1/models")
    backend = CloudApiBackend(base_url=upstream.base_url, model="m", verify_model=True)
    with pytest.raises(ModelLoadError, match="'m'"):
        backend.load_model()
    backend.close()


def test_load_says_when_the_credentials_are_refused(upstream: FaultyUpstream) -> None:
    upstream.answer(json_reply(error(), 401), path="/v1/models")
    backend = CloudApiBackend(base_url=upstream.base_url, model="m", verify_model=True)
    with pytest.raises(CredentialsRefusedError):
        backend.load_model()
    backend.close()


def test_load_succeeds_when_the_model_is_listed(upstream: FaultyUpstream, make: Any) -> None:
    upstream.answer(ALIASED, path="/v1/models")
    assert make(verify_model=True).health_check()
