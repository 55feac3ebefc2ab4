"""Where a server is and which protocol it is spoken to with."""

from __future__ import annotations

import re
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

from attrs import frozen

from iaop_core.errors import ValuesError

ProtocolName: TypeAlias = Literal["grpc", "http"]

_SCHEMES: dict[str, tuple[ProtocolName, bool]] = {
    "grpc": ("grpc", False),
    "grpcs": ("grpc", True),
    "http": ("http", False),
    "https": ("http", True),
}
_HOST = re.compile(r"[\w.-]+|[0-9a-f:.]+(%[\w.-]+)?")  # a name in any script, or an IPv6 address
_DEFAULT_PORTS: dict[ProtocolName, int] = {"grpc": 8001, "http": 8000}


@frozen
class ServerAddress:
    """A Triton server's address; `str()` of it is the URL, which holds no secret."""

    protocol: ProtocolName
    host_port: str
    tls: bool = False

    def __str__(self) -> str:
        return f"{self.protocol}{'s' if self.tls else ''}://{self.host_port}"

    @classmethod
    def from_url(cls, url: str, *, prefer_grpc: bool, setting: str = "server_url") -> ServerAddress:
        """Read a URL; a bare `host:port` is gRPC or HTTP as preferred.

        Raises `ValuesError`, never quoting the URL: a mistaken one may hold a password.
        """

        def refused(reason: str) -> ValuesError:
            return ValuesError(
                f"{setting} {reason}; it is host:port, or that after grpc://, grpcs://, http:// or "
                "https://",
                path=setting,
            )

        try:
            parts = urlsplit(url if "://" in url else f"//{url}")
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise refused("is no address") from error
        scheme = parts.scheme or ("grpc" if prefer_grpc else "http")
        if scheme not in _SCHEMES:
            raise refused("has an unknown scheme")
        protocol, tls = _SCHEMES[scheme]
        if parts.username is not None or parts.password is not None:
            raise refused("holds a user or password, which stand in username and password")
        if port == 0 or parts.path.strip("/") or parts.query or parts.fragment:
            raise refused("is no address")
        if not host or not _HOST.fullmatch(host):
            raise refused("names no host")
        shown_host = f"[{host}]" if ":" in host else host
        return cls(protocol, f"{shown_host}:{port or _DEFAULT_PORTS[protocol]}", tls)
