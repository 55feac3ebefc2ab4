"""What a site can set on the backend, and what the backend can do. Imports no SDK."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from attrs import Attribute, field, frozen, validators

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


def _as_secret(value: Secret | str | None) -> Secret | None:
    return Secret(value) if isinstance(value, str) else value


def _as_headers(headers: Mapping[str, str | Secret]) -> dict[str, str | Secret]:
    return {
        str(name).lower(): Secret(value) if isinstance(value, str) and "${" in value else value
        for name, value in headers.items()
    }


def _names_only(mapping: Mapping[str, object]) -> str:
    return "{" + ", ".join(f"{name!r}: ***" for name in mapping) + "}"


def _check_urls(settings: GpuTritonSettings, attribute: Attribute[Any], urls: Any) -> None:
    if isinstance(urls, str) or not all(isinstance(url, str) and url for url in urls):
        raise ValuesError(f"{attribute.name} is a list of addresses", path=attribute.name)


def _check_headers(settings: GpuTritonSettings, _: object, headers: Mapping[str, Any]) -> None:
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name):
            raise ValuesError("headers has a name that is no header name", path="headers")
        if not isinstance(value, Secret) and not (
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


def _milliseconds(default: int | None) -> Any:
    return field(default=default, validator=validators.optional(validators.ge(1)))


@frozen(kw_only=True)
class GpuTritonSettings:
    """Settings of `GpuTritonBackend`, under `settings` of a backend in the values.

    Times are in milliseconds. Raises `ValuesError`, or `ValueError` for a number out of range.
    """

    server_url: str = field(default="triton:8001", validator=validators.min_len(1))
    """`grpc://`, `grpcs://`, `http://` or `https://` and `host:port`, or a bare `host:port`; the
    ports are 8001 for gRPC and 8000 for HTTP where none is given."""
    model_name: str = field(default="llm-70b-onnx", validator=validators.min_len(1))
    """The model that is loaded when `load_model` is given no other."""
    model_version: str = ""
    """A version to pin, such as `"2"`; empty: the server's choice, by its version policy."""
    prefer_grpc: bool = True
    """What a bare `host:port` speaks: gRPC, or HTTP when false."""
    max_concurrency: int = field(default=16, validator=validators.ge(1))
    """Calls at a time, over all servers; the gateway keeps the others waiting."""
    timeout_ms: int = field(default=30_000, validator=validators.ge(1))
    """For the whole of a plain answer; of a stream, for the wait for its first response and for
    each silence after it, however long the whole takes."""
    max_tokens: int = field(default=256, validator=validators.ge(1))
    """Tokens of an answer when the call does not say."""
    offline: bool = False
    """Answer from the offline kernel; no server is contacted."""

    replica_urls: tuple[str, ...] = field(default=(), converter=tuple, validator=_check_urls)
    """Further servers with the same model. A call goes to the one with the fewest calls."""

    connect_timeout_ms: int = field(default=5_000, validator=validators.ge(1))
    """For the connection, TLS included."""
    first_token_timeout_ms: int | None = _milliseconds(None)
    """For a stream's first response; None: `timeout_ms`."""
    token_timeout_ms: int | None = _milliseconds(None)
    """For each silence in a stream after its first response; None: `timeout_ms`."""
    total_timeout_ms: int | None = _milliseconds(None)
    """For the whole of an answer, streamed or not; None: `timeout_ms` for a plain one, no limit for
    a stream."""
    keepalive_ms: int = field(default=300_000, validator=validators.ge(1))
    """How often to ask a silent connection whether its peer is there. Triton drops connections that
    ask more often than its `--grpc-http2-min-recv-ping-interval-without-data`, 300000."""

    chat_template: str = ""
    """A Jinja file, or a folder with `chat_template.jinja` or `tokenizer_config.json`; empty: a
    single user turn as it is, and a longer chat as `role: content` paragraphs."""
    send_bos: bool = False
    """Leave the beginning-of-text token that a template writes: for a server whose tokenizer adds
    none itself."""
    tensors: Mapping[str, str] = field(factory=dict, validator=_check_tensors)
    """For a model of no known contract: its tensors by role. `prompt` and `answer` are needed;
    `stream` and the generation parameters may be named too."""
    strip_prompt: bool = True
    """Take the prompt off the beginning of an answer, where a model can't be told to leave it."""

    load_config: Mapping[str, Any] = field(factory=dict)
    """The model's configuration for the repository API's load, in place of its file's."""
    load_files: Mapping[str, str] = field(factory=dict)
    """Files for that load: their place in the model's folder, such as `1/model.py`, and the local
    file. They need `load_config`."""

    ca_file: str = ""
    """PEM file with the CAs to trust instead of the system's."""
    client_cert_file: str = ""
    """PEM file with the certificate that the server asks of its clients."""
    client_key_file: str = ""
    """PEM file with that certificate's key."""
    bearer_token: Secret | None = field(default=None, converter=_as_secret)
    """Sent as `Authorization: Bearer …`; by reference, `${env:NAME}` or `${file:PATH}`."""
    username: str = ""
    """For basic authorisation, with `password`."""
    password: Secret | None = field(default=None, converter=_as_secret)
    headers: Mapping[str, str | Secret] = field(
        factory=dict, converter=_as_headers, validator=_check_headers, repr=_names_only
    )
    """Further headers (over gRPC: metadata) of each request. A value may be a reference."""
    compression: Literal["none", "gzip", "deflate"] = field(
        default="none", validator=validators.in_(("none", "gzip", "deflate"))
    )
    """Of requests over gRPC; answers come as the server is set up."""
    max_message_bytes: int = field(default=64 * 1024 * 1024, validator=validators.ge(1024))
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
