"""Answers that are not streamed, and what a request says."""

from __future__ import annotations

from typing import Any

import pytest
from faulty_upstream import (
    CUT,
    RESET,
    SILENCE,
    FaultyUpstream,
    Reply,
    completion,
    error,
    head,
    json_reply,
    usage,
)

from iaop_cloud_api import CloudApiBackend
from iaop_core import TokenLogprob
from iaop_core.errors import (
    BackendProtocolError,
    BackendTimeoutError,
    BackendUnavailableError,
    CapabilityNotSupportedError,
    InvalidRequestError,
)

OK = json_reply(completion("Hello", usage=usage(3, 2)))


# -- answers -------------------------------------------------------------------------------------


def test_answer_is_read_whole(upstream: FaultyUpstream, backend: CloudApiBackend) -> None:
    upstream.answer(json_reply(completion("你好\u2028", finish="length", usage=usage(3, 2))))
    result = backend.infer("Hi")
    assert (result.text, result.finish_reason) == ("你好\u2028", "length")
    assert (result.prompt_tokens, result.completion_tokens) == (3, 2)
    assert (result.model_id, result.backend_name) == ("m", "cloud-api")
    assert not result.usage_estimated
    assert not result.offline
    assert result.device == ""


@pytest.mark.parametrize(
    ("counts", "estimated"), [(usage(0, 0), False), (None, True), ({"prompt_tokens": 0}, True)]
)
def test_answer_keeps_zero_usage_and_marks_estimates(
    upstream: FaultyUpstream, backend: CloudApiBackend, counts: object, estimated: bool
) -> None:
    upstream.answer(json_reply(completion("abcdefgh", usage=counts)))
    result = backend.infer("Hi")
    assert result.completion_tokens == (2 if estimated else 0)
    assert result.usage_estimated is estimated


def test_answer_without_text_is_empty(upstream: FaultyUpstream, backend: CloudApiBackend) -> None:
    upstream.answer(json_reply(completion(None, finish="length")))
    assert backend.infer("Hi").text == ""


@pytest.mark.parametrize(
    "body",
    [
        error("x", code="boom"),
        {"error": "text"},
        {"error": {"message": "x"}, **completion("Hello")},
        {},
        {"choices": []},
        {"choices": None},
        {"choices": [{}]},
        {"choices": [{"message": None, "finish_reason": "stop"}]},
        completion("Hello", finish=None),
        completion("Hello", finish="tool_calls"),
        completion(["Hello"]),
        completion({"a": 1}),
        [],
        b"",
        b"<html>",
        b"\xff\xfe",
        b"[" * 100_000,
    ],
    ids=lambda body: str(body)[:40],
)
def test_body_that_is_no_answer_is_a_protocol_error(
    upstream: FaultyUpstream, backend: CloudApiBackend, body: object
) -> None:
    upstream.answer(json_reply(body))
    with pytest.raises(BackendProtocolError):
        backend.infer("Hi")
    assert len(upstream.posts) == 1


LOST: dict[str, Reply] = {
    "cut before a byte": Reply([CUT]),
    "reset before a byte": Reply([RESET]),
    "cut within the head": Reply([b"HTTP/1.1 200 OK\r\nContent-", CUT]),
    "cut within the body": Reply([head(length=500) + b'{"choices"', CUT]),
}


@pytest.mark.parametrize("name", LOST)
def test_connection_lost_after_sending_may_have_run(
    upstream: FaultyUpstream, backend: CloudApiBackend, name: str
) -> None:
    upstream.answer(LOST[name])
    with pytest.raises(BackendUnavailableError) as caught:
        backend.infer("Hi")
    assert caught.value.may_have_run
    assert not caught.value.may_fail_over
    assert len(upstream.posts) == 1


@pytest.mark.parametrize("start", [(), (head(length=9), b"{")])
def test_silence_times_out(upstream: FaultyUpstream, make: Any, start: tuple[bytes, ...]) -> None:
    upstream.answer(Reply([*start, SILENCE]))
    with pytest.raises(BackendTimeoutError) as caught:
        make(timeout_ms=300).infer("Hi")
    assert caught.value.timeout_ms == 300
    assert not caught.value.may_fail_over
    assert upstream.calls[0].left.wait(1)


def test_connection_is_used_again(upstream: FaultyUpstream, backend: CloudApiBackend) -> None:
    upstream.answer(OK)
    for _ in range(3):
        backend.infer("Hi")
    assert {call.connection for call in upstream.calls} == {0}


def test_cookies_are_not_kept(upstream: FaultyUpstream, backend: CloudApiBackend) -> None:
    upstream.answer(json_reply(completion("Hello"), Set_Cookie="a=b; Path=/"))
    backend.infer("Hi")
    backend.infer("Hi")
    assert all("cookie" not in call.headers for call in upstream.calls)


# -- requests ------------------------------------------------------------------------------------


