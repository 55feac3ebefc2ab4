"""What the endpoint or the way to it answers → core's errors.

::

    no connection: name, TCP, TLS, proxy      BackendUnavailableError, nothing was sent
    connection lost after the request went    BackendUnavailableError, may_have_run
      the same within a stream                StreamInterruptedError
    a time limit of the settings              BackendTimeoutError; for connecting: unavailable
    400, 409, 413, 422, other 4xx             InvalidRequestError
      the same for too many tokens            ContextLengthExceededError
    401, 402, 403, 407, quota used up         CredentialsRefusedError
    404                                       ModelLoadError: nothing was begun, so it fails over
    408, 504                                  BackendTimeoutError
    429                                       RateLimitedError
    500, 503, 529                             BackendUnavailableError: the endpoint says it failed
    other 5xx                                 BackendUnavailableError, may_have_run: a proxy spoke
    3xx, and what is no chat completion       BackendProtocolError

Bodies may echo a key or a prompt. Of theirs a message shows only the words of `code` and `type`.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp

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
    StreamInterruptedError,
)

__all__ = [
    "MAX_RETRY_AFTER_S",
    "from_client_error",
    "from_error_object",
    "from_status",
    "retry_after_s",
    "safe_word",
    "shown_words",
]

MAX_RETRY_AFTER_S = 3600.0
"""The most that a header is taken at its word for: it must not park a backend for days."""

# Letters and underscores alone: a key or a piece of text does not look like this.
_WORD = re.compile(r"[A-Za-z][A-Za-z_]{1,47}")
_TOO_LONG_WORDS = {"context_length_exceeded", "exceed_context_size_error"}
_NO_MONEY_WORDS = {"insufficient_quota", "billing_hard_limit_reached", "insufficient_balance"}
# How the common servers put it; only the numbers are taken over.
_CONTEXT_TOKENS = re.compile(r"(?:maximum context length is|context size \()\s*(\d{1,9})")
_PROMPT_TOKENS = re.compile(r"(\d{1,9})(?: tokens)? in the messages|has (\d{1,9}) input tokens")

_STATED_FAILURES = {500, 503, 529}


def from_client_error(
    error: Exception,
    *,
    backend: str,
    origin: str,
    timeout_ms: float,
    connect_timeout_ms: float,
    in_stream: bool,
) -> IaopError:
    """The core error for an exception of aiohttp's, or for a time limit that ran out."""
    who = f"backend {backend!r}: {origin}"
    if (phase := _connect_phase(error)) is not None:
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            phase = f"no connection within connect_timeout_ms={connect_timeout_ms:g}"
        return BackendUnavailableError(
            f"{who} can't be reached: {phase}; nothing was sent", backend=backend
        )
    if isinstance(error, TimeoutError):
        return BackendTimeoutError(
            f"{who} sent nothing for {timeout_ms:g} ms; the work may have been begun",
            backend=backend,
            timeout_ms=timeout_ms,
        )
    if in_stream:
        return StreamInterruptedError(
            f"{who} broke its stream off ({type(error).__name__}); the text so far is no answer",
            backend=backend,
        )
    if isinstance(error, aiohttp.ClientResponseError | aiohttp.InvalidURL):
        return BackendProtocolError(
            f"{who} answered what is no HTTP ({type(error).__name__})", backend=backend
        )
    return BackendUnavailableError(
        f"{who} closed the connection before it answered ({type(error).__name__}); it may have "
        "begun the work",
        backend=backend,
        may_have_run=True,
    )


def _connect_phase(error: Exception) -> str | None:
    """What of connecting failed, the most specific first; None when the request was sent."""
    match error:
        case aiohttp.ClientHttpProxyError():
            return f"the proxy refuses to connect it (status {error.status}; see the setting proxy)"
        case aiohttp.ClientProxyConnectionError():
            return "the proxy of the setting proxy does not answer"
        case aiohttp.ClientConnectorDNSError():
            return "its name can't be resolved"
        case aiohttp.ClientConnectorCertificateError():
            code = getattr(error.certificate_error, "verify_code", 0)
            return f"TLS: its certificate is not trusted: {_CERTIFICATE_REASONS.get(code, 'other')}"
        case aiohttp.ClientSSLError():
            return "TLS: the handshake failed"
        case aiohttp.ClientConnectorError():
            number = error.os_error.errno  # asyncio's own text has no reason
            reason = os.strerror(number) if number else type(error.os_error).__name__
            return f"the connection failed ({reason})"
        case aiohttp.ConnectionTimeoutError():
            return "time-out"
    return None


# OpenSSL's verify codes that an operator can act on.
_CERTIFICATE_REASONS = {
    10: "expired",
    18: "self-signed; name its CA in the setting ca_file",
    19: "unknown CA; name it in the setting ca_file",
    20: "unknown CA; name it in the setting ca_file",
    62: "issued for another host name",
    64: "issued for another address",
}


