"""iAOP backend `cloud-api`: any OpenAI-compatible chat-completions endpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from iaop_cloud_api.settings import CloudApiSettings

if TYPE_CHECKING:
    from iaop_cloud_api.backend import CloudApiBackend

__all__ = ["CloudApiBackend", "CloudApiSettings"]


def __getattr__(name: str) -> Any:
    # Importing the package, as core does to read its hooks, must not pay for the HTTP client.
    if name == "CloudApiBackend":
        from iaop_cloud_api.backend import CloudApiBackend

        return CloudApiBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
