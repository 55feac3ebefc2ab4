"""What each failure becomes, and whether trying again is safe."""

from __future__ import annotations

import socket
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from faulty_upstream import FaultyUpstream, Reply, error, head, json_reply

from iaop_cloud_api import CloudApiBackend, _errors
from iaop_core.errors import (
    BackendProtocolError,
    BackendTimeoutError,
    BackendUnavailableError,
    ContextLengthExceededError,
    CredentialsRefusedError,
    IaopError,
    InvalidRequestError,
    ModelLoadError,
    RateLimitedError,
)

STATUSES: list[tuple[int, dict[str, Any], type[IaopError], bool]] = [
    (400, {"code": "invalid_value"}, InvalidRequestError, False),
    (400, {"code": "context_length_exceeded"}, ContextLengthExceededError, False),
    (401, {"code": "invalid_api_key"}, CredentialsRefusedError, True),
    (402, {}, CredentialsRefusedError, True),
    (403, {}, CredentialsRefusedError, True),
    (404, {"code": "model_not_found"}, ModelLoadError, True),
    (407, {}, CredentialsRefusedError, True),
    (408, {}, BackendTimeoutError, False),
    (409, {}, InvalidRequestError, False),
    (413, {}, InvalidRequestError, False),
    (422, {}, InvalidRequestError, False),
    (429, {}, RateLimitedError, True),
    (429, {"code": "insufficient_quota"}, CredentialsRefusedError, True),
    (500, {}, BackendUnavailableError, True),
    (502, {}, BackendUnavailableError, False),
    (503, {}, BackendUnavailableError, True),
    (504, {}, BackendTimeoutError, False),
    (529, {}, BackendUnavailableError, True),
    (301, {}, BackendProtocolError, False),
    (204, {}, BackendProtocolError, False),
]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("status", "words", "kind", "may_fail_over"), STATUSES)
def test_status_becomes_its_error(
    upstream: FaultyUpstream,
    backend: CloudApiBackend,
    status: int,
    words: dict[str, Any],
    kind: type[IaopError],
    may_fail_over: bool,
    streamed: bool,
) -> None:
    upstream.answer(json_reply(error("text", **words), status))
    with pytest.raises(kind) as caught:
        list(backend.stream("Hi")) if streamed else backend.infer("Hi")
    assert type(caught.value) is kind
    assert caught.value.backend == "cloud-api"
    assert caught.value.may_fail_over is may_fail_over
    assert len(upstream.posts) == 1, "the backend itself never tries again"
    for word in words.values():
        assert word in str(caught.value) or kind is ContextLengthExceededError


@pytest.mark.parametrize("body", [b"", b"<html>bad gateway</html>", b"\xff", b"[]", b"[" * 70_000])
def test_status_counts_whatever_the_body_is(
    upstream: FaultyUpstream, backend: CloudApiBackend, body: bytes
) -> None:
    upstream.answer(json_reply(body, 503))
    with pytest.raises(BackendUnavailableError, match="503"):
        backend.infer("Hi")


def test_status_counts_when_its_body_is_cut(
    upstream: FaultyUpstream, backend: CloudApiBackend
) -> None:
    upstream.answer(Reply([head(401, length=100) + b'{"error'], keep_open=False))
    with pytest.raises(CredentialsRefusedError):
        backend.infer("Hi")


CONTEXT_ERRORS: dict[str, tuple[dict[str, Any], str, tuple[int | None, int]]] = {
    "llama.cpp": (
        {"code": 400, "type": "exceed_context_size_error", "n_prompt_tokens": 9031, "n_ctx": 2048},
        "request (9031 tokens) exceeds the available context size (2048 tokens)",
        (9031, 2048),
    ),
    "OpenAI": (
        {"code": "context_length_exceeded"},
        "This model's maximum context length is 4097 tokens. However, your messages are longer.",
        (None, 4097),
    ),
    "vLLM": (
        {"type": "BadRequestError", "code": 400},
        (
            "maximum context length is 4096 tokens. However, you requested 5100 tokens "
            "(5000 in the messages, 100 in the completion)."
        ),
        (5000, 4096),
    ),
    "vLLM, newer": (
        {"type": "BadRequestError", "code": 400},
        (
            "'max_tokens' is too large: 5000. This model's maximum context length is 4096 tokens "
            "and your request has 30 input tokens (5000 > 4096 - 30)."
        ),
        (30, 4096),
    ),
}