def from_status(
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    *,
    backend: str,
    origin: str,
    model: str,
) -> IaopError:
    """The core error for an answer whose status is not 200."""
    error = _error_object(body)
    told = from_error_object(error, backend=backend)
    if told is not None:
        return told
    who = f"backend {backend!r}: {origin} answered {status}{shown_words(error)}"
    match status:
        case 407:
            return CredentialsRefusedError(
                f"{who}: the proxy refuses its credentials; check the setting proxy",
                backend=backend,
            )
        case 401 | 402 | 403:
            return CredentialsRefusedError(
                f"{who}: it refuses the site's credentials or account; check the setting api_key "
                "and the account at the provider",
                backend=backend,
            )
        case 404:
            return ModelLoadError(
                f"{who}: it knows no model {model!r}, or no chat completions at this address; "
                "check model and base_url",
                backend=backend,
                model=model,
            )
        case 408 | 504:
            return BackendTimeoutError(f"{who}: the endpoint ran out of time", backend=backend)
        case 429:
            return RateLimitedError(
                f"{who}: the endpoint asks to be called less often",
                backend=backend,
                retry_after_s=retry_after_s(headers.get("Retry-After")),
            )
        case _ if 300 <= status < 400:
            return BackendProtocolError(
                f"{who}: redirects are refused, for they could carry the prompt elsewhere; set "
                "base_url to the final address",
                backend=backend,
            )
        case _ if status >= 500:
            return BackendUnavailableError(
                f"{who}: the endpoint failed",
                backend=backend,
                may_have_run=status not in _STATED_FAILURES,
            )
        case 413:
            what = "the request is too large for it"
        case _ if status < 300:
            return BackendProtocolError(f"{who}, which is no chat completion", backend=backend)
        case _:
            what = _refused_hint(error)
    return InvalidRequestError(
        f"{who}: {what}", backend=backend, param=safe_word(_get(error, "param"))
    )


def _refused_hint(error: object) -> str:
    text = f"{_get(error, 'param')} {_get(error, 'message')}"
    if "stream_options" in text:
        return "it does not take stream_options; set stream_usage to false"
    if "max_completion_tokens" in text or "max_tokens" in text:
        return (
            "it does not take the limit of the answer as sent; check the setting max_tokens_field"
        )
    return "it refuses the request as sent"


def from_error_object(error: object, *, backend: str) -> IaopError | None:
    """The core error for an error object that says itself what it is; None for any other.

    A stream's error object comes after the status 200, so its words are all that there is.
    """
    words = {_get(error, "code"), _get(error, "type")}
    message = _get(error, "message")
    message = message if isinstance(message, str) else ""
    context = _CONTEXT_TOKENS.search(message)
    if words & _TOO_LONG_WORDS or context:
        prompt = _PROMPT_TOKENS.search(message)
        context_tokens = _number(_get(error, "n_ctx")) or _number(context and context[1])
        prompt_tokens = _number(_get(error, "n_prompt_tokens")) or _number(
            prompt and (prompt[1] or prompt[2])
        )
        numbers = "".join(
            f", {name} {number} tokens"
            for name, number in (("the prompt has", prompt_tokens), ("at most", context_tokens))
            if number
        )
        return ContextLengthExceededError(
            f"backend {backend!r}: the prompt with the answer asked for is longer than the model's "
            f"context{numbers}; shorten it, or ask for fewer max_tokens",
            backend=backend,
            param="messages",
            prompt_tokens=prompt_tokens,
            context_tokens=context_tokens,
        )
    if words & _NO_MONEY_WORDS:
        return CredentialsRefusedError(
            f"backend {backend!r}: the account's quota or balance at the provider is used up"
            f"{shown_words(error)}; waiting does not help",
            backend=backend,
        )
    return None


def retry_after_s(header: str | None, *, now: datetime | None = None) -> float | None:
    """Seconds to wait that a `Retry-After` header asks for: a number, or a date (RFC 9110, 10.2.3).

    None for a header that is absent, past or nothing of both; never more than `MAX_RETRY_AFTER_S`.
    """
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            date = parsedate_to_datetime(header)
        except (ValueError, OverflowError):
            return None
        if date.tzinfo is None:  # "-0000": the RFC's dates are all GMT
            date = date.replace(tzinfo=UTC)
        seconds = (date - (now or datetime.now(UTC))).total_seconds()
    if not math.isfinite(seconds) or seconds < 0:
        return None
    return min(seconds, MAX_RETRY_AFTER_S)


def safe_word(value: object) -> str:
    """The value when it is a plain word, fit to be shown; else `""`."""
    return value if isinstance(value, str) and _WORD.fullmatch(value) else ""


def shown_words(error: object) -> str:
    """The plain words of an error object's `code` and `type`, for a message; may be empty."""
    words = [safe_word(_get(error, key)) for key in ("code", "type")]
    shown = ", ".join(dict.fromkeys(word for word in words if word))
    return f" ({shown})" if shown else ""


def _error_object(body: bytes) -> object:
    try:
        reply = json.loads(body)
    except (ValueError, RecursionError):
        return None
    # Most wrap it in "error"; some servers answer it bare.
    return reply.get("error", reply) if isinstance(reply, dict) else None


def _get(error: object, key: str) -> Any:
    value = error.get(key) if isinstance(error, dict) else None
    return value if isinstance(value, str | int) else None


def _number(value: object) -> int | None:
    if isinstance(value, str):
        return int(value)
    return value if type(value) is int and value > 0 else None