def sent(upstream: FaultyUpstream, backend: CloudApiBackend, **call: Any) -> dict[str, Any]:
    upstream.answer(OK)
    backend.infer(**{"prompt": "Hi", **call})
    return upstream.calls[-1].body


def test_request_has_what_was_asked_and_a_limit(
    upstream: FaultyUpstream, backend: CloudApiBackend
) -> None:
    assert sent(upstream, backend) == {
        "model": "m",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 256,
    }


def test_request_passes_every_standard_parameter_on(
    upstream: FaultyUpstream, backend: CloudApiBackend
) -> None:
    params: dict[str, Any] = {
        "max_tokens": 5,
        "temperature": 0,
        "top_p": 0.5,
        "stop": ["a", "b"],
        "seed": 0,
        "presence_penalty": -1.5,
        "frequency_penalty": 0.5,
        "logit_bias": {7: -100},
        "logprobs": True,
        "top_logprobs": 2,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": {"type": ["string", "null"]}, "strict": True},
        },
    }
    upstream.answer(told([TOLD], content="null"))
    backend.infer("Hi", params=params)
    body = upstream.calls[-1].body
    assert params.keys() == set(backend.capabilities.params)
    assert {name: body[name] for name in params} == {**params, "logit_bias": {"7": -100}}


def test_request_with_one_stop_text_sends_a_list(
    upstream: FaultyUpstream, backend: CloudApiBackend
) -> None:
    assert sent(upstream, backend, params={"stop": "a"})["stop"] == ["a"]


@pytest.mark.parametrize("name", ["top_k", "min_p", "repetition_penalty"])
def test_parameter_that_the_endpoint_is_not_said_to_honour_is_refused(
    upstream: FaultyUpstream, make: Any, name: str
) -> None:
    with pytest.raises(CapabilityNotSupportedError, match=name):
        make().infer("Hi", params={name: 1})
    assert not upstream.calls
    body = sent(upstream, make(params=["max_tokens", name]), params={name: 1})
    assert body[name] == 1


def test_standard_parameter_is_refused_where_the_settings_leave_it_out(
    upstream: FaultyUpstream, make: Any
) -> None:
    with pytest.raises(CapabilityNotSupportedError, match="seed"):
        make(params=["temperature"]).infer("Hi", params={"seed": 1})
    assert sent(upstream, make(params=["temperature"]), params={"max_tokens": 3})["max_tokens"] == 3


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_limit_is_sent_under_the_name_of_the_settings(
    upstream: FaultyUpstream, make: Any, name: str
) -> None:
    backend = make(max_tokens_field=name, max_tokens=9)
    limits = {"max_tokens", "max_completion_tokens"}
    for params, limit in ((None, 9), ({"max_tokens": 4}, 4)):
        body = sent(upstream, backend, params=params)
        assert {key: body[key] for key in limits & body.keys()} == {name: limit}


def test_chat_is_sent_turn_by_turn(upstream: FaultyUpstream, backend: CloudApiBackend) -> None:
    chat = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "你好\u2028"},
    ]
    assert sent(upstream, backend, prompt=chat)["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "你好\u2028"},
    ]


def test_sources_go_with_the_last_user_turn(
    upstream: FaultyUpstream, backend: CloudApiBackend
) -> None:
    (turn,) = sent(upstream, backend, context=["one", "two"])["messages"]
    assert turn["content"] == "Sources:\n[1] one\n[2] two\n\nHi"


