"""Where the server is and which protocol it is spoken to with."""

from __future__ import annotations

from typing import Literal, TypeAlias
from urllib.parse import urlsplit

from attrs import frozen

from iaop_core.errors import ValuesError

ProtocolName: TypeAlias = Literal["grpc", "http"]

_PROTOCOLS: dict[str, ProtocolName] = {"grpc": "grpc", "http": "http"}
_DEFAULT_PORTS: dict[ProtocolName, int] = {"grpc": 8001, "http": 8000}


@frozen
class ServerAddress:
    """A Triton server's address; `str()` of it is the URL, which holds no secret."""

    protocol: ProtocolName
    host_port: str

    def __str__(self) -> str:
        return f"{self.protocol}://{self.host_port}"

    @classmethod
    def from_url(cls, url: str, *, prefer_grpc: bool) -> ServerAddress:
        """Read `server_url`; a bare `host:port` is gRPC or HTTP as preferred.

        Raises `ValuesError`, never quoting the URL: a mistaken one may hold a password.
        """

        def refused(reason: str) -> ValuesError:
            return ValuesError(
                f"{reason}; it is host:port, grpc://host:port or http://host:port",
                path="server_url",
            )

        try:
            parts = urlsplit(url if "://" in url else f"//{url}")
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise refused("server_url is no address") from error
        scheme = parts.scheme or ("grpc" if prefer_grpc else "http")
        if scheme in ("grpcs", "https"):
            raise refused("server_url asks for TLS, which this version does not speak")
        protocol = _PROTOCOLS.get(scheme)
        if protocol is None:
            raise refused("server_url has an unknown scheme")
        if parts.username is not None or parts.password is not None:
            raise refused("server_url holds a user or password, which has no place there")
        if not host or parts.path.strip("/") or parts.query or parts.fragment:
            raise refused("server_url is no address")
        shown_host = f"[{host}]" if ":" in host else host
        return cls(protocol, f"{shown_host}:{port or _DEFAULT_PORTS[protocol]}")