@pytest.mark.parametrize("name", CONTEXT_ERRORS)
def test_context_overflow_tells_the_numbers(
    upstream: FaultyUpstream, backend: CloudApiBackend, name: str
) -> None:
    words, message, numbers = CONTEXT_ERRORS[name]
    upstream.answer(json_reply(error(message, **words), 400))
    with pytest.raises(ContextLengthExceededError) as caught:
        backend.infer("Hi")
    assert (caught.value.prompt_tokens, caught.value.context_tokens) == numbers
    assert all(str(number) in str(caught.value) for number in numbers if number)


@pytest.mark.parametrize(
    ("message", "setting"),
    [
        ("Unrecognized request argument supplied: stream_options", "stream_usage"),
        (
            "Unsupported parameter: 'max_tokens' with this model.",
            "max_tokens_field",
        ),
    ],
)
def test_refused_field_names_the_setting_that_helps(
    upstream: FaultyUpstream, backend: CloudApiBackend, message: str, setting: str
) -> None:
    upstream.answer(json_reply(error(message), 400))
    with pytest.raises(InvalidRequestError, match=setting):
        list(backend.stream("Hi"))


# -- how long to wait ----------------------------------------------------------------------------

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("2", 2),
        (" 2 ", 2),
        ("0", 0),
        ("1.5", 1.5),
        ("-1", None),
        ("86400", _errors.MAX_RETRY_AFTER_S),
        ("9" * 400, None),
        ("nan", None),
        ("inf", None),
        ("", None),
        ("soon", None),
        ("Thu, 01 Jan 2026 00:00:30 GMT", 30),
        ("Thu, 01 Jan 2026 00:00:30 -0000", 30),
        ("Thu, 01 Jan 2026 01:00:30 +0100", 30),
        ("Wed, 31 Dec 2025 23:59:59 GMT", None),
        ("Fri, 01 Jan 2027 00:00:00 GMT", _errors.MAX_RETRY_AFTER_S),
        ("Thu, 99 Jan 2026 00:00:30 GMT", None),
        ("Thu, 01 Jan 99999999999 00:00:30 GMT", None),
        ("Thu, 01 Jan 2026 00:00:30 +9999999999", None),
    ],
)
def test_retry_after_is_read_or_ignored(header: str | None, seconds: float | None) -> None:
    assert _errors.retry_after_s(header, now=NOW) == seconds


def test_rate_limit_carries_the_time_to_wait(
    upstream: FaultyUpstream, backend: CloudApiBackend
) -> None:
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    for header, least, most in (("7", 7, 7), (date, 25, 30)):
        upstream.answer(json_reply(error(), 429, Retry_After=header))
        with pytest.raises(RateLimitedError) as caught:
            backend.infer("Hi")
        assert caught.value.retry_after_s is not None
        assert least <= caught.value.retry_after_s <= most


# -- no connection -------------------------------------------------------------------------------


def unused_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("address", "phase"),
    [("http://127.0.0.1:{port}/v1", "refused"), ("http://no-such-host.invalid/v1", "resolved")],
)
def test_endpoint_that_cannot_be_reached_is_safe_to_try_again(
    make: Any, address: str, phase: str, streamed: bool
) -> None:
    backend = make(base_url=address.format(port=unused_port()))
    with pytest.raises(BackendUnavailableError) as caught:
        list(backend.stream("Hi")) if streamed else backend.infer("Hi")
    assert not caught.value.may_have_run
    assert "nothing was sent" in str(caught.value)
    assert phase in str(caught.value).lower()


def test_connecting_has_a_limit_of_its_own(make: Any) -> None:
    # A listener whose backlog is full takes no more connections, and refuses none.
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(address)
        try:
            backend = make(base_url=f"http://127.0.0.1:{address[1]}", connect_timeout_ms=300)
            with pytest.raises(BackendUnavailableError, match="connect_timeout_ms=300") as caught:
                backend.infer("Hi")
            assert not caught.value.may_have_run
        finally:
            for filler in fillers:
                filler.close()


def test_redirect_is_refused_and_not_followed(upstream: FaultyUpstream, make: Any) -> None:
    for status in (301, 302, 303, 307, 308):
        upstream.answer(json_reply(b"", status, Location=f"{upstream.origin}/other-place?q=sk-1"))
        with pytest.raises(BackendProtocolError, match="redirect") as caught:
            make().infer("Hi")
        assert "other-place" not in str(caught.value)
    assert {call.path for call in upstream.calls} == {"/v1/chat/completions"}
