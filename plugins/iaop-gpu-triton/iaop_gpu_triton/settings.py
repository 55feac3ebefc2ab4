"""What a site can set on the backend, and what the backend can do. Imports no SDK."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from attrs import Attribute, field, frozen

from iaop_core import BackendCapabilities, Secret
from iaop_core.errors import ValuesError

NAME = "gpu-triton"

PARAMS = frozenset(
    {
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "stop",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
    }
)
"""The generation parameters that some contract carries; a loaded model may take fewer."""

_ROLES = frozenset({"prompt", "answer", "stream", *PARAMS})
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+")  # RFC 9110, 5.6.2; gRPC wants lower case
_OWN_HEADER = re.compile(
    r"accept-encoding|connection|content-(encoding|length|type)|expect|grpc-.*|host|keep-alive|te|"
    r"trailer|transfer-encoding|upgrade|user-agent"
)
_SECRET_HEADERS = frozenset({"authorization", "proxy-authorization", "cookie"})
_VERSION = re.compile(r"[1-9][0-9]{0,17}", re.ASCII)  # Triton skips folders with other names
_MOST = 2**31 - 1
"""Of milliseconds and bytes: gRPC counts both with 32 bits."""
_MOST_KEEPALIVE_MS = 32_767_000  # Linux: TCP_KEEPIDLE is at most 32767 s


def _as_secret(value: Secret | str | None) -> Secret | None:
    return Secret(value) if isinstance(value, str) else value


def _as_urls(urls: Any) -> Any:
    return tuple(urls) if isinstance(urls, Sequence) and not isinstance(urls, str) else urls


def _as_headers(headers: Any) -> Any:
    if not isinstance(headers, Mapping):
        return headers
    return {
        str(name).lower(): Secret(value) if isinstance(value, str) and "${" in value else value
        for name, value in headers.items()
    }


def _names_only(mapping: Mapping[str, object]) -> str:
    return "{" + ", ".join(f"{name!r}: ***" for name in mapping) + "}"


def _check_text(_settings: object, attribute: Attribute[Any], value: Any) -> None:
    if not isinstance(value, str):
        raise ValuesError(f"{attribute.name} is a text", path=attribute.name)


def _check_mapping(_settings: object, attribute: Attribute[Any], value: Any) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValuesError(f"{attribute.name} is a mapping of names", path=attribute.name)


def _check_version(_settings: object, _: object, version: Any) -> None:
    if version != "" and not (isinstance(version, str) and _VERSION.fullmatch(version)):
        raise ValuesError(
            'model_version is the number of a version as a text, such as "2"', path="model_version"
        )


def _check_urls(_settings: object, attribute: Attribute[Any], urls: Any) -> None:
    if not isinstance(urls, tuple) or not all(isinstance(url, str) and url for url in urls):
        raise ValuesError(f"{attribute.name} is a list of addresses", path=attribute.name)


def _check_headers(_settings: object, _: object, headers: Mapping[str, Any]) -> None:
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name):
            raise ValuesError("headers has a name that is no header name", path="headers")
        if _OWN_HEADER.fullmatch(name):
            raise ValuesError(f"headers can't set {name}: the client sets it", path="headers")
        if name.endswith("-bin"):
            raise ValuesError(
                f"headers can't set {name}: gRPC keeps names with -bin for values that are no text",
                path="headers",
            )
        if isinstance(value, Secret):
            continue
        if name in _SECRET_HEADERS:
            raise ValuesError(
                f"headers.{name} is given by reference, ${{env:NAME}} or ${{file:PATH}}",
                path="headers",
            )
        if not (
            isinstance(value, str) and value.isascii() and value.isprintable() and value.strip()
        ):
            raise ValuesError(
                f"headers.{name} is a text of printable ASCII, or a reference to a secret",
                path="headers",
            )


def _check_tensors(_settings: object, _: object, tensors: Mapping[str, str]) -> None:
    if unknown := sorted(set(tensors) - _ROLES):
        raise ValuesError(
            f"tensors has unknown roles: {', '.join(unknown)}; known are "
            f"{', '.join(sorted(_ROLES))}",
            path="tensors",
        )
    if tensors and not {"prompt", "answer"} <= tensors.keys():
        raise ValuesError("tensors names at least prompt and answer", path="tensors")


def _check_needed(_settings: object, attribute: Attribute[Any], text: str) -> None:
    if not text.strip():
        raise ValuesError(f"{attribute.name} is empty", path=attribute.name)


def _check_compression(_settings: object, _: object, compression: object) -> None:
    if compression not in ("none", "gzip", "deflate"):
        raise ValuesError("compression is none, gzip or deflate", path="compression")


def _text(default: str = "", *, needed: bool = False) -> Any:
    return field(default=default, validator=[_check_text, *([_check_needed] if needed else [])])


def _number(default: int | None, *, least: int = 1, most: int = _MOST) -> Any:
    """A whole number in a range; None too where that is the default."""

    def check(_settings: object, attribute: Attribute[Any], value: Any) -> None:
        if value is None and default is None:
            return
        if type(value) is not int or not least <= value <= most:
            raise ValuesError(
                f"{attribute.name} is a whole number from {least} to {most}", path=attribute.name
            )

    return field(default=default, validator=check)


def _mapping() -> Any:
    return field(factory=dict, validator=_check_mapping)


@frozen(kw_only=True)
class GpuTritonSettings:
    """Settings of `GpuTritonBackend`, under `settings` of a backend in the values.

    Times are in milliseconds. Raises `ValuesError`, which is a `ValueError`, naming the setting.
    """

    server_url: str = _text("triton:8001", needed=True)
    """`grpc://`, `grpcs://`, `http://` or `https://` and `host:port`, or a bare `host:port`; the
    ports are 8001 for gRPC and 8000 for HTTP where none is given."""
    model_name: str = _text("llm-70b-onnx", needed=True)
    """The model that is loaded when `load_model` is given no other."""
    model_version: str = field(default="", validator=_check_version)
    """A version to pin, such as `"2"`; empty: the server's choice, by its version policy."""
    prefer_grpc: bool = True
    """What a bare `host:port` speaks: gRPC, or HTTP when false."""
    max_concurrency: int = _number(16)
    """Calls at a time, over all servers; the gateway keeps the others waiting."""
    timeout_ms: int = _number(30_000)
    """For the whole of a plain answer; of a stream, for the wait for its first response and for
    each silence after it, however long the whole takes."""
    max_tokens: int = _number(256)
    """Tokens of an answer when the call does not say."""
    offline: bool = False
    """Answer from the offline kernel; no server is contacted."""

    replica_urls: tuple[str, ...] = field(default=(), converter=_as_urls, validator=_check_urls)
    """Further servers with the same model. A call goes to the one with the fewest calls."""

    connect_timeout_ms: int = _number(5_000)
    """For the connection, TLS included."""
    first_token_timeout_ms: int | None = _number(None)
    """For a stream's first response; None: `timeout_ms`."""
    token_timeout_ms: int | None = _number(None)
    """For each silence in a stream after its first response; None: `timeout_ms`."""
    total_timeout_ms: int | None = _number(None)
    """For the whole of an answer, streamed or not; None: `timeout_ms` for a plain one, no limit for
    a stream."""
    keepalive_ms: int = _number(300_000, most=_MOST_KEEPALIVE_MS)
    """How often to ask a silent connection whether its peer is there. Triton drops connections that
    ask more often than its `--grpc-http2-min-recv-ping-interval-without-data`, 300000. At most
    32767 s, which is Linux's limit."""

    chat_template: str = _text()
    """A Jinja file, or a folder with `chat_template.jinja` or `tokenizer_config.json`; empty: a
    single user turn as it is, and a longer chat as `role: content` paragraphs."""
    send_bos: bool = False
    """Leave the beginning-of-text token that a template writes: for a server whose tokenizer adds
    none itself."""
    tensors: Mapping[str, str] = field(factory=dict, validator=[_check_mapping, _check_tensors])
    """For a model of no known contract: its tensors by role. `prompt` and `answer` are needed;
    `stream` and the generation parameters may be named too."""
    strip_prompt: bool = True
    """Take the prompt off the beginning of an answer, where a model can't be told to leave it."""

    load_config: Mapping[str, Any] = _mapping()
    """The model's configuration for the repository API's load, in place of its file's."""
    load_files: Mapping[str, str] = _mapping()
    """Files for that load: their place in the model's folder, such as `1/model.py`, and the local
    file. They need `load_config`."""

    ca_file: str = _text()
    """PEM file with the CAs to trust instead of the system's."""
    client_cert_file: str = _text()
    """PEM file with the certificate that the server asks of its clients."""
    client_key_file: str = _text()
    """PEM file with that certificate's key."""
    bearer_token: Secret | None = field(default=None, converter=_as_secret)
    """Sent as `Authorization: Bearer …`; by reference, `${env:NAME}` or `${file:PATH}`."""
    username: str = _text()
    """For basic authorisation, with `password`."""
    password: Secret | None = field(default=None, converter=_as_secret)
    headers: Mapping[str, str | Secret] = field(
        factory=dict,
        converter=_as_headers,
        validator=[_check_mapping, _check_headers],
        repr=_names_only,
    )
    """Further headers (over gRPC: metadata) of each request. A value may be a reference; one that
    holds credentials must be."""
    compression: Literal["none", "gzip", "deflate"] = field(
        default="none", validator=_check_compression
    )
    """Of requests over gRPC; answers come as the server is set up."""
    max_message_bytes: int = _number(64 * 1024 * 1024, least=1024)
    """Longest message, either way. Triton's own limit over HTTP is its `--http-max-input-size`."""

    def __attrs_post_init__(self) -> None:
        if bool(self.client_cert_file) != bool(self.client_key_file):
            raise ValuesError(
                "client_cert_file and client_key_file go together", path="client_cert_file"
            )
        if bool(self.username) != (self.password is not None):
            raise ValuesError("username and password go together", path="username")
        ways = [self.bearer_token is not None, bool(self.username), "authorization" in self.headers]
        if sum(ways) > 1:
            raise ValuesError(
                "bearer_token, username and an authorization header exclude each other",
                path="headers",
            )
        if self.load_files and not self.load_config:
            raise ValuesError(
                "load_files need load_config: Triton takes files with a configuration only",
                path="load_files",
            )

    @property
    def capabilities(self) -> BackendCapabilities:
        """What a backend with these settings can do, with a model that takes all parameters."""
        return BackendCapabilities(
            streaming=True,
            max_concurrency=self.max_concurrency,
            on_premises=True,
            params=PARAMS,
            offline_mode=True,
        )
