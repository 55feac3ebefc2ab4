"""Settings of `cloud-api`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from attrs import Attribute, field, frozen, validators

from iaop_core import DEFAULT_MAX_TOKENS, BackendCapabilities, Secret
from iaop_core.errors import ValuesError
from iaop_core.messages import PARAM_NAMES

__all__ = ["STANDARD_PARAMS", "CloudApiSettings", "capabilities_of", "sendable"]

STANDARD_PARAMS = (
    "max_tokens",
    "temperature",
    "top_p",
    "stop",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "response_format",
)
"""The generation parameters that the chat-completions API itself has."""

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, 5.6.2
_OWN_HEADERS = {
    "accept",
    "accept-encoding",
    "connection",
    "content-encoding",
    "content-length",
    "content-type",
    "host",
    "transfer-encoding",
}


def _as_secret(value: Secret | str | None) -> Secret | None:
    return Secret(value) if isinstance(value, str) else value


def _as_text_or_secret(value: str | Secret) -> str | Secret:
    return Secret(value) if isinstance(value, str) and "${" in value else value


def _as_headers(headers: Mapping[str, str | Secret]) -> dict[str, str | Secret]:
    return {name: _as_text_or_secret(value) for name, value in headers.items()}


def _as_url(url: str) -> str:
    return str(url).rstrip("/")


def _as_names(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(names)


def _check_url(settings: CloudApiSettings, attribute: Attribute[str], url: str) -> None:
    if not url and settings.offline:
        return
    parts = _split_url(url, attribute.name)
    if parts.query or parts.fragment:
        raise ValuesError(
            f"{attribute.name} is an address without ? and #; give what the endpoint wants beside "
            "it in headers",
            path=attribute.name,
        )


def _split_url(url: str, name: str) -> Any:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or not url.isascii() or any(c.isspace() for c in url):
        raise ValuesError(
            f"{name} is an address such as https://api.example.com/v1"
            + ("" if url else "; it has no default"),
            path=name,
        )
    if parts.username is not None or parts.password is not None:
        raise ValuesError(
            f"{name} holds a user name or password, which logs would show; "
            + ("give the whole address by reference" if name == "proxy" else "use api_key"),
            path=name,
        )
    return parts


def _names_only(headers: Mapping[str, object]) -> str:
    return "{" + ", ".join(f"{name!r}: ***" for name in headers) + "}"


def _check_proxy(_settings: object, attribute: Any, proxy: str | Secret) -> None:
    if proxy and isinstance(proxy, str):
        _split_url(proxy, attribute.name)


def _check_headers(settings: CloudApiSettings, _: object, headers: Mapping[str, object]) -> None:
    for name, value in headers.items():
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
            raise ValuesError("headers has a name that is no header name", path="headers")
        if name.lower() in _OWN_HEADERS:
            raise ValuesError(f"headers can't set {name}: the backend sets it", path="headers")
        if name.lower() == "authorization" and settings.api_key is not None:
            raise ValuesError("headers can't set Authorization beside api_key", path="headers")
        if isinstance(value, str):
            sendable(value, f"headers.{name}")
        elif not isinstance(value, Secret):
            raise ValuesError(f"headers.{name} is a text or a reference", path="headers")


def _check_params(_settings: object, _attribute: object, params: tuple[str, ...]) -> None:
    if unknown := sorted(set(params) - PARAM_NAMES):
        raise ValuesError(
            f"params has unknown names: {', '.join(unknown)}; "
            f"known are {', '.join(sorted(PARAM_NAMES))}",
            path="params",
        )
    if "grammar" in params:
        raise ValuesError(
            "params can't have grammar: endpoints that take one read another syntax", path="params"
        )


def _check_organization(_settings: object, _attribute: object, organization: str) -> None:
    if organization:
        sendable(organization, "organization")


def _check_client_cert(settings: CloudApiSettings, _: object, key_file: str | None) -> None:
    if key_file is not None and settings.client_cert_file is None:
        raise ValuesError("client_key_file goes with client_cert_file", path="client_key_file")


def _time_limit(default: float) -> Any:
    return field(default=default, validator=validators.gt(0))


def sendable(value: str, name: str) -> str:
    """The value of a header, checked: printable ASCII.

    Raises `ValuesError` for the setting `name`, which does not show the value.
    """
    if not value.isascii() or not value.isprintable() or value != value.strip() or not value:
        raise ValuesError(
            f"{name} can't be sent: it is empty, begins or ends with a space, or holds a line "
            "break, a control character or a character that is not ASCII; it may be cut, or have "
            "been copied with something around it",
            path=name,
        )
    return value


@frozen(kw_only=True)
class CloudApiSettings:
    """Where the endpoint is, how to reach it, and what it takes. Raises `ValuesError`.

    The environment has no say: proxies, `.netrc` and cookies are ignored.
    """

    offline: bool = False
    """Answer from the offline kernel: no endpoint, no network."""

    base_url: str = field(default="", converter=_as_url, validator=_check_url)
    """Address up to, without, `/chat/completions`, such as `https://api.example.com/v1`."""

    model: str = ""
    """Model to load when `load_model` is given no id."""

    api_key: Secret | None = field(default=None, converter=_as_secret)
    """Sent as `Authorization: Bearer …`; by reference, `${env:NAME}` or `${file:PATH}`."""

    organization: str = field(default="", validator=_check_organization)
    """Sent as `OpenAI-Organization`."""

    headers: Mapping[str, str | Secret] = field(
        factory=dict,
        converter=_as_headers,
        validator=_check_headers,
        repr=_names_only,
    )
    """Further headers of each request. A value may be a reference to a secret."""

    proxy: str | Secret = field(default="", converter=_as_text_or_secret, validator=_check_proxy)
    """Address of an HTTP proxy. One with a password is given by reference."""

    ca_file: str | None = None
    """PEM file with the CAs to trust instead of the system's."""

    client_cert_file: str | None = None
    """PEM file with the certificate that the endpoint asks of its clients."""

    client_key_file: str | None = field(default=None, validator=_check_client_cert)
    """PEM file with that certificate's key, where it is not in the same file."""

    on_premises: bool = False
    """The endpoint is on site: say so only when no prompt leaves the site by it."""

    timeout_ms: float = _time_limit(120_000.0)
    """For the whole of an answer that is not streamed; of a stream, up to its first event."""

    connect_timeout_ms: float = _time_limit(5_000.0)
    """For name resolution, TCP, proxy and TLS together."""

    idle_timeout_ms: float = _time_limit(60_000.0)
    """For each silence in a stream after its first event."""

    max_concurrency: int = field(default=16, validator=validators.ge(1))
    """Calls at a time; it is the limit of connections too."""

    max_tokens: int = field(default=DEFAULT_MAX_TOKENS, validator=validators.ge(1))
    """Limit of an answer when the call gives none; one is always sent."""

    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = field(
        default="max_tokens", validator=validators.in_(("max_tokens", "max_completion_tokens"))
    )
    """The name by which the endpoint reads that limit."""

    params: tuple[str, ...] = field(
        default=STANDARD_PARAMS, converter=_as_names, validator=_check_params
    )
    """Generation parameters that the endpoint honours; any other is refused."""

    stream_usage: bool = True
    """Ask for the token counts of a stream. Without, or when none come, they are estimates."""

    model_list: Literal["required", "absent"] = field(
        default="required", validator=validators.in_(("required", "absent"))
    )
    """`required`: healthy when `/models` lists the model. `absent`: when the endpoint answers."""

    verify_model: bool = False
    """`load_model` asks the endpoint for its list first and fails unless the model is in it."""


def capabilities_of(settings: CloudApiSettings, *, offline: bool) -> BackendCapabilities:
    """What a backend of these settings can do; `offline`: whether the kernel answers.

    The kernel has no tokens that could be likely, and its answers have one form.
    """
    params = frozenset((*settings.params, "max_tokens"))
    if offline:
        params -= {"logprobs", "top_logprobs", "response_format"}
    return BackendCapabilities(
        streaming=True,
        max_concurrency=settings.max_concurrency,
        on_premises=settings.on_premises,
        params=params,
        offline_mode=True,
    )