def test_half_a_surrogate_pair_is_the_callers_error(
    upstream: FaultyUpstream, backend: CloudApiBackend
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        backend.infer("top secret \ud83d")
    assert caught.value.__context__ is None, "the encoder's error holds the prompt"
    assert not upstream.calls


def test_request_carries_the_headers_of_the_settings(
    upstream: FaultyUpstream, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEAM", "press shop")
    monkeypatch.setenv("KEY", "sk-1\n")
    backend = make(
        api_key="${env:KEY}",
        organization="org-1",
        headers={"X-Team": "${env:TEAM}", "X-Plain": "a b"},
    )
    sent(upstream, backend)
    headers = upstream.calls[-1].headers
    assert headers["authorization"] == "Bearer sk-1"
    assert headers["openai-organization"] == "org-1"
    assert headers["x-team"] == "press shop"
    assert headers["x-plain"] == "a b"
    assert headers["content-type"] == "application/json"


def test_request_without_a_key_has_no_authorization(
    upstream: FaultyUpstream, backend: CloudApiBackend
) -> None:
    sent(upstream, backend)
    assert "authorization" not in upstream.calls[-1].headers


def test_rotated_key_is_used_at_once(upstream: FaultyUpstream, make: Any, tmp_path: Any) -> None:
    file = tmp_path / "key"
    file.write_text("sk-1\n")
    backend = make(api_key=f"${{file:{file}}}")
    sent(upstream, backend)
    file.write_text("sk-2\n")
    sent(upstream, backend)
    keys = [call.headers["authorization"] for call in upstream.calls]
    assert keys == ["Bearer sk-1", "Bearer sk-2"]


# -- log probabilities and forms -----------------------------------------------------------------

TOLD = {
    "token": "Hi",
    "bytes": [72, 105],
    "logprob": -0.25,
    "top_logprobs": [
        {"token": "Ho", "bytes": None, "logprob": -2.5},
        {"token": "Hi", "bytes": [72, 105], "logprob": -0.25},
        {"token": "\ud83d", "logprob": float("-inf"), "id": 7},
    ],
}


def told(entries: Any, *, content: str = "Hi") -> Any:
    message = {"role": "assistant", "content": content}
    choice = {"message": message, "finish_reason": "stop", "logprobs": {"content": entries}}
    return json_reply({"choices": [choice]})


def test_logprobs_are_read_as_the_api_has_them(
    upstream: FaultyUpstream, backend: CloudApiBackend
) -> None:
    upstream.answer(told([TOLD]))
    result = backend.infer("Hi", params={"logprobs": True, "top_logprobs": 3})
    assert result.logprobs == (
        TokenLogprob(
            "Hi",
            b"Hi",
            None,
            -0.25,
            (
                TokenLogprob("Hi", b"Hi", None, -0.25),
                TokenLogprob("Ho", None, None, -2.5),
                TokenLogprob("\ufffd", None, 7, -9999.0),
            ),
        ),
    )


@pytest.mark.parametrize("top", [None, 0, 1])
def test_no_more_alternatives_are_told_than_asked_for(
    upstream: FaultyUpstream, backend: CloudApiBackend, top: int | None
) -> None:
    upstream.answer(told([TOLD]))
    result = backend.infer("Hi", params={"logprobs": True, "top_logprobs": top})
    assert result.logprobs is not None
    assert len(result.logprobs[0].top) == (top or 0)
    assert upstream.calls[-1].body.get("top_logprobs") == (top or None)


def test_logprobs_that_were_not_asked_for_are_not_told(
    upstream: FaultyUpstream, backend: CloudApiBackend
) -> None:
    upstream.answer(told([TOLD]))
    assert backend.infer("Hi").logprobs is None


@pytest.mark.parametrize("entries", [None, []])
def test_endpoint_that_tells_no_logprobs_is_an_error(
    upstream: FaultyUpstream, backend: CloudApiBackend, entries: Any
) -> None:
    upstream.answer(told(entries))
    with pytest.raises(BackendProtocolError, match="told none"):
        backend.infer("Hi", params={"logprobs": True})
    upstream.answer(OK)
    with pytest.raises(BackendProtocolError, match="told none"):
        backend.infer("Hi", params={"logprobs": True})


@pytest.mark.parametrize(
    "entry",
    [
        5,
        "top secret",
        {},
        {"token": "top secret"},
        {"token": 5, "logprob": -1},
        {"token": "a", "logprob": "top secret"},
        {"token": "a", "logprob": None},
        {"token": "a", "logprob": float("nan")},
        {"token": "a", "logprob": -1, "bytes": 10**12},
        {"token": "a", "logprob": -1, "bytes": [999]},
        {"token": "a", "logprob": -1, "top_logprobs": ["top secret"]},
    ],
    ids=str,
)
def test_malformed_logprobs_are_an_error_without_their_text(
    upstream: FaultyUpstream, backend: CloudApiBackend, entry: Any
) -> None:
    upstream.answer(told([entry]))
    with pytest.raises(BackendProtocolError, match="logprobs are not") as caught:
        backend.infer("Hi", params={"logprobs": True, "top_logprobs": 1})
    assert caught.value.__context__ is None
    assert "top secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("form", "text"),
    [("json_object", "Sure: {}"), ("json_object", "[1]"), ("json_schema", "```json\n{}\n```")],
)
def test_answer_that_is_not_the_json_asked_for_is_an_error(
    upstream: FaultyUpstream, backend: CloudApiBackend, form: str, text: str
) -> None:
    wanted: dict[str, Any] = {"type": form}
    if form == "json_schema":
        wanted["json_schema"] = {"name": "a", "schema": {}}
    upstream.answer(told(None, content=text))
    with pytest.raises(BackendProtocolError, match="asked for JSON") as caught:
        backend.infer("Hi", params={"response_format": wanted})
    assert text not in str(caught.value)
    assert caught.value.__context__ is None


def test_json_that_the_limit_cuts_is_an_answer(
    upstream: FaultyUpstream, backend: CloudApiBackend
) -> None:
    choice = {"message": {"content": '{"a": '}, "finish_reason": "length"}
    upstream.answer(json_reply({"choices": [choice]}))
    result = backend.infer("Hi", params={"response_format": {"type": "json_object"}})
    assert (result.text, result.finish_reason) == ('{"a": ', "length")
