"""No key, prompt, reply or upstream text gets out by an error, a log, a repr or a health check."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
from faulty_upstream import (
    CUT,
    DONE,
    RESET,
    SILENCE,
    FaultyUpstream,
    Reply,
    chunk,
    completion,
    error,
    event,
    events,
    json_reply,
)

from iaop_cloud_api import CloudApiBackend, CloudApiSettings
from iaop_core import Secret
from iaop_core.errors import IaopError, ValuesError

KEY = "sk-SECRETKEY"
PROMPT = "SECRETPROMPT"
REPLY = "SECRETREPLY"
ECHO = error(f"{KEY} {PROMPT}", code=KEY, type=f"{KEY} x", param=KEY)


def everything_in(problem: BaseException) -> Iterator[str]:
    """What any logger could show of an error: itself, and what it came from."""
    seen: list[BaseException] = []
    todo: list[BaseException | None] = [problem]
    while todo:
        link = todo.pop()
        if link is None or any(link is old for old in seen):
            continue
        seen.append(link)
        todo += [link.__cause__, link.__context__]
        yield from (str(link), repr(link), repr(vars(link)), repr(link.args))
        yield from traceback.format_exception(link)


FAILURES: dict[str, Reply] = {
    "echo 400": json_reply(ECHO, 400),
    "echo 401": json_reply(ECHO, 401, WWW_Authenticate=KEY),
    "echo 403": json_reply(ECHO, 403),
    "echo 404": json_reply(ECHO, 404),
    "echo 429": json_reply(ECHO, 429, Retry_After=KEY),
    "echo 500": json_reply(ECHO, 500),
    "echo 302": json_reply(ECHO, 302, Location=f"http://127.0.0.1/{KEY}"),
    "bare 400": json_reply({"code": KEY, "message": KEY}, 400),
    "echo in a 200": json_reply(ECHO),
    "echo in a stream": events(chunk(REPLY), event(ECHO), DONE),
    "echo as no JSON": events(f"data: {KEY}{PROMPT}\n\n".encode()),
    "echo as no HTTP": Reply([f"{KEY}\r\n\r\n".encode()]),
    "echo as a header": Reply([f"HTTP/1.1 200 OK\r\n{KEY} {PROMPT}\r\n\r\n".encode()]),
    "echo as a finish reason": json_reply(completion(REPLY, finish=KEY)),
    "no end": events(chunk(REPLY)),
    "cut": Reply([CUT]),
    "reset": events(chunk(REPLY), 0.05, RESET),
    "silence": events(chunk(REPLY), SILENCE),
}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("name", FAILURES)
def test_failure_shows_no_secret(
    upstream: FaultyUpstream,
    make: Any,
    caplog: pytest.LogCaptureFixture,
    name: str,
    streamed: bool,
) -> None:
    caplog.set_level(logging.DEBUG)
    upstream.answer(FAILURES[name])
    upstream.answer(FAILURES[name], path="/v1/models")
    backend = make(
        api_key=Secret(KEY, literal=True),
        headers={"X-More": Secret(KEY, literal=True)},
        timeout_ms=500,
        idle_timeout_ms=300,
    )
    with pytest.raises(IaopError) as caught:
        list(backend.stream(PROMPT)) if streamed else backend.infer(PROMPT)
    assert upstream.posts[0].headers["authorization"] == f"Bearer {KEY}"
    health = backend.health_check()
    shown = [
        *everything_in(caught.value),
        caplog.text,
        *(repr(vars(record)) for record in caplog.records),
        health.detail,
        repr(backend),
        str(backend),
        repr(backend._settings),
    ]
    assert not [text for text in shown if "SECRET" in text]


def test_unreachable_endpoint_shows_no_secret(make: Any) -> None:
    backend = make(base_url="http://127.0.0.1:9/v1", api_key=Secret(KEY, literal=True))
    with pytest.raises(IaopError) as caught:
        backend.infer(PROMPT)
    assert not [text for text in everything_in(caught.value) if "SECRET" in text]


@pytest.mark.parametrize(
    "content", ["sk-SECRÉT", "sk-SECRET sk-2 ", "\ufeffsk-SECRET", "sk-SECRET\nsk-2", ""]
)
def test_key_that_cannot_be_sent_fails_the_load_without_showing_it(
    tmp_path: Any, content: str
) -> None:
    file = tmp_path / "key"
    file.write_text(content, encoding="utf-8")
    backend = CloudApiBackend(
        base_url="http://127.0.0.1:9/v1", model="m", api_key=f"${{file:{file}}}"
    )
    with pytest.raises(ValuesError) as caught:
        backend.load_model()
    assert not [text for text in everything_in(caught.value) if "SECR" in text]


def test_key_that_is_missing_fails_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    backend = CloudApiBackend(
        base_url="http://127.0.0.1:9/v1", model="m", api_key="${env:NO_SUCH_KEY}"
    )
    with pytest.raises(ValuesError, match="NO_SUCH_KEY"):
        backend.load_model()


@pytest.mark.parametrize(
    "fields",
    [
        {"api_key": KEY},
        {"base_url": f"https://user:{KEY}@api.example.com/v1"},
        {"base_url": f"https://api.example.com/v1?key={KEY}"},
        {"proxy": f"http://user:{KEY}@proxy.example.com"},
        {"headers": {"X-Key": f"{KEY}\nX-Other: 1"}},
        {"headers": {f"{KEY}: x": "1"}},
        {"organization": f"{KEY}\r\n"},
    ],
    ids=str,
)
def test_secret_in_the_wrong_place_is_refused_without_showing_it(fields: dict[str, Any]) -> None:
    with pytest.raises(ValuesError) as caught:
        CloudApiSettings(**{"base_url": "https://api.example.com/v1", **fields})
    assert not [text for text in everything_in(caught.value) if "SECRET" in str(text).split("File")]


def test_header_values_are_in_no_repr() -> None:
    settings = CloudApiSettings(base_url="https://api.example.com/v1", headers={"X-Key": KEY})
    assert "X-Key" in repr(settings)
    assert KEY not in repr(settings)
